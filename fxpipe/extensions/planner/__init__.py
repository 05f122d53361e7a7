"""Chooses what a step is like, by predicting it: schedule, micro-batches, recomputation, cuts."""

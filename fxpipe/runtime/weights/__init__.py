"""Weights while they train: versions, updates, optimizers, checkpoints."""

"""Weights during training: versions, updates, optimizers, checkpoints."""

"""Checkpoints as a folder that plain PyTorch reads, of any number of ranks."""

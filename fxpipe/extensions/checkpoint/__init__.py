"""Checkpoints: all that training needs to go on, as one file, or as a folder of any number of ranks
that plain PyTorch reads."""

"""What fxpipe needs of PyTorch itself, and PyTorch does not offer."""

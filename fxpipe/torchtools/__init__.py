"""Tools that fxpipe needs and PyTorch does not offer."""

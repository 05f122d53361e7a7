"""Additions to PyTorch: tools that fxpipe needs and PyTorch does not offer."""

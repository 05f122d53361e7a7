"""Gradients and weights of which each replica keeps a part, for ``fxpipe.Sharding``."""

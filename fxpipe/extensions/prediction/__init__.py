"""Predicted weights in place of old ones, for ``fxpipe.Prediction``."""

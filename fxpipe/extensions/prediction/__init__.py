"""Predicted weights in place of old ones, for ``compile(..., predict=True)``."""

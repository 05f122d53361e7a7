"""Losses of micro-batches weighted by a function, for ``fxpipe.LossWeight``."""

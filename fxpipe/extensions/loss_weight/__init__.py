"""Losses of micro-batches weighted by a function of the user, for ``fxpipe.LossWeight``."""

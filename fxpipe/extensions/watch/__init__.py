"""``fxpipe.watch``: figures of a run while it trains, as one line, and for TensorBoard."""

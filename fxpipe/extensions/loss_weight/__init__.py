"""Weight the losses of micro-batches by a function."""

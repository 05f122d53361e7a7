"""Plans that are differentiated once for all sizes of micro-batches."""

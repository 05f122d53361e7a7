"""``pipe.metrics``: figures of the last step, for a logger."""

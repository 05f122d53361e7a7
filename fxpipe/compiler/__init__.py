"""From a model to what runs: tracing, placement, and the passes in their order."""

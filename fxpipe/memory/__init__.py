"""The memory of graphs, stages and optimizers, predicted or measured, counted by storage."""

"""The memory of graphs, stages and optimizers in bytes, predicted or measured."""

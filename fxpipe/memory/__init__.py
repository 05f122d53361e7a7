"""Memory, counted by storage: what graphs, stages and optimizers hold, predicted or counted."""

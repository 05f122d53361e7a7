"""The Python state that a model's code reads: it is watched, and may not be changed by a run."""

"""The best cut of a model into stages, among those of several orders of its operations."""

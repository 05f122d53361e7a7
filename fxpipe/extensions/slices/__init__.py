"""Pipes run sequences in slices, each of which reads the keys and values of those before it."""

"""Calls of a pipe in training mode, whose outputs autograd runs backward through."""

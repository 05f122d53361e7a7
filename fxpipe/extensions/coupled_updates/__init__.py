"""Tells of optimizers whose update of one parameter depends on the gradients of others."""

"""Warns of an optimizer that computes across parameters, where stages step by themselves."""

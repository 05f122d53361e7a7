"""Decide which stage computes what: measure nodes, assign them to stages, cut into a Plan."""

"""Kernels, which run a stage: one interface, and its implementations."""

"""Benchmarks for a GPU; ``--dry-run`` tries them without one. See the README."""

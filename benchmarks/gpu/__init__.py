"""Measurements on a GPU, each with ``--dry-run`` for machines without one; see its README."""

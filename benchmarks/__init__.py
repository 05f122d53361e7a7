"""Measurements, side by side in one run; each writes a file under ``benchmarks/results``."""

"""Benchmarks that compare alternatives in one run, and write ``benchmarks/results``."""

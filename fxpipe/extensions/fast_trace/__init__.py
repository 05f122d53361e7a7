"""Graphs and backwards by tracers of its own, which take less time than those of PyTorch."""

"""Compile a model to a program: trace it, cut it into stages, and run the list of passes."""

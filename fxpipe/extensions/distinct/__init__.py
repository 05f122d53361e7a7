"""Measures one of each of the different operations of a graph, in place of them all."""

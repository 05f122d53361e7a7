"""From a model to a program: tracing, partitioning, and the list of passes."""

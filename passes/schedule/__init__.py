"""Schedule → Schedule: what a pipe's options add."""

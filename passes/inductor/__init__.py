"""The graphs of stages, compiled by torch's inductor into libraries."""

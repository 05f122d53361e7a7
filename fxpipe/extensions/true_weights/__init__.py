"""True weights, which an optimizer tells where parameters hold something else."""

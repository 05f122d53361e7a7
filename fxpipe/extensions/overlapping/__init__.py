"""Batches that overlap without a flush, with several versions of the weights: 2BW, PipeDream,
cyclic data parallelism, and what runs and verifies them."""

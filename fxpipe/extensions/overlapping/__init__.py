"""Batches that overlap without a flush, with several versions of the weights: 2BW, PipeDream, and
what runs and verifies them."""

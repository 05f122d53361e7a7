"""Batches that overlap without a flush, with several versions of the weights: 2BW, PipeDream and
all other schedules whose delay is more than 0."""

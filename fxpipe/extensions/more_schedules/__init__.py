"""Further schedules: in a V with less memory, DualPipeV, and cyclic data parallelism."""

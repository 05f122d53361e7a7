"""Further schedules: in a V with less memory, and DualPipeV."""

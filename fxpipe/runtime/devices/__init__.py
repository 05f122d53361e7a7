"""The backends: what runs the devices' lists, on CPU threads and on CUDA streams."""

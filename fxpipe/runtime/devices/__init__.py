"""The backends, which run the devices' lists on CPU threads or on CUDA streams."""

"""Devices with streams, such as CUDA devices: what runs where, and what waits for what."""

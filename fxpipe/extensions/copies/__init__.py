"""Copies of stages on further devices, for schedules such as ``chimera``."""

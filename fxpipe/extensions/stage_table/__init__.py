"""The table of stages that ``print(pipe)`` shows."""

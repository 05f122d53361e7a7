"""Running a Program: the interpreter, the backends, weights and their versions, checkpoints."""

"""The opcodes of programs: all that the library knows of one is in its class."""

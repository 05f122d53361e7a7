"""The graphs of stages as libraries that torch's inductor compiles, for ``fxpipe.Inductor``."""

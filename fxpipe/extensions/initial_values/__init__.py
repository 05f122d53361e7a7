"""Initial values of a model that is built on the meta device: ``pipe.reset_parameters``."""

"""How replicas sum gradients and share updates, for ``fxpipe.Replicas``."""

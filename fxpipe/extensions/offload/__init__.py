"""What stages keep for their backwards outside of their devices' memory, for ``fxpipe.Offload``."""

"""Graphs by ``torch.fx`` in place of ``torch.export``, for ``fxpipe.Symbolic``."""

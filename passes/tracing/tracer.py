"""What an extension brings to make graphs in place of ``torch.export``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from torch import nn

from fxpipe.ir.traced import Traced


class Tracer(Protocol):
    """Makes the graphs of models. The graphs have leaf modules, so that autograd runs every
    backward and the loss is called as it is."""

    def trace(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        leaves: Collection[nn.Module],
    ) -> Traced:
        """The graph of a model in its present mode, for every size of a micro-batch.

        Args:
            model: the model, whose state is put back afterwards.
            args: positional inputs of one micro-batch.
            kwargs: keyword inputs of one micro-batch.
            leaves: submodules that have to be called as they are.

        Raises:
            TraceError: the model cannot be traced. With the names of the submodules around the
                line, the innermost that can be called as it is becomes a leaf module, and the model
                is traced again.
        """

    def calls(self, module: nn.Module) -> bool:
        """Whether a submodule is called as it is without being asked to be."""

"""The extension that traces models with ``torch.fx``."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.extend import Extension
from fxpipe.extensions.symbolic.trace import SymbolicTracer


@dataclass(frozen=True)
class Symbolic(Extension):
    """Trace models with ``torch.fx`` in place of ``torch.export``.

    Submodules of torch.nn are called as they are, like leaf modules, under autograd. Tracing
    takes less time, and one graph holds for all sizes of a batch; but no backward comes in halves,
    nothing is captured into CUDA graphs, and a line of the model's own ``forward`` that cannot be
    traced is refused.
    """

    def tracer(self) -> SymbolicTracer:
        """A tracer with ``torch.fx``."""
        return SymbolicTracer()

"""What becomes of lines that cannot be traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from fxpipe.errors import TraceError
from fxpipe.ir.traced import Traced
from fxpipe.passes.tracing.tracer import UntracedCalls

if TYPE_CHECKING:
    from fxpipe.compiler.options import Options


class Fallback:
    """Traces a model, and decides about lines that cannot be traced. This one refuses them; that
    of an extension may have parts of a model called as they are, without being traced.

    Attributes:
        model: the model.
        called: name → submodule that graphs call as it is. No trace looks into it. It may grow.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.called: dict[str, nn.Module] = {}

    def begin(self) -> None:
        """Look at the model before it is traced again, as it may have changed."""

    def trace(self, trace: Callable[[], Traced]) -> Traced:
        """The model's graph, which ``trace`` makes. Raises TraceError if a line cannot be
        traced."""
        return trace()

    def take_loss(self, error: TraceError) -> None:
        """Have the loss called as it is from now on. Raises ``error``, with which it could not be
        traced, if it cannot be."""
        raise error

    @contextmanager
    def calls(self) -> Iterator[UntracedCalls | None]:
        """Inside, the model is traced: the calls that its graph is to have; None if it has none."""
        yield None


def fallback_of(options: Options) -> Fallback:
    """The fallback of the extension that has one, or one that refuses."""
    made = (each.fallback(options) for each in options.extensions)
    return next((each for each in made if each is not None), Fallback(options.model))

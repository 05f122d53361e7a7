"""What an extension brings for lines that cannot be traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from torch import nn

from fxpipe.errors import TraceError


class UntracedCalls(Protocol):
    """The calls, in a run of a model, of submodules that its graph is to call as they are."""

    def opaque(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, each of these calls is one operation, for the model to be traced."""


class Fallback:
    """Traces a model, and decides about lines that cannot be traced. This one refuses them; that
    of an extension may have parts of a model called as they are, without being traced.

    Attributes:
        model: the model.
        called: name → submodule that graphs call as it is. No trace looks into it. It may grow.
        loss: whether graphs call the loss as it is, too.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.called: dict[str, nn.Module] = {}
        self.loss = False

    def begin(self) -> None:
        """Look at the model before it is traced again, as it may have changed."""

    def take(self, error: TraceError) -> None:
        """Have a part of the model around a line that cannot be traced called as it is from now on.
        Raises ``error``, or one that says more, if none can be."""
        raise error

    def tell(self) -> None:
        """Say which parts are called as they are, as a graph was made."""

    def take_loss(self, error: TraceError) -> None:
        """Have the loss called as it is from now on. Raises ``error``, with which it could not be
        traced, if it cannot be."""
        raise error

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Inside, the loss runs only to be looked at, as while a step is compiled."""
        yield

    @contextmanager
    def calls(self) -> Iterator[UntracedCalls | None]:
        """Inside, the model is traced: the calls that its graph is to have; None if it has none."""
        yield None

"""What an extension brings to make graphs, in place of ``torch.export`` or with it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import Tensor, fx, nn

from fxpipe.errors import TraceError
from fxpipe.ir.traced import Traced


class Tracer(Protocol):
    """Makes the graphs of models. They call modules of the model, so that autograd runs every
    backward and the loss is called as it is."""

    def trace(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        called: Collection[nn.Module],
    ) -> Traced:
        """The graph of a model in its present mode, for every size of a micro-batch.

        Args:
            model: the model, whose state is put back afterwards.
            args: positional inputs of one micro-batch.
            kwargs: keyword inputs of one micro-batch.
            called: submodules that have to be called as they are.

        Raises:
            TraceError: the model cannot be traced. With the names of the submodules around the
                line, it may be traced again, with one of them among ``called``.
        """

    def calls(self, module: nn.Module) -> bool:
        """Whether a submodule is called as it is without being asked to be."""


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

    def trace(self, trace: Callable[[], Traced]) -> Traced:
        """The model's graph, which ``trace`` makes. Raises TraceError if a line cannot be
        traced."""
        return trace()

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


def tensors_read(module: fx.GraphModule) -> dict[str, list[fx.Node]]:
    """Name in the model of each parameter or buffer → the nodes of a graph that read it themselves,
    or call a module that has it.

    A tensor with several names is listed under the first that the graph reads.
    """
    readers: dict[str, list[fx.Node]] = {}
    names: dict[int, str] = {}
    for node in module.graph.nodes:
        read: dict[str, Any] = {}
        if node.op == "call_module":
            called = module.get_submodule(str(node.target))
            tensors = (*called.named_parameters(), *called.named_buffers())
            read = {f"{node.target}.{name}": tensor for name, tensor in tensors}
        elif node.op == "get_attr":
            read = {str(node.target): operator.attrgetter(str(node.target))(module)}
        for name, tensor in read.items():
            if isinstance(tensor, Tensor):
                readers.setdefault(names.setdefault(id(tensor), name), []).append(node)
    return readers

"""What the graphs of a model depend on besides a call's inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import CodeType
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxpipe.compiler.number import NumberPlace
from fxpipe.compiler.options import Options

T = TypeVar("T")


KEPT = 16
"""The most calls of which results are kept: the ones used last."""


class Present(NamedTuple):
    """A model as it is now.

    Attributes:
        number: the number of its Python state. Graphs of other states do not serve.
        modules: its modules.
        parameters: its parameters.
        dense: its parameters that have strides.
    """

    number: int
    modules: Sequence[nn.Module]
    parameters: Sequence[Tensor]
    dense: Sequence[Tensor]


class Guard:
    """Watches a model between calls: if what its graphs depend on changes, it is traced anew.

    This one looks at modes, parameters and autocast. Graphs keep the plain Python state that the
    model's code reads (numbers, flags, globals) as it was in the trace. The extension that has the
    option "guard" watches that, too.

    Attributes:
        numbers: the numbers that are no arguments of calls and of which graphs take the value at
            each call: name → where it is.
        changed: what Python state has changed last, or "".
        calls_loss: whether the loss is called as it is, so that no graph depends on it.
    """

    changed = ""
    calls_loss = False

    def __init__(self, options: Options, called: Mapping[str, nn.Module]) -> None:
        """Watch nothing yet. Traces never look into ``called``, a mapping that may grow later."""
        self.options, self.called = options, called
        self.numbers: dict[str, NumberPlace] = {}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Note what the code that this thread runs inside reads."""
        yield

    def checked(self, run: Callable[[], T]) -> T:
        """Run the model, and refuse what it does that no graph could hold. May run it again."""
        with self.reading():
            return run()

    def ran(self, code: CodeType) -> bool:
        """Whether this code ran inside ``reading``, outside of the modules ``called``."""
        return False

    def fix(self, names: Collection[str]) -> None:
        """Let these ``numbers``, which graphs cannot take, be constants of graphs from now on."""

    def settle(self) -> None:
        """Let the present state count as unchanged, as the first run may set attributes."""

    def state(self) -> tuple[object, ...]:
        """Everything that traces depend on besides the call; ``Present.number`` comes first."""
        number, modules, parameters, dense = self.present()
        flags = tuple(map(attrgetter("training"), modules))
        trained = tuple([parameter.requires_grad for parameter in parameters])
        # ``.data`` may change these; strides and the number of entries together tell the shape
        strides = tuple(map(Tensor.stride, dense))
        counts = tuple(map(Tensor.numel, dense))
        dtypes = tuple([parameter.dtype for parameter in dense])
        device = self.options.places[0].type if self.options.places else "cpu"
        cast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        return number, flags, trained, (strides, counts, dtypes), cast, torch.get_default_dtype()

    def present(self) -> Present:
        """The model as it is now."""
        modules = [*self.options.model.modules()]
        return Present(0, modules, *parameters_of(self.options.model))


def parameters_of(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """A model's parameters, and those of them that have strides."""
    parameters: list[Tensor] = [*model.parameters()]
    kept = (each for each in parameters if not is_lazy(each))
    return parameters, [each for each in kept if each.layout is torch.strided]

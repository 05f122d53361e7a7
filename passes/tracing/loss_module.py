"""The loss as a module, to be captured with the model."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from fxpipe.errors import InputError
from fxpipe.ir.traced import Traced, Value
from fxpipe.torchtools.pytrees import together


class LossModule(nn.Module):
    """A loss as a module: ``forward(*leaves of the output, *targets)`` → scalar, or a tuple of the
    loss and the numbers beside it.

    It takes the output as flat tensors, because a graph cannot take objects of every class.
    """

    def __init__(
        self,
        loss: Callable[..., tuple[Any, Mapping[str, Any]]],
        function: Any,
        output: pytree.TreeSpec,
        logged: Sequence[str] = (),
    ) -> None:
        """Wrap ``loss(output, *targets)``, which returns the loss and the numbers ``logged`` with
        it, for an output of this pytree spec; see ``taken_apart``.

        If the user's ``function`` is a module, its buffers become buffers of this module.
        """
        super().__init__()
        self.loss = loss
        self.function = function
        self.logged = tuple(logged)
        self._output = output

    def _get_name(self) -> str:
        return "the loss"

    def forward(self, *given: Any) -> Any:  # traces and plans show this name
        count = self._output.num_leaves
        loss, logged = self.loss(together(given[:count], self._output), *given[count:])
        if logged.keys() != set(self.logged):
            raise InputError(
                f"the loss returns numbers beside it called {_listed(logged)}, and for the first "
                f"micro-batch {_listed(self.logged)}; let it return the same in every call"
            )
        return (loss, *(logged[name] for name in self.logged)) if logged else loss


def in_loss(error: BaseException | None) -> bool:
    """Whether an exception was raised while a loss ran."""
    frames = (
        frame for frame, _ in traceback.walk_tb(None if error is None else error.__traceback__)
    )
    return any(frame.f_code is LossModule.forward.__code__ for frame in frames)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


def own_loss(output: Any) -> Any:
    """The loss in a model's output: its ``loss``, or else the output itself."""
    loss = output.get("loss", output) if isinstance(output, dict) else output
    return getattr(loss, "loss", loss)


def returned_loss(traced: Traced) -> str | None:
    """The name of the scalar loss that a model returns; None if it returns none."""
    loss = own_loss(together(traced.outputs, traced.out_spec))
    if not isinstance(loss, Value):
        return None
    value = next(node.meta["val"] for node in traced.graph.nodes if node.name == loss.name)
    return loss.name if not value.dim() and value.is_floating_point() else None

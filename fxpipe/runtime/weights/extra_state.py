"""The extra state of modules, which they keep in state dicts beside parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fxpipe.errors import CheckpointError, told


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Name of a module → what its ``get_extra_state`` returns, of those that have it."""
    return {name: module.get_extra_state() for name, module in _having(model).items()}


def set_extra_states(model: nn.Module, saved: Mapping[str, Any]) -> Callable[[], None]:
    """Give modules the extra state of a checkpoint. One that the checkpoint does not name keeps its
    own. Returns a function that takes it back.

    Raises:
        CheckpointError: a module is missing, or does not take its state. All have their own then.
    """
    having = _having(model)
    before = {name: having[name].get_extra_state() for name in saved if name in having}

    def take_back() -> None:
        for name, state in before.items():
            having[name].set_extra_state(state)

    for name in saved:
        if name not in having:
            raise CheckpointError(
                f"the checkpoint is of another model: its module {name!r} has extra state, and the "
                "pipe's has no get_extra_state()"
            )
    for name, state in saved.items():
        try:
            having[name].set_extra_state(state)
        except Exception as error:
            take_back()
            raise CheckpointError(
                f"module {name!r} does not take the extra state of the checkpoint ({told(error)}); "
                "restore one that was made with this set_extra_state()"
            ) from error
    return take_back


def _having(model: nn.Module) -> dict[str, nn.Module]:
    own = nn.Module.get_extra_state
    return {n: m for n, m in model.named_modules() if type(m).get_extra_state is not own}

"""A module that stands in for another one, with the same parameters, buffers and submodules."""

from __future__ import annotations

from typing import Any

from torch import nn

from fxpipe.errors import InputError


class StandIn(nn.Module):
    """Shares its dictionaries of parameters, buffers and submodules with another module.

    It cannot be moved or copied, because compiled graphs refer to the tensors that it has.
    """

    _model: nn.Module

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._modules = model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training = model.training
        # not through nn.Module.__setattr__, which would register the model as its own submodule
        self.__dict__.update(_model=model)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise InputError(
            "a compiled model cannot be moved or cast: its graphs hold its devices and types; "
            "close() the pipe, change the model, and compile it again"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(
            "a pipe cannot be copied or pickled: it has threads and traced graphs; save its "
            "state_dict() and compile a new one"
        )

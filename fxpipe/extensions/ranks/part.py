"""Models of which this process has only a part: other ranks have the data of all other tensors,
which are on the meta device here."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxpipe.errors import InputError
from fxpipe.torchtools.part import allowed


def refuse_state(model: nn.Module, tensors: Collection[Tensor]) -> None:
    """Let ``state_dict`` of a model, of its submodules and of whatever holds it raise InputError
    where it would return one of these tensors without data; written to a file they would be lost.
    So does what computes one number of the gradients of all parameters, see ``Elsewhere``.
    """
    missing = {id(tensor) for tensor in tensors}
    for tensor in tensors:
        if type(tensor) is nn.Parameter and tensor.is_meta:
            tensor.__class__ = Elsewhere
    for module in model.modules():
        own = (*module._parameters.values(), *module._buffers.values())
        known = _refuse in module._state_dict_pre_hooks.values()
        if not known and any(id(tensor) in missing for tensor in own):
            module.register_state_dict_pre_hook(_refuse)


def _refuse(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if allowed.here:
        return
    transient = module._non_persistent_buffers_set
    for name, tensor in {**module._parameters, **module._buffers}.items():
        if tensor is not None and tensor.is_meta and name not in transient:
            raise InputError(
                f"{prefix + name!r} has no data in this process, which has only a part of the "
                "model; let every rank call pipe.save_hub(folder), which from_pretrained() reads, "
                "or pipe.save(folder), a checkpoint, or state = pipe.state_dict(full=True), and "
                "one of them torch.save(state, file); pipe.state_dict() has this process's part"
            )


_GRADIENT: Any = Tensor.grad
_WHOLE = {"clip_grad_norm_": "clip_norm=", "GradScaler": "scaler="}
"""Functions of torch that compute one number of all gradients → the option that takes its place."""


class Elsewhere(nn.Parameter):
    """A parameter whose data and gradient other processes have.

    Its gradient is None, which torch's functions leave out. So that processes do not clip by
    different norms, and do not skip different updates, those that need all gradients raise
    InputError.
    """

    @property
    def grad(self) -> Tensor | None:
        asks = re.split(r"\W", sys._getframe(1).f_code.co_qualname)[0]
        if asks in _WHOLE and self.is_meta:
            raise InputError(
                f"{asks} would see the gradients of this process alone, which has only a part of "
                f"the model; give compile(..., optimizer=..., {_WHOLE[asks]}...) in its place"
            )
        found: Tensor | None = _GRADIENT.__get__(self)
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _GRADIENT.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRADIENT.__delete__(self)


def refusing(model: nn.Module, attribute: Any) -> Any:
    """An attribute of a model. A method of it raises InputError as soon as it computes with a
    tensor that has no data in this process."""
    if not inspect.ismethod(attribute) or attribute.__self__ is not model:
        return attribute
    method: Callable[..., Any] = attribute

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _Refusing(model, method.__name__):
            return method(*args, **kwargs)

    return call


class _Refusing(TorchDispatchMode):
    """Inside, no operation runs on a tensor of a model that has no data. A mode sees what any
    method does, where hooks would see calls of modules alone."""

    def __init__(self, model: nn.Module, method: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        state = (*model.named_parameters(), *model.named_buffers())
        self._missing = {id(tensor): name for name, tensor in state if tensor.is_meta}
        self._method = method

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)) if self._missing else ():
            if isinstance(leaf, Tensor) and (name := self._missing.get(id(leaf))) is not None:
                raise InputError(
                    f"{self._method}() of the model computes with {name!r}, which has no data in "
                    "this process, as that has only a part of the model; give the weights to a "
                    "model of one device: let every rank call pipe.save_hub(folder) for plain = "
                    "from_pretrained(folder), or state = pipe.state_dict(full=True) for "
                    f"plain.load_state_dict(state), and one of them plain.{self._method}(...)"
                )
        return func(*args, **(kwargs or {}))

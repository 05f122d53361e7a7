"""What an optimizer keeps in attributes of its own, outside of the state of its parameters.

Torch's optimizers keep nothing there, and ``state_dict`` leaves it out. Those that users write may
count steps there, or keep tensors. A checkpoint has what differs from what the constructor made.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxpipe.errors import CheckpointError
from fxpipe.torchtools.optimizers import unshared_items

_PLAIN = (type(None), bool, int, float, str)
_KEPT = (*_PLAIN, complex, Tensor, dict, list, tuple, deque, set, frozenset)

# optimizer → its attributes when it was made; none where it had trained before
_made: WeakKeyDictionary[Optimizer, dict[str, Any]] = WeakKeyDictionary()


def note_made(optimizer: Optimizer, copy_of: Optimizer | None = None) -> None:
    """Take note of the attributes of an optimizer that was just made, maybe as a copy of one whose
    own attributes are known."""
    made = {} if optimizer.state else values_of(optimizer)
    _made[optimizer] = made if copy_of is None else _made.get(copy_of, made)


def values_of(optimizer: Optimizer) -> dict[str, Any]:
    """A copy of what its attributes hold."""
    return {name: unshared_items(value) for name, value in attributes(optimizer).items()}


def put_back(optimizer: Optimizer, values: Mapping[str, Any]) -> None:
    """Let its attributes be what ``values_of`` returned, and no others."""
    for name in attributes(optimizer).keys() - values.keys():
        delattr(optimizer, name)
    vars(optimizer).update(values)


def changed(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that are others than when it was made; not copied.

    Raises:
        CheckpointError: one holds what no checkpoint can.
    """
    made, found = _made.get(optimizer, {}), {}
    for name, value in attributes(optimizer).items():
        if name in made and _same(made[name], value):
            continue
        if _is_plain(value):
            found[name] = value
        elif _tells(value):
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps {name!r}, a {type(value).__name__}, outside of "
                "its state in a form that no checkpoint can hold; keep what belongs to a parameter "
                "in self.state[parameter], and other tensors and numbers as attributes, or in "
                "lists, tuples and dicts with names"
            )
    return found


def setting(optimizer: Optimizer, saved: Mapping[str, Any]) -> Callable[[], None]:
    """Check that an optimizer can have these attributes. Returns a function that sets them, and all
    others to what they were when it was made.

    Raises:
        CheckpointError: it cannot.
    """
    own, kind = vars(optimizer), type(optimizer)
    for name, value in saved.items():
        fits = _is_plain(value) and _fits(own.get(name), value)
        if name in _of_torch() or hasattr(kind, name) or not fits:
            raise CheckpointError(
                f"the checkpoint has {value!r:.60} for the attribute {name!r} of {kind.__name__}, "
                "which does not take it; give compile() the optimizer that it was made with"
            )

    def put() -> None:
        if first := _made.get(optimizer):
            put_back(optimizer, unshared_items(first))
        own.update(unshared_items({**saved}))

    return put


def attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Those that hold values, and that not every optimizer of torch's has; not copied."""
    if type(optimizer).__module__.startswith("torch.optim."):
        return {}
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _of_torch() and isinstance(value, _KEPT)
    }


@functools.cache
def _of_torch() -> frozenset[str]:
    base = Optimizer([nn.Parameter(torch.zeros(1))], {})
    return frozenset(vars(base)) | {"step", "_opt_called"}


def _fits(own: Any, value: Any) -> bool:
    """Whether a value that was read can replace an own one."""
    numbers = (int, float, Tensor)
    if own is None or value is None:
        return True
    return isinstance(value, numbers if isinstance(own, numbers) else type(own))


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    match one:
        case Tensor():
            alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
            return alike and not isinstance(one, nn.Parameter) and torch.equal(one, other)
        case dict():
            return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
        case list() | tuple() | deque():
            return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, _KEPT) and bool(one == other)


def _is_plain(value: Any) -> bool:
    """Whether a checkpoint can hold it."""
    match value:
        case Tensor():
            return not isinstance(value, nn.Parameter)
        case list() | tuple():
            return all(map(_is_plain, value))
        case dict():
            return all(isinstance(key, _PLAIN) and _is_plain(each) for key, each in value.items())
    return isinstance(value, _PLAIN)


def _tells(value: Any) -> bool:
    """Whether it holds tensors or numbers, and not parameters and other objects alone."""
    match value:
        case dict():
            return any(map(_tells, value.values()))
        case list() | tuple() | deque() | set() | frozenset():
            return any(map(_tells, value))
    return isinstance(value, Tensor | int | float | complex) and not isinstance(value, nn.Parameter)

"""The values that optimizers written by users keep in attributes, outside of parameter states.

They may count steps there, or keep tensors. Torch's own optimizers do not, and ``state_dict``
leaves attributes out. A checkpoint has those that differ from what the constructor set.
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

# optimizer → its attributes after construction; empty if it had already trained when noted
_initial: WeakKeyDictionary[Optimizer, dict[str, Any]] = WeakKeyDictionary()


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether the optimizer's class is from ``torch.optim``."""
    return type(optimizer).__module__.startswith("torch.optim.")


def note_made(optimizer: Optimizer, copy_of: Optimizer | None = None) -> None:
    """Note the attributes of a new optimizer, or for a copy those that its original was made
    with."""
    values = {} if optimizer.state else values_of(optimizer)
    _initial[optimizer] = values if copy_of is None else _initial.get(copy_of, values)


def values_of(optimizer: Optimizer) -> dict[str, Any]:
    """Copies of an optimizer's ``attributes``."""
    return {name: unshared_items(value) for name, value in attributes(optimizer).items()}


def put_back(optimizer: Optimizer, values: Mapping[str, Any]) -> None:
    """Set the attributes that ``values_of`` returned, and remove those added since."""
    for name in attributes(optimizer).keys() - values.keys():
        delattr(optimizer, name)
    vars(optimizer).update(values)


def changed(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that changed since the optimizer was made; not copied.

    Raises:
        CheckpointError: an attribute cannot be stored in a checkpoint.
    """
    initial, result = _initial.get(optimizer, {}), {}
    for name, value in attributes(optimizer).items():
        if name in initial and _same(initial[name], value):
            continue
        if _is_plain(value):
            result[name] = value
        elif _has_numbers(value):
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps {name!r}, a {type(value).__name__}, outside of "
                "its state in a form that no checkpoint can hold; keep what belongs to a parameter "
                "in self.state[parameter], and other tensors and numbers as attributes, or in "
                "lists, tuples and dicts with names"
            )
    return result


def setting(optimizer: Optimizer, saved: Mapping[str, Any]) -> Callable[[], None]:
    """Check that an optimizer takes saved attributes. Returns a function that sets them, and resets
    all others to what they were when the optimizer was made.

    Raises:
        CheckpointError: it does not take one.
    """
    current, kind = vars(optimizer), type(optimizer)
    for name, value in saved.items():
        fits = _is_plain(value) and _fits(current.get(name), value)
        if name in _of_torch() or hasattr(kind, name) or not fits:
            raise CheckpointError(
                f"the checkpoint has {value!r:.60} for the attribute {name!r} of {kind.__name__}, "
                "which does not take it; give compile() the optimizer that it was made with"
            )

    def put() -> None:
        if initial := _initial.get(optimizer):
            put_back(optimizer, unshared_items(initial))
        current.update(unshared_items({**saved}))

    return put


def attributes(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that a user's optimizer has besides those of ``torch.optim.Optimizer``, as far
    as they hold values; not copied."""
    if is_torchs(optimizer):
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


def _fits(current: Any, value: Any) -> bool:
    """Whether a saved value has a type that can replace the current value."""
    numbers = (int, float, Tensor)
    if current is None or value is None:
        return True
    return isinstance(value, numbers if isinstance(current, numbers) else type(current))


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    match a:
        case Tensor():
            alike = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
            return alike and not isinstance(a, nn.Parameter) and torch.equal(a, b)
        case dict():
            return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
        case list() | tuple() | deque():
            return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, _KEPT) and bool(a == b)


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


def _has_numbers(value: Any) -> bool:
    """Whether a value holds tensors or numbers, and not only parameters or other objects."""
    match value:
        case dict():
            return any(map(_has_numbers, value.values()))
        case list() | tuple() | deque() | set() | frozenset():
            return any(map(_has_numbers, value))
    return isinstance(value, Tensor | int | float | complex) and not isinstance(value, nn.Parameter)

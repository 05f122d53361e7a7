"""Copies of an optimizer with other parameter groups, to be stepped in its place."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def twin(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Any:
    """Copy an optimizer with other parameter groups; the copy shares its state and attributes.

    Step it with ``type(optimizer).step``, as the attribute ``step`` may be a scheduler's wrapper.
    """
    copy = object.__new__(type(optimizer))
    copy.__dict__.update(vars(optimizer))
    copy.__dict__.pop("step", None)
    copy.param_groups = list(groups)
    return copy


def copy_alone(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Any:
    """Copy an optimizer with other parameter groups, an empty state and no hooks. The copy shares
    nothing with the optimizer that a step may change in place."""
    copy = twin(optimizer, groups)
    for key, value in [*vars(copy).items()]:
        if key.startswith("_optimizer_") and key.endswith("_hooks"):
            vars(copy)[key] = OrderedDict()
        elif key not in ("param_groups", "state"):
            vars(copy)[key] = unshared_items(value)
    copy.state = defaultdict(dict)
    return copy


def unshared_items(value: Any) -> Any:
    """Copy tensors, and containers of them; return parameters and other objects as they are."""
    match value:
        case nn.Parameter():
            return value
        case Tensor():
            return value.detach().clone()
        case dict():
            copy = value.copy()
            copy.update({key: unshared_items(item) for key, item in value.items()})
            return copy
        case list():
            return [unshared_items(item) for item in value]
        case tuple() if type(value) is tuple:
            return tuple(unshared_items(item) for item in value)
        case deque():
            return deque(map(unshared_items, value), value.maxlen)
        case set():
            return set(value)
    return value

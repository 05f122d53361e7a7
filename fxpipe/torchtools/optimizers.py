"""Copies of an optimizer with other parameter groups, to be stepped in its place."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree


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
            vars(copy)[key] = pytree.tree_map_only(Tensor, _unshared, value)
    copy.state = defaultdict(dict)
    return copy


def _unshared(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()

"""The memory of an optimizer and of its step, in bytes, found without stepping it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.torchtools.optimizers import alone
from fxpipe.torchtools.pytrees import pieces

_SIDE = 64
_FEW = 1 << 22
"""Parameters of fewer bytes stand there with data: PyTorch computes that far sooner than shapes."""

_MOST_KNOWN = 1 << 12
_known: dict[tuple[Any, ...], tuple[int, int]] = {}
"""What was found for optimizers of PyTorch: settings and layouts of parameters tell it."""


def optimizer_memory(optimizer: Optimizer) -> tuple[int, int]:
    """The bytes of an optimizer's state, now or, before its first step, after it; and the most that
    a step needs besides parameters, gradients and state.

    A copy of the optimizer makes two steps over zeros of the same shapes, which have no data where
    they are large. If it needs data, or asks for the device, it steps over small tensors, and the
    result is scaled. It is kept for optimizers of PyTorch that are alike.
    """
    like = _like(optimizer)
    if like is None or like not in _known:
        state, step = _found(optimizer)
        if like is not None:
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            _known[like] = state, step
    else:
        state, step = _known[like]
    return _bytes(optimizer.state) or state, step


def _like(optimizer: Optimizer) -> tuple[Any, ...] | None:
    """What tells the memory of an optimizer; None where its class or a setting is not PyTorch's."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return None
    key: list[Any] = [type(optimizer), torch.get_default_dtype()]
    for group in optimizer.param_groups:
        for name, value in sorted(group.items()):
            if name == "params":
                key += [(p.shape, p.stride(), p.dtype, p.device, p.requires_grad) for p in value]
            elif isinstance(value, Tensor):
                key.append((name, value.shape, value.dtype, value.device))
            elif isinstance(value, int | float | str | tuple | None):
                key.append((name, value))
            else:
                return None
    return tuple(key)


def _found(optimizer: Optimizer) -> tuple[int, int]:
    """The bytes of its state after its first steps, and what a step needs besides."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    few = sum(p.nbytes for p in parameters) < _FEW and all(p.is_cpu for p in parameters)
    try:
        device = "cpu" if few else "meta"
        return _steps(optimizer, [_zeros(group, device) for group in optimizer.param_groups])
    except Exception:
        return _in_proportion(optimizer, parameters)


def _steps(optimizer: Optimizer, groups: list[dict[str, Any]]) -> tuple[int, int]:
    """The bytes of the state after two steps of a copy, and what the second step needed."""
    stepped, step = alone(optimizer, groups), type(optimizer).step
    step(stepped)
    with Counting() as counting:
        step(stepped)
    return _bytes(stepped.state), counting.peak


def _zeros(group: Mapping[str, Any], device: str) -> dict[str, Any]:
    """A parameter group with zeros for its parameters and gradients."""
    own = group["params"]
    made = [nn.Parameter(torch.zeros_like(p, device=device), p.requires_grad) for p in own]
    for parameter in made:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    found = {**group, "params": made}
    if found.get("foreach", 0) is None and own and all(p.is_cuda for p in own):
        found["foreach"] = True  # as torch chooses on the real device
    return found


def _in_proportion(optimizer: Optimizer, parameters: Sequence[Tensor]) -> tuple[int, int]:
    """Scale up steps over 3 and over 6 small parameters: the difference tells whether an optimizer
    needs memory for all parameters at once, or for one after another."""
    total = sum(parameter.nbytes for parameter in parameters)
    largest = max((parameter.nbytes for parameter in parameters), default=0)
    try:
        (state, three), (_, six) = (_small(optimizer, parameters[0], count) for count in (3, 6))
    except Exception:
        return 2 * total, 2 * largest  # Adam's
    each = max(six - three, 0) / 3
    return int(state / 3 * total), int(each * total + max(three - 3 * each, 0) * largest)


def _small(optimizer: Optimizer, like: Tensor, count: int) -> tuple[float, float]:
    """The memory of state and step for ``count`` small parameters, in units of one parameter."""
    device = like.device
    made = [nn.Parameter(torch.zeros(_SIDE, _SIDE, device=device)) for _ in range(count)]
    for parameter in made:
        parameter.grad = torch.zeros_like(parameter)
    state, step = _steps(optimizer, [{**optimizer.param_groups[0], "params": made}])
    return state // made[0].nbytes, step // made[0].nbytes


def _bytes(state: Mapping[Any, Any]) -> int:
    leaves = pytree.tree_leaves(dict(state))
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


class Counting(TorchDispatchMode):
    """Counts the bytes of each result of an operation, by storage, until it is freed.

    It is needed as torch's CPU allocator has no counters. Use it for measurements only, as it slows
    every operation down. A view shares its base's storage, which counts once, with its full size.
    Memory that an operation allocates and frees before it returns is not seen.

    Attributes:
        alive: the bytes that are alive now.
        peak: the most bytes that were alive at once; the caller may reset it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = 0
        self.peak = 0
        # storage → a weak reference to it, and whether it counts
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._lock = threading.RLock()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if func is not torch.ops.aten.lift_fresh.default:  # what torch.tensor has just made
            self.adopt((args, named), counted=False)
        made = func(*args, **named)
        self.adopt(made)
        return made

    def adopt(self, values: Any, *, counted: bool = True) -> None:
        """Register existing tensors until they are freed.

        Args:
            values: tensors in nested containers; tensors that are registered already do not
                change.
            counted: whether they count.
        """
        for leaf in (values,) if isinstance(values, Tensor) else pytree.tree_leaves(values):
            if isinstance(leaf, Tensor):
                for piece in pieces(leaf):
                    self._adopt(piece.untyped_storage(), counted)

    def _adopt(self, storage: torch.UntypedStorage, counted: bool) -> None:
        key = storage._cdata
        size = storage.nbytes() if counted else 0

        def forget(_: object) -> None:
            with self._lock:
                self._known.pop(key, None)
                self.alive -= size

        with self._lock:
            if key not in self._known:
                self._known[key] = weakref.ref(storage, forget)
                self.alive += size
                self.peak = max(self.peak, self.alive)

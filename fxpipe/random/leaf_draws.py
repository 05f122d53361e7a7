"""Random numbers of leaf modules as functions of a seed.

A module draws from PyTorch's global generator, whose state depends on what ran before, and in
which thread. Inside ``SeededDraws`` each draw has a generator of its own, seeded with the
micro-batch's seed, the number of the module's node in the model's graph, and the number of earlier
draws in that node. So the numbers are the same for any number of devices, any cuts, any schedule
and any recomputation. If a module draws from Python's or NumPy's global generator (here called the
other generators, shared by all threads), that generator is seeded with the micro-batch's seed and
the node's number when the module is called.
"""

from __future__ import annotations

import pickle
import random
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._higher_order_ops import utils
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.errors import InputError
from fxpipe.random import SEEDED, UNSEEDED, draws, mix, with_defaults


class _ThreadState(threading.local):
    seed = 0
    node = 0
    drawn = 0


_NOW = _ThreadState()


def draw_from(x: Any, seed: torch.Tensor, node: int, others_too: bool = False) -> Any:
    """Set the micro-batch's seed and the node number for the draws of a leaf module; a graph node
    right before the module. Returns ``x``, an input of the module.

    ``others_too``: whether the module also draws from Python's or NumPy's global generator. The
    caller makes sure that no other thread does meanwhile, and restores these generators.
    """
    _NOW.seed, _NOW.node, _NOW.drawn = int(seed.item()), node, 0
    if others_too:
        seed_others(mix(_NOW.seed, node))
    return x


class Draws(TorchDispatchMode):
    """A dispatch mode that calls ``operation`` in place of every PyTorch operation.

    Attributes:
        traced: whether a higher-order operator such as ``torch.cond`` ran: it makes PyTorch trace.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traced = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.cond compile its branches; the mode still sees their operations."""
        return getattr(utils, "_in_hop_compile", bool)()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if isinstance(func, HigherOrderOperator):  # the functions that it calls may draw, too
            self.traced = True
            return func(*map(self._inside, args), **(kwargs or {}))
        return self.operation(func, args, dict(kwargs or {}))

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation."""
        return func(*args, **kwargs)

    def _inside(self, argument: Any) -> Any:
        """Wrap a higher-order operator's argument to run inside this mode, if it is a function."""
        if not callable(argument):
            return argument

        def called(*args: Any) -> Any:
            with self:
                return argument(*args)

        return called


class SeededDraws(Draws):
    """A mode in which the seed set by ``draw_from`` determines the random numbers."""

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        number = mix(_NOW.node, _NOW.drawn)
        _NOW.drawn += 1
        if func in SEEDED:
            seed = torch.tensor(_NOW.seed)
            options = {k: v for k, v in kwargs.items() if k not in UNSEEDED}
            return SEEDED[func](*with_defaults(func, args), seed, number, **options)
        if any(argument.name == "generator" for argument in func._schema.arguments):
            device = args[0].device if args and isinstance(args[0], torch.Tensor) else "cpu"
            generator = torch.Generator(device).manual_seed(mix(_NOW.seed, number))
            return func(*with_defaults(func, args), **{**kwargs, "generator": generator})
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        raise InputError(
            f"a module draws random numbers with {func}, which cannot be seeded for each draw; "
            "draw with torch.rand or torch.randn instead"
        )


class DrawsWatched(Draws):
    """A mode that notes in ``drew`` whether any random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.drew = False

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and draws(func, args, kwargs):
            self.drew = True
        return func(*args, **kwargs)


_PYTHON, _NUMPY = "Python's random", "numpy.random"


def other_states() -> dict[str, bytes]:
    """Name of a generator → its state; without NumPy's if NumPy has not been imported."""
    states = {_PYTHON: pickle.dumps(random.getstate())}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states[_NUMPY] = pickle.dumps(numpy.random.get_state(legacy=False))
    return states


def put_back_others(before: Mapping[str, bytes]) -> None:
    """Give Python's and NumPy's generators the states that ``other_states`` returned."""
    if _PYTHON in before:
        random.setstate(pickle.loads(before[_PYTHON]))
    if _NUMPY in before:
        sys.modules["numpy"].random.set_state(pickle.loads(before[_NUMPY]))


@contextmanager
def others_kept() -> Iterator[None]:
    """Restore the states of Python's and NumPy's generators after the block."""
    before = other_states()
    try:
        yield
    finally:
        put_back_others(before)


def seed_others(number: int) -> None:
    """Seed Python's and NumPy's generators with a number of at most 64 bits."""
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed([number >> 32, number & 0xFFFFFFFF])

"""A stage's graph as a shared library that torch's inductor has compiled ahead of time.

before:  drawn = fxpipe.bernoulli(x, 0.9, seed, 3);  m = mul(x, drawn);  t = onto(total, m)
         return (t, x)
after:   the library:  m = mul(x, drawn);  add_(total, m)
         around it:    drawn is drawn before, from the same seed; total and x are handed through

Libraries are called through AOTInductor's C interface, without the interpreter lock: the threads of
two devices run theirs side by side. Where there is no such way (on CUDA devices, where a call only
launches, or with operators of Python in the graph), torch's own loader of packages runs them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxpipe.errors import FxpipeError, told

_RUNNERS = 16
"""So many threads may run one library at once."""


class TensorLayout(NamedTuple):
    """The layout of a tensor that a library was compiled for."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: Tensor) -> TensorLayout:
        return cls(tuple(value.shape), value.stride(), value.dtype, value.device)

    def fits(self, value: Tensor) -> bool:
        """Whether a tensor has this layout; of a dimension of one, any stride will do."""
        if value.shape != self.shape or value.dtype is not self.dtype:
            return False
        strides = value.stride()
        return strides == self.strides or all(
            size == 1 or own == other
            for size, own, other in zip(self.shape, self.strides, strides, strict=True)
        )

    def empty(self) -> Tensor:
        """A tensor like this whose values are not set."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


class Draw(NamedTuple):
    """A random operation, which runs before the library.

    Attributes:
        operator: one of ``fxpipe.random``, which reads no values.
        given: its operands, with the layout of one in its place.
        options: what it is given by name.
        made: the layout of what it draws.
        seed: which of the graph's arguments the seed is.
        node: its number.
    """

    operator: Any
    given: tuple[Any, ...]
    options: dict[str, Any]
    made: TensorLayout
    seed: int
    node: int

    @property
    def bytes(self) -> int:
        """What is drawn takes so many."""
        return math.prod(self.made.shape) * self.made.dtype.itemsize

    def run(self, arguments: Sequence[Any]) -> Tensor:
        """Draw."""
        given = [each.empty() if isinstance(each, TensorLayout) else each for each in self.given]
        drawn: Tensor = self.operator(*given, arguments[self.seed], self.node, **self.options)
        return drawn


class Indices(NamedTuple):
    """An argument that says which rows of another are read.

    Attributes:
        argument: which of the graph's arguments it is.
        size: of how many rows.
        ignored: an index for no row; None if there is none.
    """

    argument: int
    size: int
    ignored: int | None

    def hold(self, arguments: Sequence[Any]) -> bool:
        """Whether there are all of these rows."""
        value: Tensor = arguments[self.argument]
        if not value.numel():
            return True
        least, most = torch.aminmax(value)
        if least >= 0 and most < self.size:
            return True
        right = (value >= 0) & (value < self.size)
        return bool((right if self.ignored is None else right | (value == self.ignored)).all())


@dataclass(frozen=True)
class Wiring:
    """How the arguments and results of a graph are those of its library.

    Attributes:
        draws: what is drawn first; it counts as further arguments.
        takes: the arguments that the library takes, in order.
        looks: the layout of each of these.
        indices: the arguments that are checked first: on a CPU, a thread of a library that finds a
            wrong one ends the process.
        totals: the arguments that are sums, to which the library adds.
        gives: the graph's results: whether it is one of the library's, an argument, or a constant;
            and which.
    """

    draws: tuple[Draw, ...]
    takes: tuple[int, ...]
    looks: tuple[TensorLayout, ...]
    indices: tuple[Indices, ...]
    totals: frozenset[int]
    gives: tuple[tuple[str, Any], ...]


class Library:
    """A compiled library. ``run`` takes tensors in a list, and empties it."""

    def __init__(self, path: Path, device: torch.device) -> None:
        """Load it: a shared library (.so), or a package of one (.pt2).

        Args:
            path: the file.
            device: where it runs.

        Raises:
            FxpipeError: it cannot be loaded.
        """
        try:
            self.run = _called(path) if path.suffix == ".so" else _loaded(path, device)
        except (OSError, RuntimeError) as error:
            raise FxpipeError(
                f"the compiled library {path} cannot be loaded ({told(error).splitlines()[0]}); "
                "delete it to have it compiled anew"
            ) from error


ELSEWHERE = "peak of the library"
"""Where a graph notes what another rank has told of the library that runs it there."""


class Compiled:
    """Runs a graph by its library, with the boxed calling convention of the graph.

    Attributes:
        library: the library.
        peak: the most bytes that a call was seen to add while it ran.
    """

    def __init__(
        self,
        library: Library,
        wiring: Wiring,
        as_it_is: Callable[[list[Any]], Any],
        peak: int = 0,
    ) -> None:
        """Like its attributes; ``as_it_is`` runs the graph itself."""
        self.library = library
        self.peak = peak
        self._wiring = wiring
        self._as_it_is = as_it_is

    def __call__(self, arguments: list[Any]) -> tuple[Any, ...]:
        """Run it. Arguments of another layout, such as a parameter's after it was changed, are
        given to the graph as it is, and so are indices of no row: PyTorch says what is wrong."""
        wiring, count = self._wiring, len(arguments)
        results: tuple[Any, ...]
        if not all(each.hold(arguments) for each in wiring.indices):
            results = self._as_it_is(arguments)
            return results
        arguments += [draw.run(arguments) for draw in wiring.draws]
        for index, look in zip(wiring.takes, wiring.looks, strict=True):
            value = arguments[index]
            if value is None and index in wiring.totals:
                arguments[index] = look.empty().zero_()
            elif not look.fits(value):
                del arguments[count:]
                results = self._as_it_is(arguments)
                return results
        given = [arguments[index] for index in wiring.takes]
        through = {at: arguments[at] for kind, at in wiring.gives if kind == "argument"}
        arguments.clear()
        found: dict[str, Any] = {"argument": through, "made": self.library.run(given)}
        return tuple(at if kind == "constant" else found[kind][at] for kind, at in wiring.gives)


def compiled(module: fx.GraphModule | None) -> Compiled | None:
    """What runs a graph module; None where it runs as it is."""
    found = None if module is None else vars(module).get("forward")
    return found if isinstance(found, Compiled) else None


def peak_of(module: fx.GraphModule | None) -> int | None:
    """The most bytes that a call of a graph's library adds, here or on the rank that runs it; None
    where it runs as it is."""
    found = compiled(module)
    if found is None:
        return None if module is None else module.meta.get(ELSEWHERE)
    return found.peak


def _loaded(path: Path, device: torch.device) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    index = -1 if device.type == "cpu" else device.index or 0
    loader: Any = torch._C._aoti.AOTIModelPackageLoader
    # what aoti_load_package makes as well, which has no call that empties its list
    package = loader(str(path), "model", False, _RUNNERS, index)
    run: Callable[[list[Tensor]], Sequence[Tensor]] = package.boxed_run
    return run


def _called(path: Path) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """The functions of AOTInductor's ``interface.h``, for a library that is loaded for ever."""
    library = ctypes.CDLL(str(path))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    container, count = pointer(), size()
    create = library.AOTInductorModelContainerCreateWithDevice
    create.argtypes = [pointer, size, ctypes.c_char_p, ctypes.c_char_p]
    _check(create(ctypes.byref(container), _RUNNERS, b"cpu", None), path)
    outputs = library.AOTInductorModelContainerGetNumOutputs
    _check(outputs(container, ctypes.byref(count)), path)
    enter = library.AOTInductorModelContainerRun
    enter.argtypes = [pointer, pointer, size, pointer, size, pointer, pointer]
    (read, make), handles = _capsules(), torch._C._aoti
    returned = pointer * count.value

    def run(tensors: list[Tensor]) -> Sequence[Tensor]:
        # the library owns the handles it gets, and lets each go after its last use
        owned = [read(each, None) for each in handles.unsafe_alloc_void_ptrs_from_tensors(tensors)]
        tensors.clear()
        found = returned()
        given = (pointer * len(owned))(*owned)
        _check(enter(container, given, len(owned), found, len(found), None, None), path)
        made: list[Tensor] = handles.alloc_tensors_by_stealing_from_void_ptrs(
            [make(each, None, None) for each in found]
        )
        return made

    return run


@cache
def _capsules() -> tuple[Any, Any]:
    """What reads an address from a capsule, and what makes a capsule of one."""
    read, make = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_New
    read.restype, read.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return read, make


def _check(code: int, path: Path) -> None:
    if code:
        raise FxpipeError(
            f"the compiled library {path} failed, and has said why on standard error; compile "
            "without stage_compiler, or delete the library to have it compiled anew"
        )

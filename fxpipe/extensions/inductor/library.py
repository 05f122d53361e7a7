"""A stage's graph as a shared library that torch's inductor has compiled ahead of time.

before:  drawn = fxpipe.bernoulli(x, 0.9, seed, 3);  m = mul(x, drawn);  t = onto(total, m)
         return (t, x)
after:   the library:  m = mul(x, drawn);  add_(total, m)
         around it:    draws ``drawn`` first, from the same seed; returns ``total`` and ``x``

Libraries are called through AOTInductor's C interface, without the interpreter lock, so that the
threads of several devices run theirs at the same time. On CUDA devices, where a call only launches,
and for graphs with operators in Python, torch's package loader runs them instead.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.errors import FxpipeError, told

_RUNNERS = 16
"""How many threads may run one library at once."""


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
        """Whether a tensor has this layout; the stride of a dimension of size 1 does not matter."""
        if value.shape != self.shape or value.dtype is not self.dtype:
            return False
        strides = value.stride()
        return strides == self.strides or all(
            size == 1 or wanted == stride
            for size, wanted, stride in zip(self.shape, self.strides, strides, strict=True)
        )

    def empty(self) -> Tensor:
        """A new tensor of this layout, with undefined values."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


class Draw(NamedTuple):
    """A random operation, which runs before the library.

    Attributes:
        operator: an operator of ``fxpipe.random``, which reads no values.
        given: its operands, with a layout in place of a tensor.
        options: its keyword arguments.
        seed: index of the seed among the graph's arguments.
        node: its number, for the random stream.
    """

    operator: Any
    given: tuple[Any, ...]
    options: dict[str, Any]
    seed: int
    node: int

    def run(self, arguments: Sequence[Any]) -> Tensor:
        operands = [x.empty() if isinstance(x, TensorLayout) else x for x in self.given]
        drawn: Tensor = self.operator(*operands, arguments[self.seed], self.node, **self.options)
        return drawn


class Indices(NamedTuple):
    """An argument of indices into the rows of another tensor.

    Attributes:
        argument: its index among the graph's arguments.
        size: the number of rows.
        ignored: an index that stands for no row; None if there is none.
    """

    argument: int
    size: int
    ignored: int | None

    def hold(self, arguments: Sequence[Any]) -> bool:
        """Whether all indices are valid."""
        value: Tensor = arguments[self.argument]
        if not value.numel():
            return True
        least, most = torch.aminmax(value)
        if least >= 0 and most < self.size:
            return True
        valid = (value >= 0) & (value < self.size)
        return bool((valid if self.ignored is None else valid | (value == self.ignored)).all())


@dataclass(frozen=True)
class Wiring:
    """How the arguments and results of a graph map to those of its library.

    Attributes:
        draws: the random operations that run first; their results follow the graph's arguments.
        takes: the indices of the arguments that the library takes, in order.
        looks: the layout of each of these.
        indices: the arguments whose indices are checked first: on a CPU, a library that meets an
            invalid index ends the process.
        totals: the indices of the arguments that are sums, to which the library adds.
        gives: for each result of the graph ``("made", index of a result of the library)``,
            ``("argument", index)`` or ``("constant", value)``.
    """

    draws: tuple[Draw, ...]
    takes: tuple[int, ...]
    looks: tuple[TensorLayout, ...]
    indices: tuple[Indices, ...]
    totals: frozenset[int]
    gives: tuple[tuple[str, Any], ...]


class Library:
    """A compiled library. ``run`` takes tensors in a list, which it empties."""

    def __init__(self, path: Path, device: torch.device) -> None:
        """Load a shared library (.so), or a package with one (.pt2), to run on a device.

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


class LibraryCall:
    """Runs a graph by its library, with the boxed calling convention of the graph."""

    def __init__(
        self, library: Library, wiring: Wiring, as_it_is: Callable[[list[Any]], Any]
    ) -> None:
        """``as_it_is`` runs the graph itself."""
        self.library = library
        self._wiring = wiring
        self._as_it_is = as_it_is

    def __call__(self, arguments: list[Any]) -> tuple[Any, ...]:
        """Run the library. The graph itself runs if an argument has another layout, such as a
        parameter that was replaced, or an index is invalid, so that PyTorch says what is wrong."""
        wiring, count = self._wiring, len(arguments)
        results: tuple[Any, ...]
        if not all(indices.hold(arguments) for indices in wiring.indices):
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
        taken = [arguments[index] for index in wiring.takes]
        through = {at: arguments[at] for kind, at in wiring.gives if kind == "argument"}
        arguments.clear()
        sources: dict[str, Any] = {"argument": through, "made": self.library.run(taken)}
        return tuple(at if kind == "constant" else sources[kind][at] for kind, at in wiring.gives)


def _loaded(path: Path, device: torch.device) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    index = -1 if device.type == "cpu" else device.index or 0
    loader: Any = torch._C._aoti.AOTIModelPackageLoader
    # aoti_load_package makes the same loader, but its call does not empty the list
    package = loader(str(path), "model", False, _RUNNERS, index)
    run: Callable[[list[Tensor]], Sequence[Tensor]] = package.boxed_run
    return run


def _called(path: Path) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """Load a library for ever, and return a caller through AOTInductor's ``interface.h``."""
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
        # the library owns the handles of its arguments, and frees each after its last use
        owned = [read(x, None) for x in handles.unsafe_alloc_void_ptrs_from_tensors(tensors)]
        tensors.clear()
        inputs, results = (pointer * len(owned))(*owned), returned()
        _check(enter(container, inputs, len(owned), results, len(results), None, None), path)
        made: list[Tensor] = handles.alloc_tensors_by_stealing_from_void_ptrs(
            [make(result, None, None) for result in results]
        )
        return made

    return run


@cache
def _capsules() -> tuple[Any, Any]:
    """The functions that read the address in a capsule, and make a capsule of an address."""
    read, make = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_New
    read.restype, read.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return read, make


def _check(code: int, path: Path) -> None:
    if code:
        raise FxpipeError(
            f"the compiled library {path} failed, and has said why on standard error; compile "
            "without Inductor, or delete the library to have it compiled anew"
        )

"""Watch the Python state that traces have read; if it changes, the model is traced anew.

A graph holds numbers, flags and submodules as they were when the model was traced: ``self.scale``,
the ``p`` of a dropout, a weight of the loss in a closure. Each combination of their values is a
variant, with graphs of its own. Only names that occur in code which ran are watched, so attributes
that a trainer keeps in a module for itself never cause a new trace.
"""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from fxpipe.compiler.guard import Guard, Present
from fxpipe.compiler.options import Options
from fxpipe.extensions.python_state.changes import refuse_changes
from fxpipe.extensions.python_state.snapshot import OUTSIDE, CodeReads, StateSnapshot, top
from fxpipe.log import LOGGER
from fxpipe.random.modes import Draws

T = TypeVar("T")

VARIANTS = 8
"""The number of variants that are kept, each with its graphs."""
_INNER = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>", "<lambda>")
"""Names of code objects that may read ``self`` of the method around them."""
aten = torch.ops.aten
_NUMBERS = frozenset((aten._local_scalar_dense.default, aten.equal.default))
"""Operations that turn values into a number or a flag; the first one also runs if an operation
gets a tensor for a number."""
_LISTS = ("tolist", "numpy", "__array__", "__repr__", "__format__")
"""Tensor methods that read values without an operation."""


@dataclass
class _Variant:
    """One combination of the values of all expressions that traces have read."""

    number: int
    reads: CodeReads
    values: dict[str, Any]


class Variants(Guard):
    """The variants of a model and its loss."""

    def __init__(self, options: Options, leaves: Mapping[str, nn.Module]) -> None:
        super().__init__(options, leaves)
        self._reads = CodeReads()
        self._variants: list[_Variant] = []
        self._count = 0
        self._current: _Variant | None = None
        self._seen: StateSnapshot | None = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        reads = self._reads = self._reads.copied()
        # code that ran → whether it computes attribute names; by id, as hashing code is slow
        known: dict[int, tuple[CodeType, bool]] = {}
        # the garbage collector calls these at any point
        collecting = [getattr(callback, "__code__", None) for callback in gc.callbacks]
        leaves = {id(module) for module in self.called.values()}
        called: Any = nn.Module.__call__
        leaf: FrameType | None = None  # a leaf module reads its attributes anew in every step
        kernel: FrameType | None = None  # an operation, whose kernel runs anew in every step, too

        def profile(frame: FrameType, event: str, arg: Any) -> None:
            nonlocal leaf, kernel
            if event == "return":
                leaf = None if frame is leaf else leaf
                kernel = None if frame is kernel else kernel
            if event != "call" or leaf is not None or kernel is not None:
                return
            code = frame.f_code
            if code is _Numbers.operation.__code__:
                kernel = frame
                return
            if code in collecting:
                return
            if leaves and code is called.__code__ and id(frame.f_locals.get("self")) in leaves:
                leaf = frame
                return
            if id(code) not in known:
                known[id(code)] = code, _read(code, frame.f_globals, reads)
            if known[id(code)][1]:
                while frame.f_code.co_name in _INNER and frame.f_back is not None:
                    frame = frame.f_back
                if frame.f_code.co_argcount:
                    reads.makers.add(type(frame.f_locals.get(frame.f_code.co_varnames[0])))

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            with _asks_noted(reads.asked, lambda: leaf is None):
                yield
        finally:
            put_back(before)
            self._seen = None

    def checked(self, run: Callable[[], T]) -> T:
        """Run the model. Raises TraceError like ``refuse_changes``."""
        result: T = refuse_changes(self.options.model, self.called, self.reading()(run))
        return result

    def ran(self, code: CodeType) -> bool:
        return code in self._reads.codes

    def present(self) -> Present:
        variant, seen = self.variant(), self._seen
        assert seen is not None
        return Present(variant, seen.modules, seen.parameters, seen.dense)

    def variant(self) -> int:
        """The number of the model's present variant, which is a new one if its state is new."""
        if self._seen is not None and self._current is not None and self._seen.holds():
            return self._current.number
        snapshots: dict[int, StateSnapshot] = {}
        for variant in reversed(self._variants):
            snapshot = snapshots.get(id(variant.reads)) or self._snapshot(variant.reads)
            snapshots[id(variant.reads)] = snapshot
            if snapshot.values == variant.values:
                self._variants.remove(variant)
                self._variants.append(variant)  # the least recently used one comes first
                break
        else:
            variant, snapshot = self._new()
        self._current, self._seen = variant, snapshot
        return variant.number

    def settle(self) -> None:
        assert self._current is not None
        same_reads = self._current.reads is self._reads
        if same_reads and self._seen is not None and self._seen.holds():
            return
        snapshot = self._snapshot(self._reads)
        if same_reads and snapshot.values != self._current.values:
            LOGGER.warning(
                "%s changes %s itself while it runs; in its graphs that stays as it was when they "
                "were traced, so keep it in a buffer (register_buffer) that is written in place",
                type(self.options.model).__name__,
                _changed(self._current.values, snapshot.values),
            )
        self._current.reads, self._current.values = self._reads, snapshot.values
        self._seen = snapshot

    def _snapshot(self, reads: CodeReads) -> StateSnapshot:
        return StateSnapshot(reads, self.options, self.called)

    def _new(self) -> tuple[_Variant, StateSnapshot]:
        if self._current is not None:
            old, new = self._current.values, self._snapshot(self._current.reads).values
            report = LOGGER.warning if self._count == VARIANTS else LOGGER.info
            report(
                "%s is traced anew, as %s has changed; a number that changes often belongs into a "
                "buffer that is written in place",
                type(self.options.model).__name__,
                _changed(old, new),
            )
        snapshot = self._snapshot(self._reads)
        variant = _Variant(self._count, self._reads, snapshot.values)
        self._count += 1
        self._variants.append(variant)
        del self._variants[:-VARIANTS]
        return variant, snapshot

    @property
    def kept(self) -> set[int]:
        return {variant.number for variant in self._variants}


def _read(code: CodeType, module: dict[str, Any], reads: CodeReads) -> bool:
    """Note the names in a code object, whose globals are ``module``; returns whether it is the
    user's own code and computes names of attributes as it runs."""
    package = top(module.get("__name__"))  # "None" if PyTorch has generated the code
    if package == "fxpipe":
        return False
    reads.codes.add(code)
    reads.names.update(code.co_names)
    reads.names.update(_strings(code.co_consts))
    if package in OUTSIDE or package == "None":
        return False
    computes = not {"vars", "__dict__", "__getattribute__"}.isdisjoint(code.co_names)
    steps = [*dis.get_instructions(code)]
    for index, step in enumerate(steps):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            reads.variables[id(module), step.argval] = module
            if step.argval == "getattr" and not _is_named(steps[index + 1 :]):
                computes = True
    return computes


def _is_named(steps: Iterable[dis.Instruction]) -> bool:
    """Whether the name in a call of ``getattr`` is a literal, not computed as the code runs;
    ``steps`` are the instructions after ``getattr`` is loaded."""
    depth, name = 0, None  # arguments on the stack; the instruction that pushed the second one
    for step in steps:
        depth += dis.stack_effect(step.opcode, step.arg, jump=False)
        if depth < 0:  # the call itself
            break
        if depth == 2:
            name = step
    return name is not None and name.opname == "LOAD_CONST" and isinstance(name.argval, str)


def _changed(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The first expression whose value differs from before."""
    keys = (k for k in {**new, **old} if (k in old, old.get(k)) != (k in new, new.get(k)))
    return next(keys, "something")


def _strings(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from _strings(constant)


@contextmanager
def _asks_noted(asked: dict[int, Tensor], here: Callable[[], bool]) -> Iterator[None]:
    """Note in ``asked``, by id, the tensors whose values the code inside reads; not those that an
    operation has made inside, nor any while ``here()`` is false."""
    made = WeakIdKeyDictionary()

    def note(values: Any) -> None:
        for value in pytree.tree_leaves(values):
            if isinstance(value, Tensor) and value not in made and here():
                asked[id(value)] = value

    with _Lists(note), _Numbers(note, made):
        yield


class _Numbers(Draws):
    """Notes tensors that operations turn into numbers, and which tensors operations make."""

    def __init__(self, note: Callable[[Any], None], made: WeakIdKeyDictionary) -> None:
        super().__init__()
        self._note = note
        self._made = made

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _NUMBERS:
            self._note(args)
        result = func(*args, **kwargs)
        inputs = {*map(id, _flat([*args, *kwargs.values()]))}
        for value in _flat([result]):
            if isinstance(value, Tensor) and id(value) not in inputs:
                self._made[value] = None
        return result


def _flat(values: list[Any]) -> list[Any]:
    """Values, and those in lists among them; without calling functions, which guards would note."""
    for value in values:
        if isinstance(value, list | tuple):
            values.extend(value)
    return values


class _Lists(TorchFunctionMode):
    """Notes tensors whose values are read without an operation."""

    def __init__(self, note: Callable[[Any], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in _LISTS:
            self._note(args[:1])
        return func(*args, **(kwargs or {}))


def put_back(profiler: Any) -> None:
    """Set the thread's profiler to one that ``sys.getprofile`` returned before.

    A profiler written in C, such as cProfile's, is not callable and enables itself.
    """
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        sys.setprofile(None)
        profiler.enable()

"""Watch the Python state that traces have read; if it changes, the model is traced anew.

A graph holds numbers, flags and submodules as they were when the model was traced: ``self.scale``,
the ``p`` of a dropout, a weight of the loss in a closure. Only names that occur in code which ran
are watched, so attributes that a trainer keeps in a module for itself never cause a new trace.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from dis import EXTENDED_ARG, opmap
from types import CodeType, FrameType
from typing import Any, TypeVar

from torch import nn

from fxpipe.compiler.guard import KEPT, Guard, Present
from fxpipe.compiler.objective import Objective
from fxpipe.compiler.options import Options
from fxpipe.extensions.python_state.changes import Key, refuse_changes
from fxpipe.extensions.python_state.snapshot import OUTSIDE, CodeReads, StateSnapshot, top
from fxpipe.log import LOGGER

T = TypeVar("T")

_LOAD_GLOBAL, _LOAD_NAME = opmap["LOAD_GLOBAL"], opmap["LOAD_NAME"]


class StateGuard(Guard):
    """Watches what the code of a model and its loss reads."""

    def __init__(self, options: Options, leaves: Mapping[str, nn.Module]) -> None:
        super().__init__(options, leaves)
        self._reads = CodeReads()
        self._seen: StateSnapshot | None = None
        # number of a state → its values; the one seen last comes last
        self._states: dict[int, dict[str, Any]] = {}
        self._number = 0
        self._constants: set[str] = set()  # numbers that no graph can take
        self._passing: set[Key] = set()  # attributes that each call sets before it reads them

    @contextmanager
    def reading(self) -> Iterator[None]:
        reads = self._reads = self._reads.copied()
        known: dict[int, CodeType] = {}  # code that ran, by id, as hashing code is slow
        # the garbage collector calls these at any point
        collecting = [getattr(callback, "__code__", None) for callback in gc.callbacks]
        leaves = {id(module) for module in self.called.values()}
        called: Any = nn.Module.__call__
        leaf: FrameType | None = None  # a leaf module reads its attributes anew in every step

        def profile(frame: FrameType, event: str, arg: Any) -> None:
            nonlocal leaf
            if event == "return" and frame is leaf:
                leaf = None
            code = frame.f_code
            if event != "call" or leaf is not None or id(code) in known or code in collecting:
                return
            if leaves and code is called.__code__:
                leaf = frame if id(frame.f_locals.get("self")) in leaves else None
                return
            known[id(code)] = code
            _read(code, frame.f_globals, reads)

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            yield
        finally:
            profile_again(before)

    def checked(self, run: Callable[[], T]) -> T:
        """Run the model. Raises TraceError like ``refuse_changes``."""
        known = len(self._passing)
        result: T = refuse_changes(
            self.options.model, self.called, self.reading()(run), self._passing
        )
        if len(self._passing) > known:
            self._seen = None  # that has what is not watched any more
        return result

    def ran(self, code: CodeType) -> bool:
        return code in self._reads.codes

    def present(self) -> Present:
        old = self._seen
        if old is None:
            self._see(self._snapshot(self._reads))
        elif not old.holds():
            seen = self._snapshot(old.reads)
            if differ := _changed(old.values, seen.values):
                self.changed = differ[0]
                both = old.places.keys() & seen.places.keys() - self._constants
                self.numbers |= {name: seen.places[name] for name in differ if name in both}
                seen = self._snapshot(old.reads)
            last = max(self._states)
            self._see(seen)
            if self._number > last:
                kind = type(self.options.model).__name__
                LOGGER.info("%s is traced anew, as %s has changed", kind, self.changed)
        assert self._seen is not None
        seen = self._seen
        return Present(self._number, seen.modules, seen.parameters, seen.dense)

    def fix(self, names: Collection[str]) -> None:
        self._constants.update(names)
        for name in names:
            self.numbers.pop(name, None)
        if names:
            self._see(self._snapshot(self._reads))

    def settle(self) -> None:
        old = self._seen
        again = old is not None and old.reads is self._reads
        if old is not None and again and old.holds():
            return
        seen = self._snapshot(self._reads)
        self._see(seen, same=True)
        if old is not None and again and (differ := _changed(old.values, seen.values)):
            LOGGER.warning(
                "%s changes %s itself while it runs; in its graphs that stays as it was when they "
                "were traced, so keep it in a buffer (register_buffer) that is written in place",
                type(self.options.model).__name__,
                differ[0],
            )

    def _snapshot(self, reads: CodeReads) -> StateSnapshot:
        watched = replace(self.options, objective=Objective()) if self.calls_loss else self.options
        return StateSnapshot(reads, watched, self.called, self.numbers, self._passing)

    def _see(self, seen: StateSnapshot, *, same: bool = False) -> None:
        """Compare with a snapshot from now on, which is of the ``same`` state as the last one, or
        of another: one of the last, or a new one. Numbers may be elsewhere, or be no numbers now.
        """
        self._seen = seen
        places = seen.places
        self.numbers = {name: places[name] for name in self.numbers if name in places}
        number = self._number
        if not same:
            known = (each for each, values in self._states.items() if values == seen.values)
            number = next(known, max(self._states, default=0) + 1)
        self._states.pop(number, None)
        self._states[number] = seen.values
        self._number = number
        while len(self._states) > KEPT:
            del self._states[next(iter(self._states))]


def _read(code: CodeType, module: dict[str, Any], reads: CodeReads) -> None:
    """Note the names in a code object, whose globals are ``module``."""
    package = top(module.get("__name__"))  # "None" if PyTorch has generated the code
    if package == "fxpipe":
        return
    reads.codes.add(code)
    reads.names.update(code.co_names)
    reads.names.update(_strings(code.co_consts))
    if package not in OUTSIDE and package != "None":
        reads.variables.update({(id(module), n): module for n in globals_of(code) if n in module})


def globals_of(code: CodeType) -> Iterator[str]:
    """The names that a code object loads as globals. ``co_names`` has its attributes, too."""
    wide = 0
    for number, small in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = wide | small
        wide = argument << 8 if number == EXTENDED_ARG else 0
        if number == _LOAD_GLOBAL:
            yield code.co_names[argument >> 1]  # the lowest bit asks for a NULL before it
        elif number == _LOAD_NAME:  # in the body of a class, and in code for exec
            yield code.co_names[argument]


def _changed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The expressions whose values differ from before."""
    keys = {**new, **old}
    return [k for k in keys if (k in old, old.get(k)) != (k in new, new.get(k))]


def _strings(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from _strings(constant)


def profile_again(profiler: Any) -> None:
    """Set the thread's profiler to one that ``sys.getprofile`` returned before.

    A profiler written in C, such as cProfile's, is not callable and enables itself.
    """
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        sys.setprofile(None)
        profiler.enable()

"""What the graphs of a model depend on besides a call's inputs: if it changes, it is traced anew.

A graph holds numbers, flags and submodules as they were when the model was traced: ``self.scale``,
the ``p`` of a dropout, a weight of the loss in a closure. Only names that occur in code which ran
are watched, so attributes that a trainer keeps in a module for itself never cause a new trace.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fxpipe.compiler.number import NumberPlace
from fxpipe.compiler.objective import Objective
from fxpipe.compiler.options import Options
from fxpipe.compiler.python_state.changes import Key, refuse_changes
from fxpipe.compiler.python_state.reading import note_code, profile_again
from fxpipe.compiler.python_state.snapshot import CodeReads, StateSnapshot
from fxpipe.log import LOGGER

T = TypeVar("T")

_TRAINING, _REQUIRES_GRAD, _DTYPE = map(attrgetter, ("training", "requires_grad", "dtype"))

KEPT = 16
"""The most calls of which results are kept: the ones used last."""


class Guard:
    """Watches a model, and what its code and that of its loss read, between calls.

    Attributes:
        numbers: the numbers that are no arguments of calls and of which graphs take the value at
            each call: name → where it is.
        changed: what Python state has changed last, or "".
        calls_loss: whether the loss is called as it is, so that no graph depends on it.
    """

    changed = ""
    calls_loss = False

    def __init__(self, options: Options, called: Mapping[str, nn.Module]) -> None:
        """Watch nothing yet. Traces never look into ``called``, a mapping that may grow later."""
        self.options, self.called = options, called
        self.numbers: dict[str, NumberPlace] = {}
        self._reads = CodeReads()
        self._seen: StateSnapshot | None = None
        # number of a state → its values; the one seen last comes last
        self._states: dict[int, dict[str, Any]] = {}
        self._number = 0
        self._constants: set[str] = set()  # numbers that no graph can take
        self._passing: set[Key] = set()  # attributes that each call sets before it reads them

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Note what the code that this thread runs inside reads."""
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
            note_code(code, frame.f_globals, reads)

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            yield
        finally:
            profile_again(before)

    def checked(self, run: Callable[[], T]) -> T:
        """Run the model, and refuse what it does that no graph could hold: raises TraceError like
        ``refuse_changes``. May run it again."""
        known = len(self._passing)
        result: T = refuse_changes(
            self.options.model, self.called, self.reading()(run), self._passing
        )
        if len(self._passing) > known:
            self._seen = None  # that has what is not watched any more
        return result

    def ran(self, code: CodeType) -> bool:
        """Whether this code ran inside ``reading``, outside of the modules ``called``."""
        return code in self._reads.codes

    def state(self) -> tuple[object, ...]:
        """Everything that traces depend on besides the call; that of ``present`` comes first."""
        number, seen = self.present(), self._seen
        assert seen is not None
        flags = tuple(map(_TRAINING, seen.modules))
        trained = tuple(map(_REQUIRES_GRAD, seen.parameters))
        # ``.data`` may change these; strides and the number of entries together tell the shape
        strides = tuple(map(Tensor.stride, seen.dense))
        counts = tuple(map(Tensor.numel, seen.dense))
        dtypes = tuple(map(_DTYPE, seen.dense))
        device = self.options.places[0].type if self.options.places else "cpu"
        cast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        return number, flags, trained, (strides, counts, dtypes), cast, torch.get_default_dtype()

    def present(self) -> int:
        """The number of the model's Python state as it is now. Graphs of other states do not
        serve."""
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
        return self._number

    def fix(self, names: Collection[str]) -> None:
        """Let these ``numbers``, which graphs cannot take, be constants of graphs from now on."""
        self._constants.update(names)
        for name in names:
            self.numbers.pop(name, None)
        if names:
            self._see(self._snapshot(self._reads))

    def settle(self) -> None:
        """Let the present state count as unchanged, as the first run may set attributes."""
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

    def back_to(self, number: int) -> None:
        """Let the present state count as that of this number: it is the same, though code that has
        run since reads more of it."""
        self._number = number
        self._see(self._snapshot(self._reads), same=True)

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


def _changed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The expressions whose values differ from before."""
    keys = {**new, **old}
    return [k for k in keys if (k in old, old.get(k)) != (k in new, new.get(k))]

"""Watch the Python state that traces have read; if it changes, the model is traced anew.

A graph holds numbers, flags and submodules as they were when the model was traced: ``self.scale``,
the ``p`` of a dropout, a weight of the loss in a closure. Only names that occur in code which ran
are watched, so attributes that a trainer keeps in a module for itself never cause a new trace.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, TypeVar

from torch import nn

from fxpipe.compiler.guard import Guard, Present
from fxpipe.compiler.options import Options
from fxpipe.extensions.python_state.changes import refuse_changes
from fxpipe.extensions.python_state.snapshot import OUTSIDE, CodeReads, StateSnapshot, top
from fxpipe.log import LOGGER

T = TypeVar("T")

OFTEN = 8
"""After so many changes there is a warning."""


class StateGuard(Guard):
    """Watches what the code of a model and its loss reads."""

    def __init__(self, options: Options, leaves: Mapping[str, nn.Module]) -> None:
        super().__init__(options, leaves)
        self._reads = CodeReads()
        self._seen: StateSnapshot | None = None
        self._changes = 0

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
        result: T = refuse_changes(self.options.model, self.called, self.reading()(run))
        return result

    def ran(self, code: CodeType) -> bool:
        return code in self._reads.codes

    def present(self) -> Present:
        old = self._seen
        if old is None or not old.holds():
            self._seen = self._snapshot(self._reads if old is None else old.reads)
            if old is not None and self._seen.values != old.values:
                self._changes += 1
                report = LOGGER.warning if self._changes == OFTEN else LOGGER.info
                report(
                    "%s is traced anew, as %s has changed; a number that changes often belongs "
                    "into a buffer that is written in place",
                    type(self.options.model).__name__,
                    _changed(old.values, self._seen.values),
                )
        seen = self._seen
        assert seen is not None
        return Present(self._changes, seen.modules, seen.parameters, seen.dense)

    def settle(self) -> None:
        old = self._seen
        again = old is not None and old.reads is self._reads
        if old is not None and again and old.holds():
            return
        self._seen = self._snapshot(self._reads)
        if old is not None and again and self._seen.values != old.values:
            LOGGER.warning(
                "%s changes %s itself while it runs; in its graphs that stays as it was when they "
                "were traced, so keep it in a buffer (register_buffer) that is written in place",
                type(self.options.model).__name__,
                _changed(old.values, self._seen.values),
            )

    def _snapshot(self, reads: CodeReads) -> StateSnapshot:
        return StateSnapshot(reads, self.options, self.called)


def _read(code: CodeType, module: dict[str, Any], reads: CodeReads) -> None:
    """Note the names in a code object, whose globals are ``module``."""
    package = top(module.get("__name__"))  # "None" if PyTorch has generated the code
    if package == "fxpipe":
        return
    reads.codes.add(code)
    reads.names.update(code.co_names)
    reads.names.update(_strings(code.co_consts))
    if package not in OUTSIDE and package != "None":
        reads.variables.update({(id(module), n): module for n in code.co_names if n in module})


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


def profile_again(profiler: Any) -> None:
    """Set the thread's profiler to one that ``sys.getprofile`` returned before.

    A profiler written in C, such as cProfile's, is not callable and enables itself.
    """
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        sys.setprofile(None)
        profiler.enable()

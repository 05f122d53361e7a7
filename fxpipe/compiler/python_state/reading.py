"""What code that runs reads: its names, and the globals that it loads."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dis import EXTENDED_ARG, opmap
from types import CodeType
from typing import Any

from fxpipe.compiler.python_state.snapshot import OUTSIDE, CodeReads, top

_LOAD_GLOBAL, _LOAD_NAME = opmap["LOAD_GLOBAL"], opmap["LOAD_NAME"]


def note_code(code: CodeType, module: dict[str, Any], reads: CodeReads) -> None:
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

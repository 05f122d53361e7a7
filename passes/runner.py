"""Run passes one after another and verify between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar, overload

from fxpipe.errors import PassError, VerificationError
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.log import telling
from fxpipe.verify.plan import verify_plan
from fxpipe.verify.program import verify_program
from fxpipe.verify.schedule import verify_schedule

A = TypeVar("A", Plan, Schedule, Program)
B = TypeVar("B", Plan, Schedule, Program)
C = TypeVar("C", Plan, Schedule, Program)
D = TypeVar("D", Plan, Schedule, Program)

Pass = Callable[[A], B]
"""A function, or a frozen dataclass with ``__call__``, its options as fields, and ``name``."""

OnPass = Callable[[str, float], None]
"""Told the name of each pass that is done, and the seconds it took without verification."""

VERIFIERS: dict[type, tuple[str, Callable[[Any], object]]] = {
    Plan: ("plan", verify_plan),
    Schedule: ("schedule", verify_schedule),
    Program: ("program", verify_program),
}
"""Representation → its name in messages and its verifier."""


@overload
def run(value: A, first: Pass[A, B], /, *, on_pass: OnPass | None = None) -> B: ...
@overload
def run(
    value: A, first: Pass[A, B], second: Pass[B, C], /, *, on_pass: OnPass | None = None
) -> C: ...
@overload
def run(
    value: A,
    first: Pass[A, B],
    second: Pass[B, C],
    third: Pass[C, D],
    /,
    *,
    on_pass: OnPass | None = None,
) -> D: ...
@overload
def run(value: A, /, *passes: Pass[A, A], on_pass: OnPass | None = None) -> A: ...


def run(value: Any, /, *passes: Callable[[Any], Any], on_pass: OnPass | None = None) -> Any:
    """Hand a value from pass to pass; verify it before the first and after each.

    Raises:
        PassError: a pass was handed or made something that its verifier refuses, or made
            something else than a plan, a schedule or a program. It names the pass; the verifier's
            error is the cause.
    """
    for index, each in enumerate(passes):
        name = pass_name(each)
        if index == 0:
            _verify(value, f"pass {name!r} was handed")
        start = time.perf_counter()
        with telling(name):
            value = each(value)
        if on_pass is not None:
            on_pass(name, time.perf_counter() - start)
        _verify(value, f"pass {name!r} made")
    return value


def pass_name(each: Callable[[Any], Any]) -> str:
    """The name of a pass: its ``name``, else that of the function or the class."""
    name = getattr(each, "name", None) or getattr(each, "__name__", None)
    return str(name or type(each).__name__)


def _verify(value: object, what: str) -> None:
    entry = VERIFIERS.get(type(value))
    if entry is None:
        raise PassError(f"{what} {value!r}, which is not a plan, a schedule or a program")
    word, verify = entry
    try:
        with telling(f"verify {word}"):
            verify(value)
    except VerificationError as error:
        raise PassError(f"{what} an invalid {word}: {error}") from error

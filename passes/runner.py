"""Run a list of passes on named values, called facts, and verify what each pass makes.

Each ``Pass`` says which facts it requires and provides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fxpipe.errors import InputError, PassError, VerificationError
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.log import telling
from fxpipe.signals import raise_held
from fxpipe.verify.plan import verify_plan
from fxpipe.verify.program import verify_program
from fxpipe.verify.schedule import verify_schedule

VERIFIERS: dict[type, tuple[str, Callable[[Any], object]]] = {
    Plan: ("plan", verify_plan),
    Schedule: ("schedule", verify_schedule),
    Program: ("program", verify_program),
}
"""Representation → its name in messages and its verifier."""


@dataclass(frozen=True)
class Pass:
    """An entry in a list of passes.

    Attributes:
        function: the function; it gets the required facts as keyword arguments. If it is a frozen
            dataclass with ``__call__``, an object is made of the facts named like its fields, and
            called with the others.
        requires: the facts that it needs, such as ``"plan, state"``.
        provides: the facts that it returns, in this order.
        when: the pass runs if this fact holds, or with ``not`` before it if the fact does not hold.
            Empty for a pass that always runs.
        apart: for a pass of programs: whether it makes the list of a device from those of the
            devices with which it exchanges values alone, so that others may be missing.
    """

    function: Callable[..., Any]
    requires: str
    provides: str
    when: str = ""
    apart: bool = False

    @property
    def name(self) -> str:
        """The name of the pass: the function's attribute ``name``, or its own or its class's."""
        name = getattr(self.function, "name", None) or getattr(self.function, "__name__", None)
        return str(name or type(self.function).__name__)

    @cached_property
    def needs(self) -> tuple[str, ...]:
        """The required facts."""
        return tuple(filter(None, self.requires.split(", ")))

    @cached_property
    def makes(self) -> tuple[str, ...]:
        """The provided facts."""
        return tuple(filter(None, self.provides.split(", ")))

    def runs(self, facts: Mapping[str, Any]) -> bool:
        """Whether the pass runs, given these facts."""
        name = self.when.removeprefix("not ")
        return not name or bool(facts[name]) == (name == self.when)

    def __call__(self, facts: Mapping[str, Any]) -> Any:
        """Call the function with the facts that the pass requires, and return its result."""
        arguments = {name: facts[name] for name in self.needs}
        function = self.function
        if isinstance(function, type):
            fields = {field.name for field in dataclasses.fields(function)} & arguments.keys()
            function = function(**{name: arguments.pop(name) for name in fields})
        return function(**arguments)


def run_all(
    passes: Sequence[Pass], given: Mapping[str, Any], trusted: Collection[type] = ()
) -> dict[str, Any]:
    """Run a list of passes; verify each representation that a pass makes.

    Args:
        passes: the list.
        given: fact → value, to begin with.
        trusted: the representations that another process verifies, which makes the same ones.

    Returns:
        All facts: those given and those that the passes made.

    Raises:
        PassError: a required fact is missing, or a pass made something that its verifier refuses.
            It names the pass.
    """
    facts = dict(given)
    for step in passes:
        if not step.runs(facts):
            continue
        raise_held()  # Ctrl-C takes effect between passes
        for name in step.needs:
            if name not in facts:
                raise PassError(f"pass {step.name!r} requires {name!r}, which nothing made")
        with telling(step.name):
            result = step(facts)
        values = result if len(step.makes) > 1 else [result][: len(step.makes)]
        for name, value in zip(step.makes, values, strict=True):
            kind = type(value)
            if kind in VERIFIERS and kind not in trusted and value is not facts.get(name):
                _verify(value, step.name)
            facts[name] = value
    return facts


def _verify(value: object, name: str) -> None:
    word, verify = VERIFIERS[type(value)]
    try:
        with telling(f"verify {word}"):
            verify(value)
    except VerificationError as error:
        raise PassError(f"pass {name!r} made an invalid {word}: {error}") from error


def comes_after(program: Program, name: str, earlier: str) -> None:
    """Check that ``name`` has not run on a program and ``earlier`` has; raises InputError."""
    if name in program.passes or earlier not in program.passes:
        done = " ".join(program.passes) or "none"
        raise InputError(f"{name} comes once and after {earlier}; the passes done are: {done}")

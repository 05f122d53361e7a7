"""Run a list of passes on named values, called facts, and verify what each pass makes.

Each ``Pass`` says which facts it requires and provides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
        requires: the facts that it needs, such as ``"plan, state"``. Words before a fact say what
            must have been done to it: ``"differentiated plan"``.
        provides: the facts that it returns, in this order. Words before a fact say what the pass
            has done to it.
        when: the pass runs if this fact holds, or with ``not`` before it if the fact does not hold.
            Empty for a pass that always runs.
    """

    function: Callable[..., Any]
    requires: str
    provides: str
    when: str = ""

    @property
    def name(self) -> str:
        """The name of the pass."""
        return pass_name(self.function)

    @cached_property
    def needs(self) -> tuple[tuple[str, frozenset[str]], ...]:
        """The required facts, each with the words that say what must have been done to it."""
        return tuple(_facts(self.requires))

    @cached_property
    def makes(self) -> tuple[tuple[str, frozenset[str]], ...]:
        """The provided facts, each with the words that say what has been done to it."""
        return tuple(_facts(self.provides))

    def runs(self, facts: Mapping[str, Any]) -> bool:
        """Whether the pass runs, given these facts."""
        name = self.when.removeprefix("not ")
        return not name or bool(facts[name]) == (name == self.when)

    def __call__(self, facts: Mapping[str, Any]) -> Any:
        """Call the function with the facts that the pass requires, and return its result."""
        arguments = {name: facts[name] for name, _ in self.needs}
        function = self.function
        if isinstance(function, type):
            fields = {field.name for field in dataclasses.fields(function)} & arguments.keys()
            function = function(**{name: arguments.pop(name) for name in fields})
        return function(**arguments)


def _facts(text: str) -> Iterator[tuple[str, frozenset[str]]]:
    for part in filter(None, text.split(", ")):
        *done, name = part.split()
        yield name, frozenset(done)


def run_all(passes: Sequence[Pass], given: Mapping[str, Any]) -> dict[str, Any]:
    """Run a list of passes; verify each representation that a pass makes.

    Args:
        passes: the list.
        given: fact → value, to begin with.

    Returns:
        All facts: those given and those that the passes made.

    Raises:
        PassError: a required fact is missing, or a pass made something that its verifier refuses.
            It names the pass.
    """
    check_order(passes, given)
    facts = dict(given)
    for step in passes:
        if not step.runs(facts):
            continue
        raise_held()  # Ctrl-C takes effect between passes
        for name, _ in step.needs:
            if name not in facts:
                raise PassError(f"pass {step.name!r} requires {name!r}, which nothing made")
        with telling(step.name):
            result = step(facts)
        names = [name for name, _ in step.makes]
        values = result if len(names) > 1 else [result][: len(names)]
        for name, value in zip(names, values, strict=True):
            if type(value) in VERIFIERS and value is not facts.get(name):
                _verify(value, step.name)
            facts[name] = value
    return facts


def check_order(passes: Sequence[Pass], given: Collection[str]) -> None:
    """Check that each pass comes after the passes that provide what it requires.

    Conditional passes count as if they ran. A word on a given fact that no pass of the list
    provides counts as done before. A word that several passes provide holds after the last of them.

    Args:
        passes: the list.
        given: the facts that exist before the list runs.

    Raises:
        PassError: a pass comes too early; it names the pass, and the pass to put it behind.
    """
    done = dict.fromkeys(given, frozenset[str]())
    made: set[str] = set()
    for place, step in enumerate(passes):
        for name, words in step.needs:
            missing = words - done.get(name, frozenset())
            later = [after for after in passes[place + 1 :] if name in dict(after.makes)]
            doing = [
                after.name
                for after in later
                if words & dict(after.makes)[name] - dict(after.needs).get(name, frozenset())
            ]
            making = [after.name for after in later if name not in dict(after.needs)]
            behind = doing if name in done else [*making[:1], *doing]
            if not behind and not (missing and name in made):
                continue
            what = " ".join((*sorted(words), name))
            cure = f"put it behind {behind[-1]!r}" if behind else f"let a pass provide {what!r}"
            raise PassError(
                f"pass {step.name!r} requires {what!r}, which nothing before it provides; {cure}"
            )
        for name, words in step.makes:
            done[name] = done.get(name, frozenset()) | words
            made.add(name)


def pass_name(function: Callable[[Any], Any]) -> str:
    """The name of a pass: its attribute ``name``, or the name of the function or class."""
    name = getattr(function, "name", None) or getattr(function, "__name__", None)
    return str(name or type(function).__name__)


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

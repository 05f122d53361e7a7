"""Run passes one after another and verify between them.

``run`` passes one value from pass to pass. ``run_all`` runs a list of ``Pass`` on named values,
called facts; each ``Pass`` says which facts it requires and provides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from fxpipe.errors import InputError, PassError, VerificationError
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.traced import Traced
from fxpipe.log import telling
from fxpipe.verify.plan import verify_plan
from fxpipe.verify.program import verify_program
from fxpipe.verify.schedule import verify_schedule
from fxpipe.verify.traced import verify_traced

A = TypeVar("A", Traced, Plan, Schedule, Program)
B = TypeVar("B", Traced, Plan, Schedule, Program)

VERIFIERS: dict[type, tuple[str, Callable[[Any], object]]] = {
    Traced: ("traced graph", verify_traced),
    Plan: ("plan", verify_plan),
    Schedule: ("schedule", verify_schedule),
    Program: ("program", verify_program),
}
"""Representation → its name in messages and its verifier."""


def run(value: A, first: Callable[[A], B], /, *passes: Callable[[B], B]) -> B:
    """Hand a value from pass to pass; verify it before the first and after each.

    Raises:
        PassError: a pass was handed or made something that its verifier refuses, or made
            something else than a traced graph, a plan, a schedule or a program. It names the pass;
            the verifier's error is the cause.
    """
    _verify(value, f"pass {pass_name(first)!r} was handed")
    made = _run(first, value)
    for each in passes:
        made = _run(each, made)
    return made


def _run(each: Callable[[Any], B], value: object) -> B:
    name = pass_name(each)
    with telling(name):
        made = each(value)
    _verify(made, f"pass {name!r} made")
    return made


@dataclass(frozen=True)
class Pass:
    """One line of a list of passes.

    Attributes:
        function: the function, which is called with the required facts as keyword arguments. If
            it is a frozen dataclass with ``__call__``, the facts named like its fields make an
            object of it, which is called with the others.
        requires: the facts that it needs, such as ``"plan, state"``. Words before a fact say what
            must have been done to it: ``"differentiated plan"``.
        provides: the facts that it returns, in this order, with words that say what the pass has
            done to them.
        when: the fact that says whether the pass runs; with ``not`` before it, whether it is
            skipped. Empty for a pass that always runs.
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
        """Whether the pass is to run with these facts."""
        name = self.when.removeprefix("not ")
        return not name or bool(facts[name]) == (name == self.when)

    def __call__(self, facts: Mapping[str, Any]) -> Any:
        """Call the function with the facts that the pass requires, and return its result."""
        given = {name: facts[name] for name, _ in self.needs}
        if not isinstance(self.function, type):
            return self.function(**given)
        fields = {field.name for field in dataclasses.fields(self.function)}
        made = self.function(**{name: given.pop(name) for name in fields & given.keys()})
        return made(**given)


def _facts(text: str) -> Iterator[tuple[str, frozenset[str]]]:
    for part in filter(None, text.split(", ")):
        *done, name = part.split()
        yield name, frozenset(done)


def run_all(passes: Sequence[Pass], given: Mapping[str, Any]) -> dict[str, Any]:
    """Run a list of passes; verify each representation that one makes.

    Args:
        passes: the list.
        given: the facts to begin with, by name.

    Returns:
        All facts: those given and those that the passes made.

    Raises:
        PassError: a required fact is missing, or a pass made something that its verifier refuses.
            It names the pass.
    """
    check_order(passes, given)
    facts = dict(given)
    for each in passes:
        if not each.runs(facts):
            continue
        for name, _ in each.needs:
            if name not in facts:
                raise PassError(f"pass {each.name!r} requires {name!r}, which nothing made")
        with telling(each.name):
            made = each(facts)
        names = [name for name, _ in each.makes]
        values = made if len(names) > 1 else [made][: len(names)]
        for name, value in zip(names, values, strict=True):
            if type(value) in VERIFIERS and value is not facts.get(name):
                _verify(value, f"pass {each.name!r} made")
            facts[name] = value
    return facts


def check_order(passes: Sequence[Pass], given: Collection[str]) -> None:
    """Check that each pass comes after the passes that provide what it requires.

    Passes with a condition count as if they ran. A word on a given fact that no pass of the list
    provides counts as done before. A word that several passes provide holds after the last of them.

    Args:
        passes: the list.
        given: the facts that exist before the list runs.

    Raises:
        PassError: a pass comes too early; it names the pass, and the one to put it after.
    """
    done = dict.fromkeys(given, frozenset[str]())
    own: set[str] = set()
    for place, each in enumerate(passes):
        for name, words in each.needs:
            left = words - done.get(name, frozenset())
            later = [other for other in passes[place + 1 :] if name in dict(other.makes)]
            doing = [
                other.name
                for other in later
                if words & dict(other.makes)[name] - dict(other.needs).get(name, frozenset())
            ]
            making = [other.name for other in later if name not in dict(other.needs)]
            behind = doing if name in done else [*making[:1], *doing]
            if not behind and not (left and name in own):
                continue
            what = " ".join((*sorted(words), name))
            cure = f"put it behind {behind[-1]!r}" if behind else f"let a pass provide {what!r}"
            raise PassError(
                f"pass {each.name!r} requires {what!r}, which nothing before it provides; {cure}"
            )
        for name, words in each.makes:
            done[name] = done.get(name, frozenset()) | words
            own.add(name)


def pass_name(each: Callable[[Any], Any]) -> str:
    """The name of a pass: its attribute ``name``, or else that of its function or class."""
    name = getattr(each, "name", None) or getattr(each, "__name__", None)
    return str(name or type(each).__name__)


def _verify(value: object, what: str) -> None:
    entry = VERIFIERS.get(type(value))
    if entry is None:
        raise PassError(f"{what} {value!r:.99}, which is no representation that can be verified")
    word, verify = entry
    try:
        with telling(f"verify {word}"):
            verify(value)
    except VerificationError as error:
        raise PassError(f"{what} an invalid {word}: {error}") from error


def comes_after(program: Program, name: str, earlier: str) -> None:
    """Check that a pass comes once, and after an earlier one.

    Raises:
        InputError: it does not.
    """
    if name in program.passes or earlier not in program.passes:
        done = " ".join(program.passes) or "none"
        raise InputError(f"{name} comes once and after {earlier}; the passes done are: {done}")

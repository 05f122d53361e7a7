"""Whether a program runs, and computes what its schedule says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fxpipe.errors import Fault, VerificationError
from fxpipe.program import Program
from fxpipe.verify import compute, flow
from fxpipe.verify.facts import Facts
from fxpipe.verify.form import Form, frame_faults
from fxpipe.verify.waits import Place

Rule = Callable[[Facts], Iterator[Fault]]

RULES: dict[str, tuple[Rule, ...]] = {
    "lower": (
        compute.complete,
        compute.ascending,
        compute.kept,
        compute.versions,
        compute.barriers,
        compute.meetings,
    ),
    "communicate": (flow.lives, flow.paired, flow.delivered, flow.paused, flow.unstuck),
    "free": (flow.leaks,),
}
"""Pass → what holds once it is done. That instructions are well-formed holds always."""


def verify_program(program: Program) -> Program:
    """Return the program, or raise VerificationError with every fault.

    It takes time in proportion to the number of instructions.
    """
    faults = list(frame_faults(program)) or _faults(program)
    if faults:
        raise VerificationError(f"program {program.name!r}", faults)
    return program


def _faults(program: Program) -> list[Fault]:
    malformed: set[Place] = set()
    faults = list(Form(program).faults(malformed))
    facts = Facts(program, malformed)
    for name, rules in RULES.items():
        if name in program.passes:
            for rule in rules:
                faults.extend(rule(facts))
    return faults

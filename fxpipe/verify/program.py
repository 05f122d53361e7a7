"""Whether a program runs, and computes what its schedule says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fxpipe.errors import Fault, VerificationError
from fxpipe.ir.program import Program
from fxpipe.ir.walk import Place
from fxpipe.torchtools.state import without_collection
from fxpipe.verify import compute, flow, races, reads
from fxpipe.verify.channels import Unstuck
from fxpipe.verify.facts import Facts
from fxpipe.verify.form import Form, frame_faults

Rule = Callable[[Facts], Iterator[Fault]]

RULES: dict[str, tuple[Rule, ...]] = {
    "lower": (
        compute.complete,
        compute.ascending,
        compute.kept,
        compute.updated,
        compute.followed,
        reads.versions,
        compute.barriers,
        compute.meetings,
    ),
    "communicate": (flow.lives, flow.paired, flow.delivered, flow.paused),
}
"""Pass → what holds once it is done. That instructions are well-formed holds always, and once
frees are in place nothing is left of a batch."""

ORDERED: tuple[Rule, ...] = (races.recorded, races.races)
"""What holds of a program with streams, and is asked where nothing else is wrong."""


@without_collection()
def verify_program(program: Program, channel: int | None = None) -> Program:
    """Return the program, or raise VerificationError with every fault.

    It takes time in proportion to the number of instructions.

    Args:
        program: any.
        channel: how many values may be on their way from one device to another, as in Unstuck.

    Raises:
        VerificationError: with every fault.
        InputError: the channel is less than nothing.
    """
    unstuck = Unstuck(channel)
    faults = list(frame_faults(program)) or _faults(program, unstuck)
    if faults:
        raise VerificationError(f"program {program.name!r}", faults, program)
    return program


def _faults(program: Program, unstuck: Unstuck) -> list[Fault]:
    malformed: set[Place] = set()
    faults = list(Form(program).faults(malformed))
    facts = Facts(program, malformed)
    for name, rules in RULES.items():
        if name in program.passes:
            for rule in rules:
                faults.extend(rule(facts))
    if "communicate" in program.passes:
        faults.extend(unstuck(facts))
    if program.launches and not faults:
        for rule in ORDERED:
            faults.extend(rule(facts))
    return faults

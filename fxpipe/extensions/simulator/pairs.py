"""Pairs: a forward and a backward that a device runs together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule

Backward = tuple[str, int, int]
"""Letter, stage and micro-batch of the second task of a pair."""

Pairs = Mapping[Backward, tuple[int, int]]
"""The second task of each pair → stage and micro-batch of its forward."""


def pairs_in(schedule: Schedule) -> dict[Backward, tuple[int, int]]:
    """The pairs of a valid schedule."""
    found: dict[Backward, Any] = {}
    for device in range(schedule.devices if schedule.paired else 0):
        for first, *rest in schedule.units(device):
            for then in rest:
                assert then.stage is not None
                assert then.microbatch is not None
                found[then.kind, then.stage, then.microbatch] = first.stage, first.microbatch
    return found


def start_together(program: Program, pairs: Pairs) -> Program:
    """Program → Program: pairs start once both inputs are there, and send at their end.

    Before, with the pair ``F1&B0``::

        forward   s0[1] v0 keep
        send      act:z:0->1[1]
        recv      grad:z:1->0[0]
        backward  s0[0] v0

    after::

        recv      grad:z:1->0[0]
        forward   s0[1] v0 keep
        backward  s0[0] v0
        send      act:z:0->1[1]
    """
    return replace(program, lists=tuple(tuple(_joined(row, pairs)) for row in program.lists))


def _joined(row: Sequence[ins.Instruction], pairs: Pairs) -> Iterator[ins.Instruction]:
    forward: list[ins.Instruction] = []  # the last forward, and what has come behind it
    for x in row:
        if forward and joins(forward[0], x, pairs):
            out = [y for y in forward[1:] if isinstance(y, ins.Send | ins.Output)]
            yield from (y for y in forward[1:] if y not in out)
            yield from (forward[0], x, *out)
            forward = []
        elif forward and x.letter is None:
            forward.append(x)
        else:
            yield from forward
            forward = [x] if isinstance(x, ins.Forward) else []
            if not forward:
                yield x
    yield from forward


def joins(first: ins.Instruction | None, then: ins.Instruction, pairs: Pairs) -> bool:
    """Whether two tasks, one right after the other, are a pair."""
    return isinstance(first, ins.Forward) and pairs.get(backward(then)) == (
        first.stage,
        first.microbatch,
    )


def backward(instruction: ins.Instruction) -> Backward:
    """The task of an instruction, to be found among pairs."""
    letter, stage = instruction.letter or "", getattr(instruction, "stage", -1)
    i = getattr(instruction, "microbatch", None)
    return letter, stage, -1 if i is None else i

"""Free every buffer after its last use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer
from fxpipe.passes.runner import comes_after
from fxpipe.torchtools.state import without_collection


@without_collection()
def free(program: Program) -> Program:
    """Program → Program: a ``free`` right after the last use of each buffer on each device.

    Before::

        device 1
          recv      act:y:0->1[0]
          forward   s1[0] v0 keep
          send      act:z:1->2[0]

    after::

        device 1
          recv      act:y:0->1[0]
          forward   s1[0] v0 keep
          free      act:y:0->1[0]
          send      act:z:1->2[0]
          free      act:z:1->2[0]

    What a stage saved needs none: its backward uses it up. What it offloads is freed once that is
    stored, for which the free waits, where the stage recomputes that of its state. So that it
    seldom does, and that no more is held than is foreseen, it stands behind the next computation,
    which the storing overlaps::

        offload   offloaded:1[0]
        forward   s1[1] v0 keep
        free      saved:1[0]

    Raises:
        InputError: the program's communication is not in place, or it is freed already.
    """
    comes_after(program, "free", "communicate")
    lists = tuple(tuple(_freed(program, list_)) for list_ in program.lists)
    return replace(program, lists=lists, passes=(*program.passes, "free"))


def _freed(
    program: Program, instructions: tuple[ins.Instruction, ...]
) -> Iterator[ins.Instruction]:
    ends = _last_uses(program, instructions)
    for position, x in enumerate(instructions):
        if isinstance(x, ins.Offload):
            stored = ends.pop(position, [])
            ends.setdefault(_overlapped(instructions, position, x), []).extend(stored)
    for position, instruction in enumerate(instructions):
        yield instruction
        if position in ends:
            for buffer in ends[position]:
                yield ins.Free(buffer)


def _overlapped(instructions: Sequence[ins.Instruction], offload: int, what: ins.Offload) -> int:
    """The position of the computation that storing overlaps, or of the last that is sent of it; or,
    where what is stored is needed before or all devices meet, the one before that."""
    computed = False
    for position in range(offload + 1, len(instructions)):
        match instructions[position]:
            case ins.Compute():
                if computed:
                    return position - 1
                computed = True
            case ins.Send() | ins.Stash() | ins.Output():
                pass
            case ins.Prefetch(buffer) if buffer[2:5] == what.buffer[2:5]:
                return position - 1
            case ins.Barrier() | ins.Pause():
                return position - 1
            case _ if computed:
                return position - 1
    return len(instructions) - 1


def _last_uses(
    program: Program, instructions: tuple[ins.Instruction, ...]
) -> dict[int, list[Buffer]]:
    """Position → the buffers that nothing uses after it and that it does not end itself.

    All that is made is read on its device, if only by its send or output.
    """
    last: dict[int, list[Buffer]] = {}
    seen: set[object] = set()
    for position in _backwards(program, instructions):
        instruction = instructions[position]
        # the first five fields are a buffer whatever window it is seen from
        seen.update([buffer[:5] for buffer in program.ends(instruction)])
        for buffer in program.reads(instruction):
            if (value := buffer[:5]) not in seen:
                last.setdefault(position, []).append(buffer)
                seen.add(value)
    return last


def _backwards(program: Program, instructions: tuple[ins.Instruction, ...]) -> Iterable[int]:
    """Positions from the last to the first that a batch meets.

    Where batches overlap a batch meets several windows: first as this step's, then as the one
    before.
    """
    positions = range(len(instructions) - 1, -1, -1)
    if not program.depth:
        return positions
    return sorted(positions, key=lambda position: ins.batch_of(instructions[position]))

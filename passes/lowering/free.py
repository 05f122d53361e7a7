"""Free every buffer after its last use."""

from __future__ import annotations

from collections import defaultdict
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

    What a stage saved needs no free, because its backward uses it up. What it offloads is freed
    once it is stored, and the free waits for that. So that it seldom has to, and the memory stays
    as predicted, it comes behind the next computation, which overlaps the store::

        offload   offloaded:1[0]
        forward   s1[1] v0 keep
        free      saved:1[0]

    Raises:
        InputError: ``communicate`` has not run yet, or ``free`` has.
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
            ends[_overlapped(instructions, position, x)] += stored
    for position, x in enumerate(instructions):
        yield x
        yield from map(ins.Free, ends.get(position, ()))


def _overlapped(instructions: Sequence[ins.Instruction], offload: int, what: ins.Offload) -> int:
    """The last position that a store overlaps: the next computation and what sends its values, but
    only up to what needs the stored value, or up to a barrier or pause."""
    computed = False
    for position in range(offload + 1, len(instructions)):
        x = instructions[position]
        if isinstance(x, ins.Send | ins.Stash | ins.Output):
            continue
        needed = isinstance(x, ins.Prefetch) and x.buffer[2:5] == what.buffer[2:5]
        if computed or needed or isinstance(x, ins.Meeting):
            return position - 1
        computed = isinstance(x, ins.Compute)
    return len(instructions) - 1


def _last_uses(
    program: Program, instructions: tuple[ins.Instruction, ...]
) -> defaultdict[int, list[Buffer]]:
    """Position → the buffers whose last use it is and that it does not end itself.

    Every value that is made is also read on its device, if only by its send or output.
    """
    last: defaultdict[int, list[Buffer]] = defaultdict(list)
    seen: set[object] = set()
    for position in _backwards(program, instructions):
        instruction = instructions[position]
        # the first five fields name a buffer independently of the window
        seen.update([buffer[:5] for buffer in instruction.ends(program)])
        for buffer in instruction.uses(program):
            if (value := buffer[:5]) not in seen:
                last[position].append(buffer)
                seen.add(value)
    return last


def _backwards(program: Program, instructions: tuple[ins.Instruction, ...]) -> Iterable[int]:
    """Positions in the reverse of the order in which a batch passes through them.

    Where batches overlap, a batch passes through several windows: first as this step's batch, then
    as the one before.
    """
    positions = range(len(instructions) - 1, -1, -1)
    if not program.depth:
        return positions
    return sorted(positions, key=lambda position: instructions[position].batch)

"""Free every buffer after its last use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import COMPUTE
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

    What a stage saved needs no free, because its backward uses it up. What is last used by an
    instruction of another stream than the one that computes is freed once that is done, and the
    free waits for that. So that it seldom has to, and the memory stays as predicted, it comes
    behind the next computation, which overlaps that instruction.

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
        if x.stream != COMPUTE and (used := ends.pop(position, [])):
            ends[_overlapped(program, instructions, position)] += used
    for position, x in enumerate(instructions):
        yield x
        yield from map(ins.Free, ends.get(position, ()))


def _overlapped(program: Program, instructions: Sequence[ins.Instruction], begun: int) -> int:
    """The last position that an instruction beside the others overlaps: the next computation and
    what sends its values, but only up to what needs what it makes, or up to a barrier or pause."""
    computed = False
    made = {buffer[:5] for buffer in instructions[begun].makes(program)}
    for position in range(begun + 1, len(instructions)):
        x = instructions[position]
        if isinstance(x, ins.Send | ins.Output):
            continue
        needed = any(buffer[:5] in made for buffer in x.uses(program))
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

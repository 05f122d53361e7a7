"""Free every buffer after its last use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fxpipe.errors import InputError
from fxpipe.program import Buffer, Free, Instruction, Program


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

    What a stage saved needs none: its backward uses it up.

    Raises:
        InputError: the program's communication is not in place, or it is freed already.
    """
    if "communicate" not in program.passes or "free" in program.passes:
        done = " ".join(program.passes) or "none"
        raise InputError(f"free comes once and after communicate; the passes done are: {done}")
    lists = tuple(tuple(_freed(program, list_)) for list_ in program.lists)
    return replace(program, lists=lists, passes=(*program.passes, "free"))


def _freed(program: Program, instructions: tuple[Instruction, ...]) -> Iterator[Instruction]:
    ends = _last_uses(program, instructions)
    for instruction, last in zip(instructions, ends, strict=True):
        yield instruction
        for buffer in last:
            yield Free(buffer)


def _last_uses(program: Program, instructions: tuple[Instruction, ...]) -> list[list[Buffer]]:
    """Position → the buffers that nothing uses after it and that it does not end itself.

    All that is made is read on its device, if only by its send or output.
    """
    seen: set[Buffer] = set()
    last: list[list[Buffer]] = []
    for instruction in reversed(instructions):
        seen.update(program.ends(instruction))
        last.append([buffer for buffer in program.reads(instruction) if buffer not in seen])
        seen.update(last[-1])
    last.reverse()
    return last

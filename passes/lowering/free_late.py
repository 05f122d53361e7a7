"""Move the frees of sent values behind the copies that read them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer
from fxpipe.passes.lowering.launch_order import Launched


def free_late(
    program: Program, order: Sequence[Sequence[Launched]]
) -> tuple[tuple[ins.Instruction, ...], ...]:
    """Device → its list, where no free of a sent value makes its device wait for the copy.

    The free comes behind one more computation of the sender, which overlaps the copy, and not
    before the receiver has come to the computation that uses the value, for then the copy is
    done; but before any barrier or pause. Where batches overlap, a value that arrives in a later
    window is freed in that window.

    Args:
        program: a program whose values are freed where they are sent.
        order: device → its list, in the order over all devices.
    """
    uses = _uses(program, order)
    return tuple(_moved(device, own, uses) for device, own in enumerate(order))


class _Use(NamedTuple):
    """The first use of a sent value on its receiver: by then the copy is done."""

    source: int
    rank: int
    start: float
    batch: int


def _uses(program: Program, order: Sequence[Sequence[Launched]]) -> dict[object, _Use]:
    """Value → the use on the device that receives it, in the window in which it arrives."""
    uses: dict[object, _Use] = {}
    for own in order:
        unused: set[Buffer] = set()
        for rank, start, x in own:
            if isinstance(x, ins.Receive | ins.Pop):
                uses[x.buffer[:5]] = _Use(program.origin(x), rank, start, x.buffer.batch)
                unused.add(x.buffer)
            for buffer in unused.intersection(program.reads(x)):
                unused.discard(buffer)
                uses[buffer[:5]] = uses[buffer[:5]]._replace(rank=rank, start=start)
    return uses


def _moved(
    device: int, own: Sequence[Launched], uses: dict[object, _Use]
) -> tuple[ins.Instruction, ...]:
    stops = [at for at, each in enumerate(own) if not isinstance(each.instruction, ins.Move)]
    ranks = [own[at].rank for at in stops]
    starts = [own[at].start for at in stops]
    meetings = [
        number
        for number, at in enumerate(stops)
        if isinstance(own[at].instruction, ins.Barrier | ins.Pause)
    ]
    sent = {
        each.instruction.buffer: at
        for at, each in enumerate(own)
        if isinstance(each.instruction, ins.Send | ins.Stash)
    }
    kept: list[ins.Instruction | None] = [each.instruction for each in own]
    late: defaultdict[int, list[ins.Instruction]] = defaultdict(list)
    for at, each in enumerate(own):
        if not isinstance(each.instruction, ins.Free):
            continue
        buffer = each.instruction.buffer
        use = uses.get(buffer[:5])
        if use is None or use.source != device:
            continue
        first = bisect_right(ranks, use.rank)
        stop = max(first, bisect_left(starts, use.start))
        if use.batch == buffer.batch:
            stop = max(stop, bisect_right(stops, sent[buffer]) + 1)
        meeting = bisect_left(meetings, first)
        if meeting < len(meetings):
            stop = min(stop, meetings[meeting])
        kept[at] = None
        place = stops[stop] if stop < len(stops) else len(own)
        late[place].append(ins.Free(buffer._replace(batch=use.batch)))
    merged: list[ins.Instruction] = []
    for at, x in enumerate([*kept, None]):
        merged.extend(late.get(at, ()))
        if x is not None:
            merged.append(x)
    return tuple(merged)

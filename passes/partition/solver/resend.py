"""Count a value as often as it is sent, where the work between its readers keeps them apart.

before:  x → pool, cat                 where 20 s of work lie between pool and cat
after:   x → pool, and x → cat         if no stage may take more than 10 s

A stage holds all that lies between two atoms that it holds, so these two never share one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fxpipe.passes.partition.solver.bound import Reach, Scale
from fxpipe.passes.partition.work import Machine, Transfer, Work

_ROUNDING = 1 + 1e-9


def sent_apart(work: Work, machine: Machine, cap: float) -> Work:
    """The same work, in which divisions that take ``cap`` seconds at most cost the same as before;
    but what is sent to several stages is several values, wherever that is sure.

    Args:
        work: the atoms.
        machine: the stages.
        cap: seconds of the slowest stage.
    """
    if all(len(value.readers) == 1 for value in work.transfers):
        return work
    reach, scale = Reach(work), Scale(work)
    most = cap * max(machine.speeds) * _ROUNDING

    def apart(first: int, second: int) -> bool:
        if not reach.after[first] >> second & 1:
            return False
        between = reach.after[first] & reach.before[second]
        return scale.least(between | 1 << first | 1 << second) > most

    def parts(value: Transfer) -> Iterator[Transfer]:
        readers = value.readers
        # of a shared parameter the first reader's stage is the owner of all
        groups: list[list[int]] = [] if value.source is not None else [list(readers)]
        for reader in readers if value.source is not None else ():
            near = [g for g in groups if not all(apart(other, reader) for other in g)]
            groups = [g for g in groups if g not in near]
            groups.append([*(other for g in near for other in g), reader])
        yield from (replace(value, readers=tuple(group)) for group in groups)

    transfers = (part for value in work.transfers for part in parts(value))
    return replace(work, transfers=tuple(transfers))

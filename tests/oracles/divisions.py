"""Small graphs and machines at random, and all their legal divisions, weighed in another way."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from hypothesis import settings
from hypothesis import strategies as st

from fxpipe.passes.partition.work import Machine, Transfer, Work

MANY = settings(max_examples=max(400, settings().max_examples))
"""Graphs are small here, and those that tell a wrong bound from a right one are rare."""


@st.composite
def works(draw: st.DrawFn, atoms: int = 7) -> Work:
    count = draw(st.integers(1, atoms))
    seconds = st.sampled_from([0.0, 0.5, 1.0, 2.0, 2.005, 3.0, 7.0])
    size = st.integers(0, 4)
    transfers = []
    for source in range(count - 1):
        readers = draw(st.sets(st.integers(source + 1, count - 1), max_size=3))
        if readers:
            value = Transfer(source, tuple(sorted(readers)), draw(size), draw(st.booleans()))
            transfers.append(value)
    if count > 1 and draw(st.booleans()):
        users = draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=3))
        held, undo = draw(st.integers(0, 8)), draw(st.integers(0, 8))
        transfers.append(Transfer(None, tuple(sorted(users)), draw(size), True, held, undo))
    return Work(
        tuple(draw(seconds) for _ in range(count)),
        tuple(draw(size) for _ in range(count)),
        tuple(draw(size) for _ in range(count)),
        tuple(transfers),
        tuple(draw(st.integers(0, 9)) for _ in range(count)) if draw(st.booleans()) else (),
    )


def chain(seconds: Sequence[float], sizes: Sequence[int] = ()) -> Work:
    """Each atom reads the one before it."""
    sizes = sizes or [1] * len(seconds)
    return Work(
        tuple(seconds),
        (1,) * len(seconds),
        (1,) * len(seconds),
        tuple(Transfer(i, (i + 1,), sizes[i], True) for i in range(len(seconds) - 1)),
    )


@st.composite
def machines(draw: st.DrawFn, stages: int) -> Machine:
    def table(amounts: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        if not draw(st.booleans()):
            return ()
        same = draw(st.sampled_from(amounts))
        alike = draw(st.booleans())
        return tuple(
            tuple(same if alike else draw(st.sampled_from(amounts)) for _ in range(stages))
            for _ in range(stages)
        )

    def each(one: st.SearchStrategy[float], otherwise: float) -> tuple[float, ...]:
        if not draw(st.booleans()):
            return (otherwise,) * stages
        return tuple(draw(one) for _ in range(stages))

    return Machine(
        speeds=each(st.sampled_from([0.5, 1.0, 2.0]), 1.0),
        limits=each(st.sampled_from([8.0, 20.0, 40.0, math.inf]), math.inf),
        peaks=tuple(range(stages, 0, -1)),
        per_byte=table((0.0, 0.1, 1.0)),
        per_message=table((0.0, 0.2)),
        arrived=draw(st.sampled_from([(), (3,) * stages])),
        reserved=draw(st.sampled_from([(), tuple(range(stages)), (-2,) * stages])),
    )


def legal(work: Work, stages: int) -> Iterator[tuple[int, ...]]:
    """Every assignment in which no value runs backward and no stage is empty."""
    for assigned in itertools.product(range(stages), repeat=len(work)):
        forward = all(
            transfer.source is None
            or all(assigned[transfer.source] <= assigned[reader] for reader in transfer.readers)
            for transfer in work.transfers
        )
        if forward and len(set(assigned)) == stages:
            yield assigned


def weighed(work: Work, machine: Machine, assigned: Sequence[int]) -> tuple[list[float], int]:
    """Seconds of each stage, bytes that cross: written down once more, in another way."""
    seconds = [
        math.fsum(s for s, at in zip(work.seconds, assigned, strict=True) if at == stage) / speed
        for stage, speed in enumerate(machine.speeds)
    ]
    crossing = 0
    for value in work.transfers:
        stages = sorted({assigned[reader] for reader in value.readers})
        home = stages[0] if value.source is None else assigned[value.source]
        for other in stages:
            if other == home:
                continue
            crossing += value.bytes
            for a, b in ((home, other), (other, home)) if value.returns else ((home, other),):
                took = machine.per_byte[a][b] * value.bytes if machine.per_byte else 0.0
                took += machine.per_message[a][b] if machine.per_message and value.bytes else 0.0
                seconds[home] += took
                seconds[other] += took
    return seconds, crossing


def fits(work: Work, machine: Machine, assigned: Sequence[int]) -> bool:
    """Whether each stage keeps its limit: likewise."""
    for stage, limit in enumerate(machine.limits):
        own = [atom for atom, at in enumerate(assigned) if at == stage]
        always = machine.reserved[stage] if machine.reserved else 0.0
        always += sum(work.resident[atom] for atom in own)
        undo = sum(work.undo[atom] for atom in own) if work.undo else 0
        stash = machine.peaks[stage] * sum(work.saved[atom] for atom in own)
        for value in work.transfers:
            readers = [assigned[reader] for reader in value.readers]
            home = min(readers) if value.source is None else assigned[value.source]
            if home == stage:
                always, undo = always + value.resident, undo + value.undo
            elif stage in readers:
                stash += (machine.arrived or machine.peaks)[stage] * value.bytes
        if always + stash > limit or always + undo > limit:
            return False
    return True

"""All legal divisions of a small graph of work, each weighed from scratch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from fxpipe.passes.partition.work import StageDevices, Work


def legal(work: Work, stages: int) -> Iterator[tuple[int, ...]]:
    """Yield every assignment in which no value flows backward and no stage is empty."""
    for assigned in itertools.product(range(stages), repeat=len(work)):
        forward = all(
            transfer.source is None
            or all(assigned[transfer.source] <= assigned[reader] for reader in transfer.readers)
            for transfer in work.transfers
        )
        if forward and len(set(assigned)) == stages:
            yield assigned


def weighed(work: Work, machine: StageDevices, assigned: Sequence[int]) -> tuple[list[float], int]:
    """The seconds of each stage, and the bytes that cross stages, computed unlike the solver."""
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


def fits(work: Work, machine: StageDevices, assigned: Sequence[int]) -> bool:
    """Whether each stage keeps within its limit, computed unlike the solver."""
    for stage, limit in enumerate(machine.limits):
        own = [atom for atom, at in enumerate(assigned) if at == stage]
        always = machine.reserved[stage] if machine.reserved else 0.0
        always += sum(work.resident[atom] for atom in own)
        saved = machine.peaks[stage] * sum(work.saved[atom] for atom in own)
        for value in work.transfers:
            readers = [assigned[reader] for reader in value.readers]
            home = min(readers) if value.source is None else assigned[value.source]
            if home == stage:
                always += value.resident
            elif stage in readers:
                saved += (machine.arrived or machine.peaks)[stage] * value.bytes
        if always + saved > limit:
            return False
    return True

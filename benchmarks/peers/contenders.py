"""Everyone who takes part, by name. Each imports what it needs in its own processes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.case import DEVICES, Case
from benchmarks.peers.contender import Contender

Make = Callable[[Case, int, str], Contender]
"""From a case, the number of the process and the URL of a file where the processes meet."""


LATE_TURN = 6
"""Steps that overlap, and at their end a flush: it counts as a part of each of them."""


@dataclass(frozen=True)
class Entry:
    """A contender before it is imported.

    Attributes:
        load: imports it.
        processes: how many it is.
        threads: of each process.
        late: whether its gradients are one version late, as it says.
        turn: how many steps it makes in a row; the work of each must not reach into others' turns.
        rounded: whether its losses may differ from the loop's by rounding, as it says.
    """

    load: Callable[[], Make]
    processes: int = 1
    threads: int = DEVICES
    late: bool = False
    turn: int = 1
    rounded: bool = False


def _loop(threads: int) -> Entry:
    def load() -> Make:
        from benchmarks.peers.loop import Loop

        return lambda case, rank, meeting: Loop(case, threads)

    return Entry(load, threads=threads)


def _late_loop() -> Make:
    from benchmarks.peers.loop import LateLoop

    return lambda case, rank, meeting: LateLoop(case, 1)


def _gpipe() -> Make:
    from benchmarks.peers.gpipe import TorchGPipe

    return lambda case, rank, meeting: TorchGPipe(case)


def _pipelining() -> Make:
    from benchmarks.peers.pipelining import Pipelining

    return Pipelining


def _pipe(
    schedule: str, *, late: bool = False, fused: bool = False, dispatch: str = "auto"
) -> Entry:
    def load() -> Make:
        from benchmarks.peers.pipe import Pipe

        options: dict[str, Any] = {
            "schedule": schedule,
            "fuse_accumulation": fused,
            "dispatch": dispatch,
        }
        return lambda case, rank, meeting: Pipe(case, **options)

    return Entry(load, late=late, turn=LATE_TURN if late else 1, rounded=fused)


def _ranks() -> Make:
    from benchmarks.peers.pipe import RankPipe

    return RankPipe


LOOP = "plain loop, 1 thread"
LATE = "plain loop, gradients one version late"
PIPELINING = "torch.distributed.pipelining, 1F1B"
THREADS = "fxpipe, 1f1b, a thread a device"
RANKS = "fxpipe, 1f1b, a rank a device"

CONTENDERS = {
    LOOP: _loop(1),
    "plain loop, 2 threads": _loop(2),
    "torchgpipe": Entry(_gpipe),
    PIPELINING: Entry(_pipelining, processes=DEVICES, threads=1),
    "fxpipe, 1f1b": _pipe("1f1b"),
    THREADS: _pipe("1f1b", dispatch="device"),
    RANKS: Entry(_ranks, processes=DEVICES, threads=1),
    "fxpipe, 1f1b, fused": _pipe("1f1b", fused=True),
    "fxpipe, zb-h1": _pipe("zb-h1"),
    "fxpipe, 2bw": _pipe("2bw", late=True),
}

REFERENCES = {LATE: Entry(_late_loop, threads=1, late=True, turn=LATE_TURN)}
"""Those whose losses are of interest, and not their time."""

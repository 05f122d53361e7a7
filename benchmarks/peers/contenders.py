"""Everyone who takes part, by name. Each imports what it needs in its own processes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

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
        apart: whether each device has a process of its own.
        threads: of each process.
        late: whether its gradients are one version late, as it says.
        turn: how many steps it makes in a row; the work of each must not reach into others' turns.
        whole: whether each of its processes makes whole steps, by itself and at the same time.
    """

    load: Callable[[], Make]
    apart: bool = False
    threads: int = DEVICES
    late: bool = False
    turn: int = 1
    whole: bool = False


def _loop(threads: int, *, at_once: bool = False) -> Entry:
    def load() -> Make:
        from benchmarks.peers.loop import Loop

        return lambda case, rank, meeting: Loop(case, threads)

    return Entry(load, apart=at_once, threads=threads, whole=at_once)


def _late_loop() -> Make:
    from benchmarks.peers.loop import LateLoop

    return lambda case, rank, meeting: LateLoop(case, 1)


def _gpipe(checkpoint: str = "never") -> Entry:
    def load() -> Make:
        from benchmarks.peers.gpipe import TorchGPipe

        return lambda case, rank, meeting: TorchGPipe(case, checkpoint)

    return Entry(load)


def _pipelining(traced: bool = False) -> Entry:
    def load() -> Make:
        from benchmarks.peers.pipelining import Pipelining

        return partial(Pipelining, traced=traced)

    return Entry(load, apart=True, threads=1)


def _pipe(
    schedule: str,
    *,
    late: bool = False,
    threads: Literal["device", "thread"] | None = None,
    recompute: str = "never",
) -> Entry:
    def load() -> Make:
        import fxpipe
        from benchmarks.peers.pipe import Pipe

        options: dict[str, Any] = {
            "schedule": schedule,
            "extensions": [] if threads is None else [fxpipe.Dispatch(threads)],
            "recompute": recompute,
        }
        return lambda case, rank, meeting: Pipe(case, **options)

    return Entry(load, late=late, turn=LATE_TURN if late else 1)


def _ranks(built_on: str = "cpu") -> Entry:
    def load() -> Make:
        from benchmarks.peers.pipe import RankPipe

        return partial(RankPipe, built_on=built_on)

    return Entry(load, apart=True, threads=1)


LOOP = "loop, 1 thread"
LIMIT = "two loops at once"
LATE = "loop, late gradients"
GPIPE = "torchgpipe"
PIPELINING = "torch pipelining"
TRACED = "torch pipelining, traced"
OURS = "fxpipe 1f1b"
THREADS = "fxpipe 1f1b, threads"
RANKS = "fxpipe 1f1b, ranks"
META = "fxpipe 1f1b, ranks, meta"

CONTENDERS = {
    LOOP: _loop(1),
    "loop, 2 threads": _loop(2),
    LIMIT: _loop(1, at_once=True),
    GPIPE: _gpipe(),
    PIPELINING: _pipelining(),
    OURS: _pipe("1f1b"),
    THREADS: _pipe("1f1b", threads="device"),
    RANKS: _ranks(),
    "fxpipe zb-h1": _pipe("zb-h1"),
    "fxpipe 2bw": _pipe("2bw", late=True),
}

SAVING = {
    "torchgpipe, recompute": _gpipe("always"),
    "fxpipe gpipe": _pipe("gpipe"),
    META: _ranks("meta"),
    "fxpipe 1f1b, recompute": _pipe("1f1b", recompute="always"),
}
"""Those that are of interest for their memory."""

REFERENCES = {
    LATE: Entry(_late_loop, threads=1, late=True, turn=LATE_TURN),
    TRACED: _pipelining(traced=True),
}
"""Those whose losses, or errors, are of interest, and not their time."""

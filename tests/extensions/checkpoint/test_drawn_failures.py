"""Failures drawn at random, one after another in one run: whatever happens to whichever rank, where
and under which schedule, no rank waits for ever, all ranks count the same batches, and the weights
are those of a plain loop over the batches that count."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fxpipe import CheckpointError, EndedError, ExecutionError, InputError, RankError
from fxpipe.extensions.checkpoint.folder import Writer
from tests.helpers.failing import INTERLEAVED, Skipping, at, die, fail, pipe_of
from tests.helpers.profiles import DEEP
from tests.helpers.ranks import DeviceMesh, result_of, shared_folder, start
from tests.helpers.tiny import adam, batch, within
from tests.oracles.replicated_loop import ReplicatedLoop

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals are sent as POSIX does")

EVENTS = 8
"""Events of a run, at each of which the ranks train on at most two batches and flush."""

SCHEDULES = ["gpipe", "1f1b", "zb-h1", "2bw", "pipedream"]
"""Over three ranks, and two replicas of two; two ranks have one with two stages on each, too."""

SURVIVED = [
    *("nothing", "raise", "memory", "interrupt", "pause", "slow"),
    *("other batch", "other call", "other options", "late", "full disk"),
]
"""What a rank may do and all go on: an instruction raises, or has no memory, Ctrl-C comes during
one, the process is stopped for a moment during one, or slow; it passes a batch of another size,
makes another call than the others, has another learning rate, comes later than the timeout allows,
or cannot write a checkpoint."""

LAST = ["kill", "exit", "leave", "close", "kill in save", "kill in close"]
"""What ends a run: the rank is killed, or exits, at an instruction, or between calls its process
ends or it closes its pipe, or it is killed while it writes a checkpoint or closes its pipe."""

GONE = -signal.SIGKILL, 9
"""The exit codes of ranks that were killed, or exited at an instruction."""

DELAYS = {"2bw": (1, 1, 1), "pipedream": (2, 1, 0)}


def parts(number: int, replicas: int) -> tuple[Any, Any]:
    """Each replica's inputs of a batch, and its targets."""
    x, y = batch(6 * replicas, number)
    return x.chunk(replicas), y.chunk(replicas)


def expected(devices: int, replicas: int, schedule: str) -> list[dict[str, Tensor]]:
    """The state of the plain loop after each number of batches."""
    torch.manual_seed(0)
    model, late = Skipping(), DELAYS.get(schedule, (0, 0, 0))
    if schedule == "pipedream" and devices == 2:
        late = 1, 0, 0
    delays = dict(zip(("first", "middle", "last"), late, strict=True))
    loop = ReplicatedLoop(
        model,
        adam(model.parameters()),
        cross_entropy,
        1 if schedule == "pipedream" else 2,
        lambda name: delays[name.split(".")[0]],
    )
    return loop.states([parts(number, replicas) for number in range(2 * EVENTS + 2)])


def pause() -> None:
    """Stop this process for a moment."""
    wakes = f"sleep 0.3; kill -CONT {os.getpid()}"
    with subprocess.Popen(["sh", "-c", wakes]):
        os.kill(os.getpid(), signal.SIGSTOP)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def no_memory() -> None:
    raise MemoryError("told to have none")


DURING: dict[str, Callable[[], None]] = {
    "raise": fail,
    "memory": no_memory,
    "interrupt": interrupt,
    "pause": pause,
    "slow": lambda: time.sleep(0.3),
    "kill": die,
    "exit": lambda: os._exit(9),
}


def no_disk(*_: object) -> None:
    raise OSError(28, "No space left on device")


class Drawn:
    """One rank of a run. Every rank draws the same events."""

    def __init__(self, mesh: DeviceMesh, seed: int) -> None:
        self.draw, self.here = random.Random(seed), mesh.get_rank()
        self.ranks, self.devices = mesh.size(), mesh.size(mesh.ndim - 1)
        self.replicas = self.ranks // self.devices
        both = self.devices == 2 and self.replicas == 1
        self.schedule = self.draw.choice([*SCHEDULES, *["interleaved-1f1b"] * both])
        options = INTERLEAVED if self.schedule == "interleaved-1f1b" else {}
        microbatches = 1 if self.schedule == "pipedream" else 2
        made = {"schedule": self.schedule, "microbatches": microbatches, **options}
        self.pipe = pipe_of(mesh, **made)
        self.states = expected(self.devices, self.replicas, self.schedule)
        self.told: list[str] = []
        signal.signal(signal.SIGINT, self._interrupted)

    def run(self) -> list[str]:
        """Returns the events, and how many batches counted after each, alike on all ranks."""
        self.step()
        for _ in range(EVENTS):
            event, rank, position = self.drawn(SURVIVED)
            self.told.append(f"{self.schedule}: rank {rank}, {event} at {position}")
            self.save()
            self.survive(event, position, mine=rank == self.here)
            self.told.append(f"{self.pipe.batches} batches")
        event, rank, position = self.drawn(LAST)
        self.told.append(f"rank {rank}, {event} at {position}")
        self.end(event, position, rank)
        return self.told

    def drawn(self, events: Sequence[str]) -> tuple[str, int, int]:
        """An event, its rank, and the position of an instruction there."""
        rank = self.draw.randrange(self.ranks)
        instructions = self.pipe.program.lists[rank % self.devices]
        return self.draw.choice(events), rank, self.draw.randrange(len(instructions))

    def step(self, fewer: int = 0) -> None:
        """Train on this replica's part of a batch, or on fewer samples of it."""
        replica, whole = self.here // self.devices, parts(self.pipe.batches, self.replicas)
        x, y = (each[replica] for each in whole)
        self.pipe.step(x[fewer:], target=y[fewer:])

    def calls(self, fewer: int = 0) -> list[Callable[[], None]]:
        """Two batches and a flush."""
        return [partial(self.step, fewer), partial(self.step, fewer), self.pipe.flush]

    def save(self) -> None:
        self.pipe.save(shared_folder() / "checkpoint")

    def survive(self, event: str, position: int, *, mine: bool) -> None:
        """An event, and what all ranks do then: they load the checkpoint if the pipe has ended, and
        compare what they own with the loop."""
        group: Any = self.pipe._group
        settings = self.pipe.optimizer.param_groups
        fails: tuple[type[BaseException], ...] = (ExecutionError, EndedError)
        if event in ("nothing", "pause", "slow", "full disk"):
            fails = ()
        elif mine:
            fails = (*fails, InputError, KeyboardInterrupt)
        if event == "late":
            group.timeout = 1.0
            time.sleep(2 * mine)
        if event == "full disk":
            with pytest.MonkeyPatch.context() as patch, suppress(CheckpointError, RankError):
                if mine:
                    patch.setattr(Writer, "write_data", no_disk)
                with within(20):
                    self.save()
        rates = [each["lr"] for each in settings]
        for each in settings:
            each["lr"] *= 2 if event == "other options" and mine else 1
        calls = self.calls(2 if event == "other batch" and mine else 0)
        if event == "other call" and mine:
            calls[0] = self.save
        during = DURING.get(event, interrupt)
        with at(position if mine and event in DURING else -1, during):
            for call in calls:  # a call is one of all ranks, also where it fails
                with within(20), suppress(*fails):
                    call()
        for each, rate in zip(settings, rates, strict=True):
            each["lr"] = rate
        group.timeout = 60.0
        try:
            self.pipe.flush()
        except EndedError:
            self.pipe.load(shared_folder() / "checkpoint")
        self.compare()

    def end(self, event: str, position: int, rank: int) -> None:
        """The rank is lost, and the others are told of it in time, again and again."""
        mine = rank == self.here
        if event == "kill in save":
            with pytest.MonkeyPatch.context() as patch:
                if mine:
                    patch.setattr(Writer, "write_data", lambda *_: die())
                with suppress(CheckpointError, RankError):
                    self.save()
        if mine and event in ("leave", "close", "kill in close"):
            if event == "kill in close":
                threading.Timer(0.01, die).start()
            if event != "leave":
                self.pipe.close()
            if event == "kill in close":
                time.sleep(60)
            return
        during = DURING.get(event, die)
        with at(position if mine else -1, during):
            for seconds in (5, 1, 1):
                with within(seconds), pytest.raises(RankError) as raised:
                    for call in self.calls():
                        call()
                assert raised.value.rank == rank, repr(raised.value)
        with within(2):
            self.pipe.close()

    def compare(self) -> None:
        state = self.states[self.pipe.batches]
        for name, value in self.pipe.state_dict().items():
            assert torch.equal(value, state[name]), f"{name} is not the loop's: {self.told}"

    def _interrupted(self, *_: object) -> None:
        if self.pipe._group.called:
            raise KeyboardInterrupt


def drawn(mesh: DeviceMesh, seed: int) -> list[str]:
    return Drawn(mesh, seed).run()


@pytest.mark.parametrize("seed", range(100 if DEEP else 2))
def test_after_drawn_failures_all_ranks_count_the_same_batches_and_have_their_weights(
    seed: int,
) -> None:
    size = 2 + seed % 3  # four ranks are two replicas
    replicas = 2 if size == 4 else None
    with tempfile.TemporaryDirectory() as folder:
        ranks = [start(rank, size, folder, drawn, seed, replicas=replicas) for rank in range(size)]
        for process in ranks:
            process.join(200)
            assert process.exitcode is not None, f"a rank hangs, by the seed {seed}"
        killed = {rank for rank, process in enumerate(ranks) if process.exitcode in GONE}
        told = [result_of(folder, rank) for rank in range(size) if rank not in killed]
    assert all(each == told[0] for each in told), told
    assert len(told) >= size - 1 and len(told[0]) == 2 * EVENTS + 1
    rank, event = told[0][-1].removeprefix("rank ").split(" at ")[0].split(", ")
    assert killed == (set() if event in ("leave", "close") else {int(rank)})

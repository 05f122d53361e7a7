"""Failures drawn at random, one after another in one run: whatever happens to whichever rank, where
and under which schedule, no rank waits for ever, all ranks count the same batches, and the weights
are those of a plain loop over the batches that count."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fxpipe import EndedError, ExecutionError, InputError, RankError
from tests.helpers.failing import INTERLEAVED, Skipping, at, die, fail, pipe_of
from tests.helpers.profiles import DEEP
from tests.helpers.ranks import DeviceMesh, result_of, shared_folder, start
from tests.helpers.tiny import adam, batch, within
from tests.oracles.delayed_loop import DelayedLoop

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals are sent as POSIX does")

EVENTS = 8
"""Events of a run, at each of which the ranks train on at most two batches and flush."""

SCHEDULES = ["gpipe", "1f1b", "zb-h1", "2bw", "pipedream"]
"""Over three ranks; two have one with two stages on each rank, too."""

SURVIVED = ["nothing", "raise", "interrupt", "pause", "other batch", "late"]
"""What a rank may do and all go on: an instruction raises, Ctrl-C comes during one, the process is
stopped for a moment during one, it passes a batch of another size, or comes later than the timeout
allows."""

LAST = ["kill", "leave", "close"]
"""What ends a run: the rank is killed at an instruction, or between calls its process ends or it
closes its pipe."""

DELAYS = {"2bw": (1, 1, 1), "pipedream": (2, 1, 0)}


def expected(size: int, schedule: str) -> list[dict[str, Tensor]]:
    """The state of the plain loop after each number of batches."""
    torch.manual_seed(0)
    model, late = Skipping(), DELAYS.get(schedule, (0, 0, 0))
    if schedule == "pipedream" and size == 2:
        late = 1, 0, 0
    delays = dict(zip(("first", "middle", "last"), late, strict=True))
    loop = DelayedLoop(
        model,
        adam(model.parameters()),
        cross_entropy,
        1 if schedule == "pipedream" else 2,
        lambda name: delays[name.split(".")[0]],
    )
    return loop.states([batch(seed=number) for number in range(2 * EVENTS + 2)])


def pause() -> None:
    """Stop this process for a moment."""
    wakes = f"sleep 0.3; kill -CONT {os.getpid()}"
    with subprocess.Popen(["sh", "-c", wakes]):
        os.kill(os.getpid(), signal.SIGSTOP)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


DURING = {"raise": fail, "interrupt": interrupt, "pause": pause, "kill": die}


class Drawn:
    """One rank of a run. Every rank draws the same events."""

    def __init__(self, mesh: DeviceMesh, seed: int) -> None:
        self.draw, self.here, self.size = random.Random(seed), mesh.get_local_rank(), mesh.size()
        self.schedule = self.draw.choice(
            SCHEDULES if self.size == 3 else [*SCHEDULES, "interleaved-1f1b"]
        )
        options = INTERLEAVED if self.schedule == "interleaved-1f1b" else {}
        microbatches = 1 if self.schedule == "pipedream" else 2
        made = {"schedule": self.schedule, "microbatches": microbatches, **options}
        self.pipe = pipe_of(mesh, **made)
        self.states = expected(self.size, self.schedule)
        self.told: list[str] = []
        signal.signal(signal.SIGINT, self._interrupted)

    def run(self) -> list[str]:
        """Returns the events, and how many batches counted after each, alike on all ranks."""
        self.step()
        for _ in range(EVENTS):
            event, rank = self.draw.choice(SURVIVED), self.draw.randrange(self.size)
            position = self.draw.randrange(len(self.pipe.program.lists[rank]))
            self.told.append(f"{self.schedule}: rank {rank}, {event} at {position}")
            self.pipe.save(shared_folder() / "checkpoint")
            self.survive(event, position, mine=rank == self.here)
            self.told.append(f"{self.pipe.batches} batches")
        event, rank = self.draw.choice(LAST), self.draw.randrange(self.size)
        position = self.draw.randrange(len(self.pipe.program.lists[rank]))
        self.told.append(f"rank {rank}, {event} at {position}")
        self.end(event, position, rank)
        return self.told

    def step(self, samples: int | None = None) -> None:
        x, y = batch(seed=self.pipe.batches)
        self.pipe.step(x[:samples], target=y[:samples])

    def calls(self, samples: int | None = None) -> list[Callable[[], None]]:
        """Two batches and a flush."""
        return [partial(self.step, samples), partial(self.step, samples), self.pipe.flush]

    def survive(self, event: str, position: int, *, mine: bool) -> None:
        """An event, and what all ranks do then: they load the checkpoint if the pipe has ended, and
        compare what they own with the loop."""
        group = self.pipe._group
        fails: tuple[type[BaseException], ...] = (ExecutionError, EndedError)
        if event in ("nothing", "pause"):
            fails = ()
        elif mine:
            fails = (*fails, InputError, KeyboardInterrupt)
        if event == "late":
            group.members = group.members._replace(timeout=1.0)
            time.sleep(2 * mine)
        samples = 4 if event == "other batch" and mine else None
        during = DURING.get(event, interrupt)
        with at(position if mine and event in DURING else -1, during):
            for call in self.calls(samples):  # a call is one of all ranks, also where it fails
                with within(20), suppress(*fails):
                    call()
        group.members = group.members._replace(timeout=60.0)
        try:
            self.pipe.flush()
        except EndedError:
            self.pipe.load(shared_folder() / "checkpoint")
        self.compare()

    def end(self, event: str, position: int, rank: int) -> None:
        """The rank is lost, and the others are told of it in time, again and again."""
        if rank == self.here and event != "kill":
            if event == "close":
                self.pipe.close()
            return
        with at(position if rank == self.here else -1, die):
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
    size = 2 + seed % 2
    with tempfile.TemporaryDirectory() as folder:
        ranks = [start(rank, size, folder, drawn, seed) for rank in range(size)]
        for process in ranks:
            process.join(200)
            assert process.exitcode is not None, f"a rank hangs, by the seed {seed}"
        killed = {rank for rank, process in enumerate(ranks) if process.exitcode == -signal.SIGKILL}
        told = [result_of(folder, rank) for rank in range(size) if rank not in killed]
    assert all(each == told[0] for each in told), told
    assert len(told) >= size - 1 and len(told[0]) == 2 * EVENTS + 1
    assert killed == ({int(told[0][-1].split(",")[0][5:])} if "kill" in told[0][-1] else set())

"""A rank, or the process with the store, that is lost while ranks meet, connect or train: all
others say so in time. And Ctrl-C is heard wherever a rank waits for a store that is silent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fxpipe import RankError
from fxpipe.extensions.ranks import meeting, tree
from fxpipe.extensions.ranks.group import RankGroup
from fxpipe.extensions.ranks.meeting import Meeting
from fxpipe.extensions.ranks.pairs import PairGroups
from tests.extensions.ranks.test_lost_ranks import survivors
from tests.helpers.failing import await_file, die, pipe_of
from tests.helpers.profiles import DEEP, deep
from tests.helpers.ranks import CONTEXT, DeviceMesh, on_ranks, store_of
from tests.helpers.tiny import batch, soon, within

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are killed as POSIX does")

STORE = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""

PLACES: dict[str, tuple[Any, str]] = {
    "meet": (Meeting, "_come"),  # before it comes
    "live": (Meeting, "_live"),  # when it has come
    "join": (Meeting, "patient"),  # when all have come
    "first": (RankGroup, "meets"),  # when it is connected
    "connect": (PairGroups, "connect"),  # when the devices are to be
}


@contextmanager
def before(place: str, do: Callable[[], None]) -> Iterator[None]:
    """Inside, this rank does something when it is at a place for the first time."""
    owner, name = PLACES[place]
    done, own = [False], getattr(owner, name)

    def at(*args: Any, **kwargs: Any) -> Any:
        if not done[0]:
            done[0] = True
            do()
        return own(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, at)
        yield


def dies_meeting(mesh: DeviceMesh, folder: str, place: str) -> str:
    """The last rank is killed while the ranks meet in compile."""
    last = mesh.size() - 1
    meeting.LOST = meeting.LOST if DEEP else 1.0
    dist.barrier()
    if mesh.get_local_rank() == last:
        with before(place, die):
            pipe_of(mesh)
        raise AssertionError("was not killed")
    with within(6), pytest.raises(RankError) as raised:  # five seconds, and what compile takes
        pipe_of(mesh)
    assert raised.value.rank == last, repr(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("place", ["live", "first", *deep("join")])
def test_a_rank_that_is_killed_while_ranks_meet_in_compile_is_named_in_five_seconds(
    place: str,
) -> None:
    for told in survivors(3, {2}, dies_meeting, place):
        assert "rank 2 " in told and "has ended" in told


def store_lost(
    rank: int, port: int, folder: str, place: str, how: int, interrupts: bool, process: int
) -> None:
    """Write what a rank raises, and how long after the store was lost."""
    torch.set_num_threads(1)
    tree.SILENCE = 2.0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group("gloo", store=store_of(port, "ranks"), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    dist.barrier()

    def lost() -> None:
        if rank == 0:
            Path(folder, "lost").touch()
            os.kill(process, how)
        await_file(Path(folder, "lost"))
        if interrupts:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    told = "nothing"
    try:
        with before(place, lost) if place in PLACES else within(60):
            pipe, (x, y) = pipe_of(mesh), batch()
            pipe.step(x, target=y)
            if place == "train":
                lost()
            while True:
                pipe.step(x, target=y)
    except (RankError, KeyboardInterrupt) as error:
        seconds = time.time() - Path(folder, "lost").stat().st_mtime
        told = f"{type(error).__name__} {seconds} {error}"
    Path(folder, f"told-{rank}").write_text(told)


CASES = [
    ("connect", signal.SIGSTOP, True),
    ("join", signal.SIGKILL, False),
    ("train", signal.SIGSTOP, False),
    *deep(
        ("train", signal.SIGKILL, False),
        ("meet", signal.SIGSTOP, False),
        ("meet", signal.SIGSTOP, True),
        ("meet", signal.SIGKILL, False),
        ("join", signal.SIGSTOP, True),
        ("connect", signal.SIGSTOP, False),
        ("connect", signal.SIGKILL, False),
    ),
]


@pytest.mark.parametrize(("place", "how", "interrupts"), CASES)
def test_a_store_that_is_suspended_or_ends_is_an_error_on_every_rank(
    place: str, how: int, interrupts: bool
) -> None:
    command = [sys.executable, "-c", STORE]
    served: Any = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)
    with served, tempfile.TemporaryDirectory() as folder:
        port, ranks = int(served.stdout.readline()), []
        given = (port, folder, place, how, interrupts, served.pid)
        try:
            for rank in range(2):
                ranks.append(CONTEXT.Process(target=store_lost, args=(rank, *given)))
                ranks[-1].start()
            for process in ranks:
                process.join(60)
                assert process.exitcode is not None, "a rank hangs"
            told = [Path(folder, f"told-{rank}").read_text() for rank in range(2)]
        finally:
            served.kill()
            for process in ranks:
                process.kill()
                process.join()
    for each in told:
        kind, seconds, why = each.split(" ", 2)
        if interrupts:
            assert kind == "KeyboardInterrupt" or "KeyboardInterrupt" in why, each
            assert float(seconds) < 0.3 + 1.5, each
        else:
            assert kind == "RankError" and "the store of torch.distributed" in why, each
            assert float(seconds) < 2 * 2.0 + 2.5, each


class Counting:
    """A store that counts what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return lambda *_: True


def asked(mesh: DeviceMesh, schedule: str, microbatches: int) -> list[str]:
    """What a rank asks of the store in warm steps."""
    pipe, (x, y) = pipe_of(mesh, schedule=schedule, microbatches=microbatches), batch()
    for _ in range(2):
        pipe.step(x, target=y)
    group, counting = cast(Any, pipe._group), Counting()
    group.store = group._tree._store = counting
    for _ in range(5):
        pipe.step(x, target=y)
    assert soon(lambda: mesh.get_rank() > 0 or "check" in counting.asked)  # the root looks at it
    pipe.step(x, target=y)
    found = [each for each in counting.asked if each != "check"]
    pipe.close()
    return found


@pytest.mark.parametrize(
    ("size", "replicas", "schedule", "microbatches"),
    [(3, None, "1f1b", 3), *deep((2, None, "2bw", 2), (4, 2, "1f1b", 2), (4, 2, "2bw", 2))],
)
def test_a_warm_step_asks_nothing_of_the_store(
    size: int, replicas: int | None, schedule: str, microbatches: int
) -> None:
    for found in on_ranks(size, asked, schedule, microbatches, replicas=replicas):
        assert not found

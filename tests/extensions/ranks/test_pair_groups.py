"""Process groups of pairs of ranks: what is asked of NCCL, which no machine without GPUs has, and
what becomes of a rank that waits for one that does not come."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from fxpipe import RankError
from fxpipe.extensions.ranks.channels import RankBackend, RankChannels
from fxpipe.extensions.ranks.pairs import (
    BLOCKS,
    GroupTransport,
    PairGroups,
    in_the_background,
)
from fxpipe.extensions.ranks.program import OwnProgram
from fxpipe.schedules import gpipe
from tests.helpers.failing import Beside, pipe_of
from tests.helpers.plans import chain_program
from tests.helpers.ranks import DeviceMesh, on_ranks
from tests.helpers.tiny import batch

ROOT = Path(__file__).parents[3]


class Options:
    """See ``torch.distributed.ProcessGroupNCCL.Options``."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=None)
        self._timeout: timedelta | None = None


class Nccl:
    """Keeps what it was made with."""

    Options = Options

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.rank, self.size, self.options = rank, size, options


def test_communicators_share_no_stream_with_computations_and_few_multiprocessors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Our streams have the default priority, and torch's pool keeps those of high priority apart;
    a receive that is posted early must leave the device to computations."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    ranks: Any = SimpleNamespace(timeout=7, own_backend="", epoch=0)
    made = PairGroups(ranks, torch.device("cuda:0")).make(None, 1)
    assert (made.rank, made.size) == (1, 2)
    assert made.options.is_high_priority_stream
    assert made.options.config.max_ctas == BLOCKS < 132 / 8
    assert made.options._timeout == timedelta(seconds=7)


class Ends:
    """A communicator; says what becomes of it."""

    def __init__(self, number: int, said: list[str]) -> None:
        self.number, self.said = number, said

    def abort(self) -> None:
        self.said.append(f"abort {self.number}")

    def _group_start(self) -> None:
        self.said.append("begin")

    def _group_end(self) -> None:
        self.said.append("end")


def test_communicators_end_all_at_once() -> None:
    """One after another, each may wait for a communicator that the other rank ends later."""
    said: list[str] = []
    ranks: Any = SimpleNamespace(timeout=7, own_backend="", epoch=0)
    pairs = PairGroups(ranks, torch.device("cuda:0"))
    pairs._groups = {(0, n): GroupTransport(Ends(n, said)) for n in (1, 2)}
    pairs.abort()
    pairs.drained()
    assert said[0] == "begin" and said[-1] == "end" and {*said[1:-1]} == {"abort 1", "abort 2"}


def over_own_backend(mesh: DeviceMesh, extended: bool) -> list[int]:
    """A step, beside the plain loop, over a backend that the user has registered: the sizes of its
    groups that belong to the pipe."""
    made: list[int] = []

    def make(*given: Any) -> Any:
        if extended:
            given = given[0].store, given[0].group_rank, given[0].group_size, given[0].timeout
        made.append(given[2])
        return dist.ProcessGroupGloo(*given)

    dist.Backend.register_backend("own", make, extended_api=extended, devices=["cpu"])
    whole = dist.new_group(backend="cpu:own")
    made.clear()
    Beside(DeviceMesh.from_group(whole, "cpu", mesh_dim_names=("pp",))).step()
    return made


@pytest.mark.parametrize("extended", [False, True])
def test_tensors_go_over_the_users_own_backend(extended: bool) -> None:
    assert on_ranks(2, over_own_backend, extended) == [[2, 2]] * 2  # there and back


def posted(mesh: DeviceMesh, ahead: int | None) -> tuple[int, int, int]:
    """The most receives of a step that are posted and not awaited, how many there are in all, and
    the window of the program."""
    pipe, most = pipe_of(mesh, microbatches=3), 0
    x, y = batch()
    pipe.step(x, target=y)
    pairs = cast(RankBackend, pipe._engine.backend).pairs
    pairs.ahead = pairs.ahead if ahead is None else ahead
    receive, arrived, count, over = pairs.receive, RankChannels.arrived, 0, 0

    def counted(source: int, room: Any) -> Any:
        nonlocal count, most
        count += 1
        most = max(most, count - over)
        return receive(source, room)

    def awaited(*args: Any) -> None:
        nonlocal over
        over += 1
        arrived(*args)

    vars(pairs)["receive"] = counted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankChannels, "arrived", awaited)
        pipe.step(x, target=y)
    return most, count, pipe.program.window


def test_small_receives_are_posted_before_a_step_and_others_within_the_window() -> None:
    for most, count, window in on_ranks(2, posted, None):
        assert most == count > window + 1
    for most, count, window in on_ranks(2, posted, 0):
        assert 1 <= most <= window + 1 < count


def test_no_thread_waits_for_a_rank_that_has_failed_before_it_connects() -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    names, pipeline = ("rank 0", "rank 1"), range(2)
    ranks: Any = SimpleNamespace(
        timeout=600,
        store=store,
        names=names,
        epoch=0,
        own_backend="",
        replicas=1,
        rank=0,
        pipeline=pipeline,
    )
    ranks.columns, ranks.twins = {}, range(1)
    ranks.failure = RankError("rank 1 has failed", rank=1)
    own = OwnProgram.of(chain_program(gpipe(2, 2)), 0)
    before = {*threading.enumerate()}
    with pytest.raises(RankError, match="rank 1 has failed"):
        PairGroups(ranks, torch.device("cpu")).connect(own)
    assert ranks.epoch == 1
    assert before >= {*threading.enumerate()}  # at once, as Python may end now


def cut_off(mesh: DeviceMesh) -> str:
    """What rank 0 says whose connection ends, as rank 1 has failed and tells of it later."""

    def cut(*args: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    def fail(*args: Any) -> None:
        time.sleep(0.2)
        raise MemoryError("in the other rank")

    pipe, (x, y) = pipe_of(mesh, microbatches=2), batch()
    with pytest.MonkeyPatch.context() as patch:
        if mesh.get_local_rank() == 0:
            patch.setattr(PairGroups, "make", cut)
        else:
            patch.setattr(PairGroups, "connect", fail)
        with pytest.raises((RankError, MemoryError)) as raised:
            pipe.step(x, target=y)
    return str(raised.value)


def test_a_connection_that_another_ranks_failure_has_ended_is_explained_by_that_failure() -> None:
    said, _ = on_ranks(2, cut_off)
    assert "MemoryError: in the other rank" in said


FAILS = """
import sys
from datetime import timedelta
import torch.distributed as dist
from torch import nn, ones
from torch.distributed.device_mesh import init_device_mesh
import fxpipe
from fxpipe.extensions.ranks.pairs import PairGroups

def fail(*args):
    raise MemoryError("while it connects")

rank, failing, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if rank == 0:
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.FileStore(file).set("port", str(served.port))
port = int(dist.FileStore(file).get("port"))
store = served if rank == 0 else dist.TCPStore("127.0.0.1", port)
limit = timedelta(seconds=600)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
if rank == failing:
    PairGroups._open = fail
model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ones(4, 4)
mesh, loss = init_device_mesh("cpu", (2,)), nn.functional.mse_loss
try:
    fxpipe.compile(model, mesh, microbatches=2, partition=["1"], loss=loss).step(x, target=x)
except Exception as error:
    print(error)
"""


@pytest.mark.deep
@pytest.mark.parametrize("failing", [0, 1])
def test_processes_end_in_peace_where_one_has_failed_while_they_connect(
    failing: int, tmp_path: Path
) -> None:
    """Also where the store ends before the other rank, which has waited for it."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", FAILS, str(rank), str(failing), str(tmp_path / "port")],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank, process in enumerate(ranks):
            told, errors = process.communicate(timeout=120)
            assert "MemoryError: while it connects" in told or rank == failing, errors
            assert process.returncode == 0 and "terminate called" not in errors, errors
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the system has no such policy")
def test_threads_that_transfer_interrupt_none_that_computes() -> None:
    """And whoever starts them is scheduled as before."""
    seen: list[int] = []
    with in_the_background():
        thread = threading.Thread(target=lambda: seen.append(os.sched_getscheduler(0)))
        thread.start()
    thread.join()
    assert seen == [os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


class Ending(Nccl):
    """Notes the calls that end it."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def _group_start(self) -> None:
        self.calls.append("start")

    def _group_end(self) -> None:
        self.calls.append("end")

    def abort(self) -> None:
        self.calls.append(self.name)


def test_communicators_are_aborted_as_one_group() -> None:
    """One by one, each would wait for the other ranks, which wait for another of theirs."""
    calls: list[str] = []
    ranks: Any = SimpleNamespace(timeout=7, own_backend="", epoch=0)
    pairs = PairGroups(ranks, torch.device("cuda:0"))
    pairs._groups = {(0, n): GroupTransport(Ending(str(n), calls)) for n in (1, 2, 3)}
    pairs._abort()
    assert (calls[0], calls[-1], sorted(calls[1:-1])) == ("start", "end", ["1", "2", "3"])
    assert pairs._aborted.is_set()

"""Failures and Ctrl-C while batches are in flight: the pipe ends on all ranks, which go on from a
checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from itertools import cycle

import pytest

from fxpipe import ExecutionError
from fxpipe.errors import RankError
from tests.helpers.failing import InFlight, at, fail, fails, first_of_each_kind
from tests.helpers.profiles import DEEP, deep
from tests.helpers.ranks import DeviceMesh, on_ranks
from tests.helpers.tiny import within

SCHEDULES = "2bw", "pipedream"

ONE = SCHEDULES if DEEP else ("pipedream",)
"""Where one of them does."""

SIZES = [2, *deep(3)]
"""How many ranks; those of three have values that skip one, too."""

OVERLAPPING = {"Load", "Output", "Send", "Receive", "Free", "Forward", "Backward", "Update"}


def steps(beside: InFlight) -> None:
    """Batches whose losses nobody looks at."""
    for _ in range(5):
        beside.step()
    beside.pipe.flush()


def losses(beside: InFlight) -> None:
    """Batches whose losses are looked at as soon as a step returns. One that cannot come any more
    says so, on whatever rank."""
    for _ in range(5):
        loss = beside.step()
        try:
            float(loss)
        except ExecutionError as error:
            assert "the loss cannot come" in str(error)
    beside.pipe.flush()


def failing(mesh: DeviceMesh) -> tuple[set[str], list[int]]:
    """Let the first instruction of each kind fail on each rank in turn, under one of the schedules
    or, in the long run, under each, and go on."""
    here = mesh.get_local_rank()
    kinds, counts = set[str](), []
    ways: Iterator[Callable[[InFlight], None]] = cycle((steps, losses))
    for number, schedule in enumerate(SCHEDULES):
        beside = InFlight(mesh, schedule)
        beside.step()
        for rank, position, instruction in first_of_each_kind(beside.pipe):
            if not DEEP and rank % len(SCHEDULES) != number:
                continue
            beside.step()
            beside.step()
            beside.save()
            caught: BaseException | None = None
            where = f"{schedule}, rank {rank}, {position}: {instruction}"
            with within(20), at(position if rank == here else -1, fail):
                try:
                    next(ways)(beside)
                except ExecutionError as error:
                    caught = error
            assert caught is not None, where
            fails(rank, caught, instruction, rank == here)
            counts.append(beside.go_back())
            beside.step()
            beside.step()
            beside.compare()
            kinds.add(type(instruction).__name__)
        beside.pipe.close()
    return kinds, counts


def failing_while_flushed(mesh: DeviceMesh) -> list[int]:
    """The same in the flush, where other ranks may have finished their part already."""
    here, counts = mesh.get_local_rank(), []
    for schedule in ONE:
        beside = InFlight(mesh, schedule)
        beside.step()
        for rank, position, instruction in first_of_each_kind(beside.pipe):
            beside.save()
            for _ in range(3):
                beside.step()
            with within(20), at(position if rank == here else -1, fail):
                try:
                    beside.pipe.flush()
                except ExecutionError as error:
                    fails(rank, error, instruction, rank == here)
                    counts.append(beside.go_back())
            beside.step()
            beside.compare()
        beside.pipe.close()
    return counts


@pytest.mark.parametrize("size", SIZES)
def test_a_failure_in_flight_ends_the_pipe_on_all_ranks(size: int) -> None:
    ranks = on_ranks(size, failing)
    for kinds, counts in ranks:
        assert kinds == OVERLAPPING
        assert counts == ranks[0][1]


@pytest.mark.deep
@pytest.mark.parametrize("size", SIZES)
def test_a_failure_in_a_flush_ends_the_pipe_of_ranks_that_had_finished_too(
    size: int,
) -> None:
    ranks = on_ranks(size, failing_while_flushed)
    assert ranks[0]
    assert all(counts == ranks[0] for counts in ranks)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupted(mesh: DeviceMesh) -> list[int]:
    """A signal comes in the first instruction of each kind on each rank, where a call runs."""
    here, counts = mesh.get_local_rank(), []
    for schedule in ONE:
        beside = InFlight(mesh, schedule)
        for _ in range(3):
            beside.step()
        armed = [False]

        def raise_in_calls(*_: object) -> None:
            if armed[0] and beside.pipe._group.called:  # noqa: B023
                raise KeyboardInterrupt

        signal.signal(signal.SIGINT, raise_in_calls)
        for rank, position, _ in first_of_each_kind(beside.pipe):
            beside.save()
            armed[0] = True
            with within(20), at(position if rank == here else -1, interrupt):
                for _ in range(4):
                    try:
                        beside.step()
                    except (KeyboardInterrupt, RankError):
                        run = beside.pipe._engine.in_flight
                        if run is not None and run.failed:
                            counts.append(beside.go_back())
                armed[0] = False
            beside.compare()
            beside.step()
        beside.pipe.close()
    return counts


@pytest.mark.deep
@pytest.mark.skipif(os.name != "posix", reason="signals are sent as POSIX does")
@pytest.mark.parametrize("size", SIZES)
def test_ctrl_c_in_flight_ends_the_pipe_on_all_ranks(size: int) -> None:
    ranks = on_ranks(size, interrupted)
    assert ranks[0]
    assert all(counts == ranks[0] for counts in ranks)

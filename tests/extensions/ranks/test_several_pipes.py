"""Several pipes over one mesh: what happens to one of them does not touch the others."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from fxpipe import ExecutionError, RankError
from tests.helpers.failing import Beside, InFlight, fail, handlers
from tests.helpers.profiles import deep
from tests.helpers.ranks import DeviceMesh, on_ranks
from tests.helpers.tiny import soon, within


def by_turns(mesh: DeviceMesh) -> list[int]:
    """One pipe has batches in flight while the other one trains; each of them fails once."""
    flushed, flight, counts = Beside(mesh), InFlight(mesh, "2bw"), []
    last = mesh.get_local_rank() == mesh.size() - 1

    def failing(depth: int) -> Any:
        """Backwards fail on the last rank in the pipe that lets so many batches overlap."""

        def change(handler: Any) -> Any:
            def run(machine: Any, instruction: Any) -> None:
                handler(machine, instruction)
                backward = type(instruction).__name__ == "Backward"
                if last and backward and machine.program.depth == depth:
                    fail()

            return run

        return handlers(change)

    for _ in range(3):
        flushed.step()
        flight.step()
    x, y = flushed.batch()
    with failing(0), within(20), pytest.raises(ExecutionError):
        flushed.pipe.step(x, target=y)
    for _ in range(2):
        flight.step()
        flushed.step()
    flight.compare()
    flight.save()
    for _ in range(3):
        flight.step()
    with failing(1), within(20):
        with pytest.raises(ExecutionError):
            for _ in range(5):
                flight.step()
        flushed.step()
    counts.append(flight.go_back())
    for _ in range(2):
        flight.step()
        flushed.step()
    flight.compare()
    flight.pipe.close()
    flushed.step()
    flushed.pipe.close()
    return counts


@pytest.mark.parametrize("size", [3, *deep(2)])
def test_two_pipes_train_by_turns_and_one_fails_while_the_other_goes_on(size: int) -> None:
    first, *others = on_ranks(size, by_turns)
    assert all(counts == first for counts in others)


def given_up(mesh: DeviceMesh) -> str:
    """The first rank drops a pipe, some batches of which are in flight, while another one runs."""
    flushed, flight = Beside(mesh), InFlight(mesh, "2bw")
    for _ in range(3):
        flushed.step()
        flight.step()
    told = ""
    if mesh.get_local_rank() == 0:
        dropped = weakref.ref(flight.pipe._group)
        del flight
        flushed.step()
        assert soon(lambda: gc.collect() >= 0 and dropped() is None)  # its batches end first
    else:
        flushed.step()
        with within(20), pytest.raises(RankError) as raised:
            for _ in range(5):
                flight.step()
        told = str(raised.value)
    for _ in range(3):
        flushed.step()
    flushed.pipe.close()
    return told


def test_a_pipe_that_is_given_up_does_not_disturb_another_one() -> None:
    first, second = on_ranks(2, given_up)
    assert not first and "rank 0 " in second and "closed its pipe or ended" in second

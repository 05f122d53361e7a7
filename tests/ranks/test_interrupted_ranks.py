"""Ctrl-C on one rank or on all: a step counts on all ranks or on none, and training goes on."""

from __future__ import annotations

import os
import signal

import pytest

from fxpipe import RankError
from tests.helpers.failing import (
    KINDS,
    Beside,
    at,
    first_of_each_kind,
    options_of,
    unchanged,
)
from tests.helpers.ranks import DeviceMesh, on_ranks
from tests.helpers.tiny import Snapshot, within

pytestmark = [
    pytest.mark.timeout(600, method="thread"),
    pytest.mark.skipif(os.name != "posix", reason="signals are sent as POSIX does"),
]


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupted(mesh: DeviceMesh, everywhere: bool) -> tuple[set[str], set[str]]:
    """A signal comes in the first instruction of each kind on each rank, or on all at once."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    here, seen, kinds = mesh.get_local_rank(), set[str](), set[str]()
    for name, options in options_of(mesh.size()).items():
        beside = Beside(mesh, **options)
        beside.step()
        for rank, position, instruction in first_of_each_kind(beside.pipe):
            before, count = Snapshot.of(beside.pipe), beside.pipe.batches
            x, y = beside.batch()
            mine = everywhere or rank == here
            where = f"{name}, rank {rank}, {position}: {instruction}"
            with within(3 * (mesh.size() - 1)), at(position if mine else -1, interrupt):
                try:
                    beside.pipe.step(x, target=y)
                    seen.add("done")
                except KeyboardInterrupt:
                    seen.add("interrupted")
                    assert mine, where
                except RankError as error:
                    seen.add("told")
                    assert "KeyboardInterrupt" in str(error), where
            counts = beside.pipe.batches
            assert counts in (count, count + 1), where
            if counts == count:
                unchanged(before, beside.pipe, where)
                beside.step()
            else:  # the others were ready: it counts everywhere, which the loop now checks
                beside.count_step()
            kinds.add(type(instruction).__name__)
        beside.pipe.close()
    return seen, kinds


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("everywhere", [False, True])
def test_an_interrupted_step_counts_on_all_ranks_or_on_none(everywhere: bool, size: int) -> None:
    for seen, kinds in on_ranks(size, interrupted, everywhere):
        assert "interrupted" in seen
        assert everywhere or "told" in seen
        assert kinds == KINDS

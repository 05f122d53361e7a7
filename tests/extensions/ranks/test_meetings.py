"""Meetings of ranks that are threads here: who waits for whom, and where those go who come anew."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fxpipe import RankError
from fxpipe.extensions.ranks import meeting, rejoin
from fxpipe.extensions.ranks.meeting import Meeting
from tests.helpers.failing import await_file
from tests.helpers.ranks import DeviceMesh, on_ranks, shared_folder
from tests.helpers.tiny import soon, within

pytestmark = pytest.mark.timeout(60, method="thread")


class Meetings:
    """Makes ranks meet in one store, and lets them leave at the end."""

    def __init__(self, size: int) -> None:
        self.store: Any = dist.HashStore()  # type: ignore[attr-defined]
        self.size, self.made = size, list[Meeting]()

    def come(self, rank: int, timeout: float = 30.0) -> Meeting:
        absent = "{} has not come"
        self.made.append(Meeting(self.store, rank, range(self.size), rank, timeout, absent))
        return self.made[-1]


@contextmanager
def meetings(size: int) -> Iterator[Meetings]:
    made = Meetings(size)
    try:
        yield made
    finally:
        for each in made.made:
            each.leave()


def test_all_know_what_all_have_said() -> None:
    with meetings(3) as made:
        ranks = [made.come(rank) for rank in (2, 0, 1)]
        assert [rank.all() for rank in ranks] == [[0, 1, 2]] * 3
        assert {rank.number for rank in ranks} == {"0"}


def test_who_comes_anew_takes_those_along_who_still_wait() -> None:
    with meetings(3) as made:
        waits, lost = made.come(0), made.come(1)
        assert soon(lambda: made.store.check(["0/came/0", "0/came/1"]))
        lost.leave()
        anew = made.come(1)
        assert soon(lambda: made.store.check(["1/came/1"]))
        ranks = [waits, anew, made.come(2)]
        assert [rank.all(patient=True) for rank in ranks] == [[0, 1, 2]] * 3
        assert {rank.number for rank in ranks} == {"1"}
        again = [made.come(rank) for rank in range(3)]
        assert [rank.all() for rank in again] == [[0, 1, 2]] * 3
        assert {rank.number for rank in again} == {"2"}
        with within(5), pytest.raises(RankError, match="has begun to meet the others anew"):
            while True:  # it was not connected yet
                waits.look()
                time.sleep(0.01)


def test_who_shows_no_sign_of_life_is_named_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LOST", 2.0)
    with meetings(3) as made:
        ranks = [made.come(rank) for rank in range(3)]
        ranks[1]._live = lambda: time.sleep(60)  # type: ignore[method-assign]
        for rank in (ranks[0], ranks[2]):
            with pytest.raises(RankError, match="rank 1 has ended, or given no sign") as raised:
                while True:
                    rank.look()
                    time.sleep(0.01)  # the others are threads
            assert raised.value.rank == 1


def test_who_does_not_come_is_named_and_the_time_counts_from_the_last_that_began() -> None:
    with meetings(3) as made:
        waits, lost = made.come(0, timeout=3.0), made.come(1)
        assert soon(lambda: made.store.check(["0/came/0", "0/came/1"]))
        time.sleep(1.5)
        lost.leave()
        begin = time.monotonic()
        for rank in (waits, made.come(1, timeout=3.0)):
            with pytest.raises(RankError, match="rank 2 has not come") as raised:
                rank.all()
            assert raised.value.rank == 2
        assert time.monotonic() > begin + 2.9


def waits_in_an_old_group(mesh: DeviceMesh) -> str:
    """Rank 0 waits for rank 1, which meets the others again, and still has the old mesh."""
    room, done = torch.zeros(1), shared_folder() / "done"
    if dist.get_rank():
        time.sleep(0.2)
        rejoin._destroy()
        await_file(done)
        return ""
    try:
        with within(10), pytest.raises(RuntimeError) as raised:
            dist.recv(room, 1, group=mesh.get_group("pp"))
    finally:
        Path(done).touch()
    return str(raised.value)


def test_who_meets_again_keeps_nobody_waiting_in_an_old_group() -> None:
    first, _ = on_ranks(2, waits_in_an_old_group)
    assert "closed" in first or "reset" in first

"""A group of ranks in one process: who is lost, and whose word counts."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe import InputError, RankError
from fxpipe.extensions.ranks import tree
from fxpipe.extensions.ranks.group import LARGE, RankGroup, failure_of
from fxpipe.extensions.ranks.packing import pack
from fxpipe.extensions.ranks.tree import CLOSED, FAN, Tree, below, neighbours
from tests.helpers.tiny import soon, within

pytestmark = pytest.mark.timeout(120, method="thread")


@pytest.fixture
def groups() -> Iterator[Callable[..., list[RankGroup]]]:
    """Makes the ranks of a pipe, connected as their processes would be, each in its first call."""
    made: list[RankGroup] = []

    def make(size: int, timeout: float = 5.0) -> list[RankGroup]:
        store, meeting = dist.HashStore(), dist.HashStore()  # type: ignore[attr-defined]
        names = tuple(f"rank {rank} (host, process {rank})" for rank in range(size))

        def join(rank: int) -> RankGroup:
            edges: dict[int, Any] = {}
            for other in neighbours(rank, size):
                own = dist.PrefixStore(str(max(rank, other)), meeting)  # type: ignore[attr-defined]
                limit = timedelta(seconds=60)
                edges[other] = dist.ProcessGroupGloo(own, int(other < rank), 2, limit)
            return RankGroup(rank, names, store, edges, timeout, 1)

        with ThreadPoolExecutor(size) as pool:
            own = [*pool.map(join, range(size))]
        made.extend(own)
        together(own, lambda group: called(group, "compile", lambda: None))
        return own

    make.made = made  # type: ignore[attr-defined]
    yield make
    for group in made:
        group.close()


def called(group: RankGroup, what: str, work: Callable[[], Any]) -> Any:
    with group.calling(what):
        return work()


def together(groups: list[RankGroup], work: Callable[[RankGroup], Any]) -> list[Any]:
    """What each rank returns, or its error."""

    def run(group: RankGroup) -> Any:
        try:
            return work(group)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(groups)) as pool:
        return [*pool.map(run, groups)]


def ends(group: RankGroup) -> None:
    """End a rank as the end of its process does: it tells nobody any more."""
    own = group._tree
    own.part = lambda rank, why: None  # type: ignore[method-assign]
    for edge in own._edges:
        edge.poison()


VALUES = {
    "words": [None, 1, 2.5, "three", (4, {"five": 6})],
    "dense": torch.arange(6.0).view(2, 3).t(),
    "gaps": torch.arange(6)[::2],
    "repeated": torch.ones(1).expand(3),
    "nothing": torch.empty(0, 3),
    "half": torch.ones(2, dtype=torch.bfloat16),
    "complex": torch.ones(2, dtype=torch.complex64).conj(),
}
USERS = {**VALUES, "sparse": torch.eye(3).to_sparse(), "class": UUID(int=5), "bytes": b"abc"}


@pytest.mark.parametrize("size", [2, FAN + 3])
def test_values_of_all_kinds_and_sizes_are_exchanged_whole(groups: Any, size: int) -> None:
    large = torch.randn(LARGE)

    def exchange(group: RankGroup) -> list[Any]:
        with group.calling("step"):
            found = group.exchange("values", VALUES)
            found += group.collect("values of users", USERS)
            return [*found, *group.exchange("more", large + group.rank)]

    for found in together(groups(size), exchange):
        assert not isinstance(found, Exception), found
        for number, each in enumerate(found[: 2 * size]):
            assert each.keys() == (VALUES if number < size else USERS).keys()
            for name, value in each.items():
                expected = USERS[name]
                if not isinstance(expected, Tensor):
                    assert value == expected
                    continue
                assert value.dtype == expected.dtype
                assert torch.equal(value.to_dense(), expected.to_dense()), name
            assert each["dense"].stride() == (1, 3)
        for rank, each in enumerate(found[2 * size :]):
            assert torch.equal(each, large + rank)


class Evil:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path, size: int = 0) -> None:
        self.path, self.size = path, size

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),), {"padding": bytes(self.size)}


@pytest.mark.parametrize("where", ["said", "told", "large", "to one", "in the key", "around"])
def test_what_no_rank_sends_is_refused_by_name_and_not_run(
    where: str, groups: Any, tmp_path: Path
) -> None:
    ranks, path = groups(2), tmp_path / "made"
    teller, evil = ranks[1], Evil(path, LARGE if where == "large" else 0)

    def exchange(group: RankGroup) -> Any:
        with group.calling("step", exchanges=True):
            if group is teller:
                key = (teller.call, evil if where == "in the key" else 0)
                to = 1 if where == "to one" else tree.ALL
                message = pickle.dumps(evil) if where == "around" else None
                if where == "said":
                    return teller.exchange("number", evil)
                teller._tree._edges[0].send(message or pack(("value", 1, to, key, evil)))
            for _ in range(500):  # what was told before the refusal still counts
                group.exchange("number", 1)
                time.sleep(0.01)

    for found in together(ranks, exchange):
        assert isinstance(found, RankError), found
        assert "has sent" in str(found)
        assert "posix.mkdir, which no rank sends" in str(found) or "nt.mkdir" in str(found)
    assert not path.exists()


def test_what_cannot_be_pickled_is_refused(groups: Any) -> None:
    one, *_ = groups(2)
    with pytest.raises(InputError, match="would have to go from one rank to another and cannot"):
        one.tell("value", (9, 0, "x"), threading.Lock())


def test_what_has_arrived_is_dropped(groups: Any) -> None:
    ranks = groups(2)

    def many(group: RankGroup) -> int:
        with group.calling("step"):
            for number in range(50):
                group.exchange("number", torch.zeros(LARGE) if number % 10 == 0 else None)
        return sum(len(edge._kept) for edge in group._tree._edges)

    assert all(kept <= 8 for kept in together(ranks, many))


def test_a_failure_ends_the_exchange_that_it_comes_before_on_all_ranks_and_the_next_goes_on(
    groups: Any,
) -> None:
    def fails(group: RankGroup) -> Any:
        with group.calling("step"):
            group.exchange("first", 0)
            if group.rank == 1:
                raise ValueError("no")
            return group.exchange("second", 0)

    ranks = groups(3)
    first, own, third = together(ranks, fails)
    assert isinstance(own, ValueError)
    for told in (first, third):
        assert isinstance(told, RankError) and told.rank == 1
        assert "rank 1 (host, process 1) failed: ValueError: no" in str(told)
        assert any("Traceback" in note for note in told.__notes__)
    goes_on = together(ranks, lambda g: called(g, "step", lambda: g.exchange("first", g.rank)))
    assert goes_on == [[0, 1, 2]] * 3


def test_ranks_decide_alike_whether_an_exchange_was_complete_before_a_failure(groups: Any) -> None:
    """Whoever is told of a failure that comes after all values still completes the exchange."""
    ranks = groups(FAN + 3)
    entered = threading.Barrier(len(ranks))

    def late(group: RankGroup) -> Any:
        with group.calling("step"):
            entered.wait()
            if group.rank == 0:
                for each in ranks:
                    each._tree.say((2, 1), b"end")
                assert soon(lambda: all((2, 1) in each._answers for each in ranks))
                group.tell("fails", (2,), failure_of(ValueError("after")))
                for each in ranks:
                    each._tree.say((2, 2), b"more")
                time.sleep(0.2)
                group.tell("fails", (3,), failure_of(ValueError("what is told last")))
            assert soon(lambda: {2, 3} <= group._failures.keys())
            with group.changed:
                return dict(group._answers[2, 1][0]), (2, 2) in group._answers

    all_ranks = (1 << len(ranks)) - 1
    assert together(ranks, late) == [({b"end": all_ranks}, False)] * len(ranks)


def test_after_a_failure_ranks_tell_how_far_they_are_wherever_they_were(groups: Any) -> None:
    def fails(group: RankGroup) -> Any:
        try:
            with group.calling("step"):
                try:
                    if group.rank == 1:
                        raise ValueError("no")
                    group.exchange("first", 0)
                except Exception as error:
                    group.announce(error)
                    told.append(group.outcomes(group.rank))
                    raise
        except Exception:
            return None

    told: list[Any] = []
    together(groups(3), fails)
    assert told == [[0, 1, 2]] * 3


def test_ranks_at_other_places_of_a_call_and_ranks_that_do_not_come_are_named(groups: Any) -> None:
    ranks = groups(2, timeout=0.5)
    apart = together(
        ranks, lambda g: called(g, "step", lambda: g.exchange("left" if g.rank else "right"))
    )
    told = "rank 1 (host, process 1) calls step and is at left, while rank 0 (host, process 0) "
    assert all(told in str(error) for error in apart), apart

    def absent(group: RankGroup) -> Any:
        with group.calling("step"):
            return None if group.rank else group.exchange("first")

    first, _ = together(ranks, absent)
    assert isinstance(first, RankError) and first.rank == 1
    assert "rank 1 (host, process 1) has not reached the point" in str(first)


def test_a_group_that_is_collected_says_goodbye(groups: Any) -> None:
    one, two = groups(2)
    threads = one._tree._threads
    groups.made.clear()
    del one
    gc.collect()
    assert soon(lambda: two.gone is not None)
    with pytest.raises(RankError, match=f"rank 0 .*{CLOSED}") as raised:
        two.check()
    assert raised.value.rank == 0
    assert soon(lambda: not any(thread.is_alive() for thread in threads))
    two.close()


def test_a_rank_that_is_slow_hears_why_another_has_closed_its_pipe(groups: Any) -> None:
    slow, fast = groups(2)
    held = threading.Event()

    def busy() -> None:  # its other thread handles nothing meanwhile
        with slow._tree._lock:
            held.set()
            time.sleep(1.5)

    threading.Thread(target=busy).start()
    held.wait()
    for call in range(2, 8):
        fast._tree.tell("fails", (call,), failure_of(ValueError("first")))
    fast.close()
    assert soon(lambda: slow.gone is not None)
    assert CLOSED in str(slow.gone)


def test_a_rank_whose_process_ends_is_named_by_all_others(groups: Any) -> None:
    ranks = groups(4)
    ends(ranks[2])
    others = [group for group in ranks if group.rank != 2]
    with within(5):
        assert soon(lambda: all(group.gone for group in others))
    for group in others:
        with pytest.raises(RankError, match=r"rank 2 .* has ended") as raised:
            group.check()
        assert raised.value.rank == 2


def test_a_rank_that_falls_silent_is_lost_and_told_by_whom(
    groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "SILENCE", 0.5)
    monkeypatch.setattr(tree, "BEAT", 0.1)
    beat = Tree._beat

    def unless_silent(own: Tree) -> None:
        if own._rank == 1:
            own._closing.wait()
        else:
            beat(own)

    monkeypatch.setattr(Tree, "_beat", unless_silent)
    ranks = groups(3)
    assert soon(lambda: all(group.gone for group in ranks))
    first, second, third = (group.gone for group in ranks)
    assert first.rank == third.rank == 1 and "no sign of life" in str(first)
    assert second.rank == 0 and "has lost this one" in str(second)


class Lost:
    """A store that is gone, or that is silent."""

    def __init__(self, silent: bool) -> None:
        self.silent = silent

    def check(self, keys: Any) -> bool:
        if self.silent:
            time.sleep(2)
            return False
        raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize("silent", [False, True])
def test_a_store_that_is_lost_ends_the_pipe(
    groups: Any, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "SILENCE", 0.5)
    monkeypatch.setattr(tree, "BEAT", 0.1)
    one, two = groups(2)
    one._tree._store = Lost(silent)
    assert soon(lambda: one.gone is not None and two.gone is not None)
    for group in (one, two):
        assert group.gone.rank == tree.STORE
        assert "the store of torch.distributed has given no sign" in str(group.gone) or not silent
        assert "the store of torch.distributed cannot be reached" in str(group.gone) or silent


def test_a_rank_whose_results_were_kept_by_the_others_alone_is_named_at_the_next_call(
    groups: Any,
) -> None:
    def calls(group: RankGroup) -> str:
        try:
            with group.calling("step"):
                group.settle(None)
                if group.rank == 1:
                    raise MemoryError
                group.kept += 1
        except MemoryError:
            pass
        with pytest.raises(RankError, match="stages do not match") as raised, group.calling("step"):
            raise AssertionError("the ranks have diverged")
        group.kept = 0  # after a checkpoint
        with group.calling("step"):
            group.settle(None)
        return str(raised.value)

    first, second = together(groups(2), calls)
    assert first == second and first.startswith("rank ")


@pytest.mark.parametrize("size", [1, 2, FAN + 1, FAN + 2, 100])
def test_the_neighbours_of_a_rank_make_a_tree_of_all(size: int) -> None:
    for rank in range(size):
        own = neighbours(rank, size)
        assert len(own) <= FAN + 1 and all(rank in neighbours(other, size) for other in own)
        children = [below(other, size) for other in own if other > rank]
        assert below(rank, size) == 1 << rank | sum(children)
    assert below(0, size) == (1 << size) - 1

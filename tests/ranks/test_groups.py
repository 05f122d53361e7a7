"""A group of ranks whose links are in one process: who is lost, and whose word counts."""

from __future__ import annotations

import gc
import threading

import pytest

from fxpipe import RankError
from fxpipe.runtime.ranks.group import Membership, RankGroup
from fxpipe.runtime.ranks.links import CLOSED
from fxpipe.runtime.ranks.message import Message
from tests.helpers.joined import joined
from tests.helpers.tiny import soon

pytestmark = pytest.mark.timeout(120, method="thread")


def groups(size: int) -> list[RankGroup]:
    """The ranks of a pipe, connected as their processes would be."""
    names = tuple(f"rank {rank} (host, process {rank})" for rank in range(size))
    return [
        RankGroup(Membership(rank, names, names, ("host",) * size, own, 1, 5.0))
        for rank, own in enumerate(joined(size))
    ]


def ends(group: RankGroup) -> None:
    """End a rank's part of its process groups, as the end of its process does."""
    assert group.links is not None
    group.links._lost = lambda rank, why: None  # it tells nobody any more
    for peer in group.links._peers.values():
        peer.poison()


def test_a_group_that_is_collected_says_goodbye() -> None:
    one, two = groups(2)
    links = one.links
    assert links is not None
    del one
    gc.collect()
    assert soon(lambda: bool(two.inbox.gone))
    with pytest.raises(RankError, match=f"rank 0 .*{CLOSED}") as raised:
        two.check()
    assert raised.value.rank == 0
    links._thread.join(10)
    assert not links._thread.is_alive()
    two.close()


def test_a_damaged_message_of_a_known_kind_loses_the_rank() -> None:
    for bad in (Message("said", (1,)), Message("failed", ()), Message("value", ("x",))):
        one, two = groups(2)
        assert one.links is not None
        one.links.send(1, bad)
        assert soon(lambda two=two: bool(two.inbox.gone))  # type: ignore[misc]
        assert "cannot be read" in two.inbox.gone[0]
        one.close()
        two.close()


def test_a_rank_whose_results_were_kept_by_the_others_alone_is_named_at_the_next_call() -> None:
    one, two = groups(2)
    told: list[str] = []

    def calls(group: RankGroup, fails: bool) -> None:
        with group.calling("compile"):
            pass
        try:
            with group.calling("step"):
                group.settle(None)
                if fails:
                    raise MemoryError
                group.kept += 1
        except MemoryError:
            pass
        with pytest.raises(RankError, match="stages do not match") as raised, group.calling("step"):
            raise AssertionError("the ranks have diverged")
        told.append(str(raised.value))
        group.kept = 0  # after a checkpoint
        with group.calling("step"):
            group.settle(None)

    other = threading.Thread(target=calls, args=(two, True))
    other.start()
    calls(one, False)
    other.join()
    assert len(told) == 2 and told[0] == told[1]
    one.close()
    two.close()


@pytest.mark.parametrize("leaves", ["calls", "closes"])
def test_a_rank_that_waits_for_one_that_knows_of_a_lost_one_is_told_of_the_lost_one(
    leaves: str,
) -> None:
    """The lost rank has said all that the first one needs of it, and the other never comes."""
    one, two, three = groups(3)
    told: list[BaseException] = []

    def call(group: RankGroup) -> None:
        try:
            with group.calling("step"):
                group.settle(None)
        except RankError as error:
            told.append(error)

    def all_call(*ranks: RankGroup) -> list[threading.Thread]:
        threads = [threading.Thread(target=call, args=(group,)) for group in ranks]
        for thread in threads:
            thread.start()
        return threads

    for thread in all_call(one, two, three):  # the first call compiles
        thread.join()
    assert three.links is not None and not told
    three.links.send_all(Message("said", (2, 0, "the beginning of a call"), ["step", 0, ""]))
    (waits,) = all_call(one)
    assert soon(lambda: one.call == 2)
    ends(three)
    assert soon(lambda: 2 in two.inbox.gone)
    if leaves == "calls":
        call(two)
    else:
        two.close()
    waits.join()
    assert told and all(isinstance(error, RankError) and error.rank == 2 for error in told), told
    for group in (one, two, three):
        group.close()


def test_a_rank_that_another_one_has_lost_is_given_up_soon_though_it_lives() -> None:
    one, two, three = groups(3)
    assert one.links is not None
    one.links.send(1, Message("gone", (2,), "cannot be reached any more"))
    assert soon(lambda: 2 in two.inbox.gone and 1 in three.inbox.gone)
    assert two.inbox.gone == {2: "cannot be reached any more"}
    for group in (one, two, three):
        group.close()

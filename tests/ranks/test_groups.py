"""A group of ranks whose links are sockets of one process: who is lost, and whose word counts."""

from __future__ import annotations

import gc
import itertools
import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from fxpipe import RankError
from fxpipe.runtime.ranks import links as links_module
from fxpipe.runtime.ranks.group import RankGroup
from fxpipe.runtime.ranks.handshake import Membership
from fxpipe.runtime.ranks.links import CLOSED
from fxpipe.runtime.ranks.message import Message
from fxpipe.runtime.ranks.peer import Peer
from tests.helpers.tiny import soon

pytestmark = pytest.mark.timeout(120, method="thread")


def groups(size: int) -> list[RankGroup]:
    """The ranks of a pipe, connected as their processes would be."""
    names = tuple(f"rank {rank} (host, process {rank})" for rank in range(size))
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for rank, other in itertools.combinations(range(size), 2):
        sockets[rank][other], sockets[other][rank] = socket.socketpair()
    return [
        RankGroup(Membership(rank, names, names, ("host",) * size, sockets[rank], 1, 5.0))
        for rank in range(size)
    ]


@pytest.mark.parametrize(("cores", "spins"), [(1, False), (2, True), (3, True)])
def test_a_rank_that_waits_keeps_a_core_busy_only_where_each_rank_has_one(
    cores: int, spins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    one, two = groups(2)
    links, asked = one.links, list[float]()
    assert links is not None
    real, links._waiting = links._waiting, SimpleNamespace(poll=lambda t: asked.append(t) or [])  # type: ignore[assignment, func-returns-value]
    links.pump(lambda: False, 0.001)
    links._waiting = real
    assert (len(asked) > 2) == spins and asked[-1] == 1.0 and not any(asked[:-1])
    one.close()
    two.close()


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
    for peer in three.links._peers.values():  # as the end of its process does
        peer.socket.shutdown(socket.SHUT_RDWR)
    assert soon(lambda: 2 in two.inbox.gone)
    if leaves == "calls":
        call(two)
    else:
        two.close()
    waits.join()
    assert told and all(isinstance(error, RankError) and error.rank == 2 for error in told), told
    for group in (one, two, three):
        group.close()


def test_what_a_lost_rank_had_said_counts_though_another_one_tells_first_that_it_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links_module, "DOUBT", 60.0)
    one, two, three = groups(3)
    assert two.links is not None and three.links is not None
    told: list[BaseException] = []
    reads, read = threading.Event(), two.links._read

    def read_later(peer: Peer) -> None:
        if peer.rank != 2 or reads.is_set():
            read(peer)

    def call(group: RankGroup, count: int) -> None:
        try:
            for _ in range(count):
                with group.calling("step"):
                    group.settle(None)
        except RankError as error:
            told.append(error)

    threads = [threading.Thread(target=call, args=each) for each in ((one, 2), (two, 2))]
    for thread in threads:
        thread.start()
    call(three, 1)
    assert soon(lambda: all(three.inbox._said[rank] for rank in (0, 1)))  # of their second call
    monkeypatch.setattr(two.links, "_read", read_later)
    begin, end = (2, 0, "the beginning of a call"), (2, 1, "end")
    three.links.send_all(Message("said", begin, ["step", 0, ""]))
    three.links.send_all(Message("said", end))
    three.links._lost = lambda rank, why: None  # it tells nobody any more, as its process ends
    for peer in three.links._peers.values():
        peer.socket.shutdown(socket.SHUT_RDWR)
    lost = two.links._peers[2]
    assert soon(lambda: 2 in one.inbox.gone and lost.doubt[0] != "")
    reads.set()
    for thread in threads:
        thread.join()
    assert not told, "a rank rolls back what the other one counts"
    assert soon(lambda: 2 in two.inbox.gone)
    for group in (one, two, three):
        group.close()


def test_what_a_lost_rank_had_said_counts_though_nothing_can_be_sent_to_it_any_more() -> None:
    one, two = groups(2)
    assert one.links is not None and two.links is not None
    one.links._reading = threading.RLock()  # type: ignore[assignment]  # may be held twice here
    peer = one.links._peers[1]
    with one.links._reading:  # its own thread reads nothing
        two.links.send_all(Message("said", (1, 0, "the beginning of a call"), ["step", 0, ""]))
        peer.broken = "cannot be reached any more"
        one.links._look(peer, time.monotonic())
    assert one.inbox.gone == {1: "cannot be reached any more"}
    assert len(one.inbox._said[1]) == 1
    for group in (one, two):
        group.close()


def test_a_rank_that_another_one_has_lost_is_given_up_soon_though_it_lives() -> None:
    one, two, three = groups(3)
    assert one.links is not None
    one.links.send(1, Message("gone", (2,), "cannot be reached any more"))
    assert soon(lambda: 2 in two.inbox.gone and 1 in three.inbox.gone)
    assert two.inbox.gone == {2: "cannot be reached any more"}
    for group in (one, two, three):
        group.close()

"""Connections between ranks: damage, silence, goodbyes, and strangers."""

from __future__ import annotations

import gc
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch

from fxpipe import RankError
from fxpipe.runtime.ranks import connecting
from fxpipe.runtime.ranks import links as links_module
from fxpipe.runtime.ranks.connecting import Met
from fxpipe.runtime.ranks.group import RankGroup
from fxpipe.runtime.ranks.links import CLOSED, Links
from fxpipe.runtime.ranks.message import MOST, PREFIX, Message, digest, pack
from fxpipe.runtime.ranks.peer import Peer
from tests.helpers.tiny import soon, within

pytestmark = pytest.mark.timeout(120, method="thread")


class End:
    """One end of a connection, and what has come there."""

    def __init__(self, connection: socket.socket) -> None:
        self.messages = SimpleQueue[Message]()
        self.lost = SimpleQueue[str]()
        self.links = Links(
            {1: connection},
            lambda rank, message: self.messages.put(message),
            lambda rank, why: self.lost.put(why),
        )


@contextmanager
def ends() -> Iterator[tuple[End, socket.socket]]:
    """An end, and the plain socket at the other one."""
    mine, other = socket.socketpair()
    end = End(mine)
    try:
        yield end, other
    finally:
        other.close()
        with within(3):
            end.links.close()
        assert not end.links._thread.is_alive()


def packed(message: Message) -> bytes:
    return b"".join(bytes(part) for part in pack(message))


def head(text: bytes, tensors: int = 0) -> bytes:
    return PREFIX.pack(len(text), tensors) + text


DAMAGED = {
    "noise": b"\xff" * 256,
    "oversized": PREFIX.pack(MOST + 1, 0),
    "no text": head(b"\xff\xfe{"),
    "no list": head(b"{}"),
    "deep": head(b"[" * 100000 + b"]" * 100000),
    "huge": head(b'["value",[],null,[["float32",[1125899906842624],[1],0,true]]]', 1 << 52),
    "negative": head(b'["value",[],null,[["float32",[2],[-1],0,false]]]', 8),
    "early": head(b'["value",[],null,[["float32",[2],[1],-1,true]]]', 8),
    "another size": head(b'["value",[],null,[["float32",[2],[1],0,true]]]', 12),
    "no type": head(b'["value",[],null,[["module",[2],[1],0,true]]]', 8),
    "no tensor": head(b'["value",[],{"tensor":3},[]]'),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_message_ends_the_connection_and_nothing_else(damage: str) -> None:
    with ends() as (end, other):
        other.sendall(packed(Message("value", (1,), torch.ones(3))))
        other.sendall(DAMAGED[damage])
        why = end.lost.get(timeout=10)
        assert "has sent something that cannot be read" in why
        assert torch.equal(end.messages.get().value, torch.ones(3))
        assert end.messages.empty()
        assert end.links._thread.is_alive()


LAYOUTS = {
    "of no dimension": torch.tensor(2.0, dtype=torch.complex64),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "cut": torch.arange(12.0).view(3, 4)[:, 1:3],
    "repeated": torch.arange(3.0)[:, None].expand(3, 4),
    "repeated and cut": torch.arange(6.0)[::2, None].expand(3, 4),
    "overlapping": torch.arange(6.0).as_strided((3, 2), (1, 1)),
    "conjugated": torch.arange(4.0).to(torch.complex64).view(2, 2).t().conj(),
    "conjugated and cut": torch.arange(4.0).to(torch.complex64)[::2].conj(),
    "shifted": torch.arange(9.0)[3:],
    "empty": torch.empty(0, 3)[:, :1].expand(0, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_small_tensor_arrives_as_it_was_with_its_strides_and_its_alignment(layout: str) -> None:
    with ends() as (end, other):
        other.sendall(packed(Message("value", (), LAYOUTS[layout])))
        arrived = end.messages.get(timeout=10).value
        assert torch.equal(arrived, LAYOUTS[layout])
        assert arrived.stride() == LAYOUTS[layout].stride()
        assert (arrived.data_ptr() - LAYOUTS[layout].data_ptr()) % 64 == 0 or not arrived.numel()


def test_a_digest_tells_values_apart_and_no_layouts() -> None:
    assert digest(torch.tensor(1.0)) != digest(torch.tensor(2.0))
    assert digest(torch.ones(1)) != digest(torch.ones(3))
    assert digest(torch.arange(6).view(2, 3)) == digest(torch.arange(6).view(2, 3).t().clone().t())
    assert digest(torch.ones(3)) == digest(torch.ones(1).expand(3))


def test_a_message_that_ends_in_its_middle_is_not_delivered() -> None:
    with ends() as (end, other):
        other.sendall(packed(Message("value", (1,), torch.ones(3)))[:-1])
        other.close()
        assert "has ended" in end.lost.get(timeout=10)
        assert end.messages.empty()


def test_silence_counts_as_a_loss_and_signs_of_life_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "SILENCE", 1.0)
    monkeypatch.setattr(links_module, "BEAT", 0.1)
    with ends() as (end, other):
        for _ in range(15):
            other.sendall(packed(Message("beat")))
            time.sleep(0.1)
        assert end.lost.empty() and end.messages.empty()
        assert "no sign of life" in end.lost.get(timeout=10)
        beat = packed(Message("beat"))
        assert other.recv(len(beat)) == beat


def test_what_was_sent_before_the_end_arrives_though_nobody_read_it_yet() -> None:
    mine, other = socket.socketpair()
    one = End(mine)
    large = torch.randn(1 << 20)
    for number in range(8):
        one.links.send(1, Message("value", (number,), large))
    closing = threading.Thread(target=one.links.close)
    closing.start()
    two = End(other)
    for number in range(8):
        message = two.messages.get(timeout=10)
        assert message.key == (number,) and torch.equal(message.value, large)
    assert two.lost.get(timeout=10) == CLOSED
    closing.join()
    with within(1):
        two.links.close()


def test_a_message_that_nobody_reads_does_not_keep_a_rank_from_closing() -> None:
    with ends() as (end, _):
        end.links.send(1, Message("value", (), torch.zeros(1 << 24)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_does_not_keep_connections_open() -> None:
    awake = os.pipe()
    with ends() as (end, other):
        child = os.fork()
        if not child:
            os.close(awake[1])
            os.read(awake[0], 1)
            os._exit(0)
        end.links.close()
        other.settimeout(10)
        while other.recv(4096):
            pass
        os.close(awake[1])
        os.waitpid(child, 0)
        os.close(awake[0])


def groups(size: int) -> list[RankGroup]:
    """The ranks of a pipe, connected as their processes would be."""
    names = tuple(f"rank {rank} (host, process {rank})" for rank in range(size))
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for rank, other in itertools.combinations(range(size), 2):
        sockets[rank][other], sockets[other][rank] = socket.socketpair()
    return [
        RankGroup(Met(rank, names, names, ("host",) * size, sockets[rank], 1, 5.0))
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
    assert soon(lambda: bool(two.hearing.gone))
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
        assert soon(lambda two=two: bool(two.hearing.gone))  # type: ignore[misc]
        assert "cannot be read" in two.hearing.gone[0]
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
        with pytest.raises(RankError, match="different batches") as raised, group.calling("step"):
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
    three.links.send_all(Message("said", (2, 0, "the begin of a call"), ["step", 0, ""]))
    (waits,) = all_call(one)
    assert soon(lambda: one.call == 2)
    for peer in three.links._peers.values():  # as the end of its process does
        peer.socket.shutdown(socket.SHUT_RDWR)
    assert soon(lambda: 2 in two.hearing.gone)
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
    assert soon(lambda: all(three.hearing._said[rank] for rank in (0, 1)))  # of their second call
    monkeypatch.setattr(two.links, "_read", read_later)
    begin, end = (2, 0, "the begin of a call"), (2, 1, "end")
    three.links.send_all(Message("said", begin, ["step", 0, ""]))
    three.links.send_all(Message("said", end))
    three.links._lost = lambda rank, why: None  # it tells nobody any more, as its process ends
    for peer in three.links._peers.values():
        peer.socket.shutdown(socket.SHUT_RDWR)
    lost = two.links._peers[2]
    assert soon(lambda: 2 in one.hearing.gone and lost.doubt[0] != "")
    reads.set()
    for thread in threads:
        thread.join()
    assert not told, "a rank rolls back what the other one counts"
    assert soon(lambda: 2 in two.hearing.gone)
    for group in (one, two, three):
        group.close()


def test_what_a_lost_rank_had_said_counts_though_nothing_can_be_sent_to_it_any_more() -> None:
    one, two = groups(2)
    assert one.links is not None and two.links is not None
    one.links._reading = threading.RLock()  # type: ignore[assignment]  # may be held twice here
    peer = one.links._peers[1]
    with one.links._reading:  # its own thread reads nothing
        two.links.send_all(Message("said", (1, 0, "the begin of a call"), ["step", 0, ""]))
        peer.broken = "cannot be reached any more"
        one.links._look(peer, time.monotonic())
    assert one.hearing.gone == {1: "cannot be reached any more"}
    assert len(one.hearing._said[1]) == 1
    for group in (one, two):
        group.close()


def test_a_rank_that_another_one_has_lost_is_given_up_soon_though_it_lives() -> None:
    one, two, three = groups(3)
    assert one.links is not None
    one.links.send(1, Message("gone", (2,), "cannot be reached any more"))
    assert soon(lambda: 2 in two.hearing.gone and 1 in three.hearing.gone)
    assert two.hearing.gone == {2: "cannot be reached any more"}
    for group in (one, two, three):
        group.close()


# strangers, where ranks connect to each other


def test_strangers_are_not_let_in_and_keep_nobody_waiting() -> None:
    secret = b"s" * 32
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        strangers = [socket.create_connection(address) for _ in range(4)]
        strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100)
        strangers[2].sendall(struct.pack("!H", 1) + b"\0" * 32)
        strangers[3].close()
        rank = socket.create_connection(address)
        nonce = connecting._exactly
        found: list[tuple[int, socket.socket]] = []

        def proves() -> None:
            rank.sendall(struct.pack("!H", 1) + connecting._proof(secret, nonce(rank, 16)))

        thread = threading.Thread(target=proves)
        thread.start()
        with within(2), connecting._Door([listener], secret) as door:
            while not found:
                found += door.admitted()
        thread.join()
        assert [number for number, _ in found] == [1]
        assert found[0][1].getpeername() == rank.getsockname()
        for each in (*strangers, rank, found[0][1]):
            each.close()

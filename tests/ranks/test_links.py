"""Connections between ranks: damage, silence, goodbyes, and strangers."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest
import torch

from fxpipe.errors import InputError
from fxpipe.runtime.ranks import handshake
from fxpipe.runtime.ranks import links as links_module
from fxpipe.runtime.ranks.links import CLOSED, Links
from fxpipe.runtime.ranks.message import MOST, PREFIX, Message, digest, pack
from fxpipe.runtime.ranks.shared import LentMemory
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


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_quantised_tensor_is_not_sent(shape: tuple[int, ...]) -> None:
    quantised = torch.quantize_per_tensor(torch.ones(shape), 0.1, 0, torch.qint8)
    with pytest.raises(InputError, match=r"a quantised tensor would have to go .*keep both on"):
        pack(Message("value", (), quantised))


def test_a_digest_tells_values_apart_and_no_layouts() -> None:
    assert digest(torch.tensor(1.0)) != digest(torch.tensor(2.0))
    assert digest(torch.ones(1)) != digest(torch.ones(3))
    assert digest(torch.arange(6).view(2, 3)) == digest(torch.arange(6).view(2, 3).t().clone().t())
    assert digest(torch.ones(3)) == digest(torch.ones(1).expand(3))
    assert digest(torch.ones(3, device="meta")) == digest(torch.ones(2, device="meta")) == ""


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


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory can be shared here")
def test_a_process_that_is_forked_while_a_thread_lends_memory_goes_on() -> None:
    with ends() as (end, _):
        lent = end.links._peers[1].lent = LentMemory(os.memfd_create("test"))
        with lent._lock:
            child = os.fork()
            if not child:
                os._exit(0)
        ended = soon(lambda: os.waitpid(child, os.WNOHANG)[0] == child)
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert ended


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
        nonce = handshake._receive
        found: list[tuple[int, socket.socket]] = []

        def proves() -> None:
            rank.sendall(struct.pack("!H", 1) + handshake._proof(secret, nonce(rank, 16)))

        thread = threading.Thread(target=proves)
        thread.start()
        with within(2), handshake._Acceptor([listener], secret) as door:
            while not found:
                found += door.admitted()
        thread.join()
        assert [number for number, _ in found] == [1]
        assert found[0][1].getpeername() == rank.getsockname()
        for each in (*strangers, rank, found[0][1]):
            each.close()


def test_what_did_not_fit_into_the_socket_goes_on_as_soon_as_it_takes_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing else wakes the thread here, which pauses as another one reads."""
    monkeypatch.setattr(links_module, "BEAT", 60.0)
    monkeypatch.setattr(links_module, "SHORT", 60.0)
    with ends() as (end, other):
        end.links.pump(lambda: True, 0)
        other.sendall(packed(Message("value", (), 1)))
        assert end.messages.get(timeout=10).value == 1
        assert soon(lambda: end.links._served() > 0)
        sent = Message("value", (), torch.ones(1 << 21))
        end.links.send(1, sent)
        other.settimeout(10)
        left = len(packed(sent))
        while left:
            left -= len(other.recv(min(left, 1 << 20)))

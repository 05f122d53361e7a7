"""Links between ranks: order, layouts, damage, silence, and goodbyes."""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.runtime.ranks import links as links_module
from fxpipe.runtime.ranks.links import CLOSED, FIRST, Links
from fxpipe.runtime.ranks.message import MOST, PREFIX, Message, digest, pack
from tests.helpers.joined import joined
from tests.helpers.tiny import within

pytestmark = pytest.mark.timeout(120, method="thread")


class End:
    """One end of a link, and what has come there."""

    def __init__(self, rank: int, group: Any) -> None:
        self.messages = SimpleQueue[Message]()
        self.lost = SimpleQueue[str]()
        self.links = Links(
            rank,
            {1 - rank: group},
            lambda rank, message: self.messages.put(message),
            lambda rank, why: self.lost.put(why),
        )


@contextmanager
def ends() -> Iterator[tuple[End, Any]]:
    """The end of rank 0, and the bare group of rank 1."""
    (one,), (two,) = (groups.values() for groups in joined(2))
    end = End(0, one)
    try:
        yield end, two
    finally:
        with within(5):
            end.links.close()
        assert not any(thread.is_alive() for thread in end.links._threads)


@contextmanager
def both() -> Iterator[tuple[End, End]]:
    """Both ends."""
    with ends() as (one, group):
        two = End(1, group)
        yield one, two
        two.links.end()


def sent(group: Any, raw: bytes, tag: int = 0) -> None:
    """Send bytes as the first transfer of a message."""
    group.send([torch.frombuffer(bytearray(raw), dtype=torch.uint8)], 0, tag).wait()


def packed(message: Message) -> bytes:
    return b"".join(bytes(part) for part in pack(message))


def head(text: bytes, tensors: int = 0) -> bytes:
    return PREFIX.pack(len(text), tensors) + text


def altered(old: bytes, new: bytes) -> bytes:
    """A message of a tensor of two floats, whose head has something else at one place."""
    prefixed, memory = pack(Message("value", (), torch.ones(2)))
    assert bytes(prefixed).count(old) == 1 and len(old) == len(new)
    return bytes(prefixed).replace(old, new) + bytes(memory)


class Code:
    """Pickled, it is a call."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("what arrives was executed",)


def described(*values: object, tensors: int = 0) -> bytes:
    return head(b"".join(pickle.dumps(value, 5) for value in values), tensors)


DAMAGED = {
    "noise": b"\xff" * 256,
    "oversized": PREFIX.pack(MOST + 1, 0),
    "no pickle": head(b"\xff\xfe{"),
    "no sizes": described(("value", (), 1), 3),
    "no message": described([], 3),
    "code": described([], ("value", (), Code())),
    "code for sizes": described(Code(), ("value", (), 1)),
    "huge": described([(0, 1 << 52)], ("value", (), 1), tensors=1 << 52),
    "negative": described([(-8, 0)], ("value", (), 1), tensors=8),
    "beyond its memory": altered(b"K\x02\x85", b"K\x03\x85"),
    "no type": altered(b"float32", b"strided"),
    "another size": described([(0, 8)], ("value", (), 1), tensors=12),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_message_ends_the_link_and_nothing_else(damage: str) -> None:
    with ends() as (end, other):
        sent(other, packed(Message("value", (1,), torch.ones(3))))
        sent(other, DAMAGED[damage])
        why = end.lost.get(timeout=30)
        assert "has sent something that cannot be read" in why
        assert torch.equal(end.messages.get().value, torch.ones(3))
        assert end.messages.empty()


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
    "large": torch.randn(64, 128),
    "large and transposed": torch.randn(300, 128).t(),
    "large and cut": torch.randn(300, 128)[:, 1:100],
    "large and repeated": torch.randn(5000)[:, None].expand(5000, 3),
    "large and shifted": torch.randn(9000)[3:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_arrives_as_it_was_with_its_strides_and_its_alignment(layout: str) -> None:
    with both() as (one, two):
        one.links.send(1, Message("value", (), LAYOUTS[layout]))
        arrived = two.messages.get(timeout=30).value
        assert torch.equal(arrived, LAYOUTS[layout])
        assert arrived.stride() == LAYOUTS[layout].stride()
        assert (arrived.data_ptr() - LAYOUTS[layout].data_ptr()) % 64 == 0 or not arrived.numel()


def test_messages_of_all_sizes_arrive_whole_and_in_order_both_ways_at_once() -> None:
    """Around the size of a first transfer, with heads that are longer than it, from two threads."""
    generator = torch.Generator().manual_seed(0)
    sizes = [0, 1, FIRST - 200, FIRST, FIRST + 1, 3 * FIRST, 1 << 20]
    values: list[tuple[str, list[Tensor]]] = []
    for _ in range(150):
        drawn = torch.randint(len(sizes), (3,), generator=generator).tolist()
        text = "x" * sizes[drawn[0] % 6]
        values.append(
            (text, [torch.full((sizes[each],), each, dtype=torch.uint8) for each in drawn[1:]])
        )

    def send(end: End, rank: int) -> None:
        for number, value in enumerate(values):
            end.links.send(rank, Message("value", (number,), [*value]))

    with both() as (one, two):
        threads = [
            threading.Thread(target=send, args=each, daemon=True) for each in ((one, 1), (two, 0))
        ]
        for thread in threads:
            thread.start()
        for end in (one, two):
            for number, (text, tensors) in enumerate(values):
                message = end.messages.get(timeout=60)
                assert message.key == (number,) and message.value[0] == text
                assert all(map(torch.equal, message.value[1], tensors))
        for thread in threads:
            thread.join()


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
        first, rest = pack(Message("value", (1,), torch.ones(FIRST)))
        sent(other, bytes(first))
        assert len(rest) == 4 * FIRST
        Links(1, {0: other}, lambda *_: None, lambda *_: None)._peers[0].poison()
        assert "has ended" in end.lost.get(timeout=30)
        assert end.messages.empty()


def test_silence_counts_as_a_loss_and_signs_of_life_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "SILENCE", 4.0)
    with ends() as (end, other):
        until = time.monotonic() + 6
        while time.monotonic() < until:
            sent(other, packed(Message("got", (0,))))
            time.sleep(0.1)
        assert end.lost.empty() and end.messages.empty()
        assert "no sign of life" in end.lost.get(timeout=30)


def test_a_rank_that_says_nothing_else_gives_signs_of_life() -> None:
    with both() as (one, two):
        assert one.messages.empty()
        spoke = one.links._peers[1].spoke
        until = time.monotonic() + 60
        while one.links._peers[1].spoke == spoke and time.monotonic() < until:
            time.sleep(0.05)
        assert one.links._peers[1].spoke > spoke
        assert two.messages.empty() and two.lost.empty()


def test_what_was_sent_before_the_end_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "FAREWELL", 30.0)
    with both() as (one, two):
        large = torch.randn(1 << 20)
        for number in range(8):
            one.links.send(1, Message("value", (number,), large))
        one.links.end()
        for number in range(8):
            message = two.messages.get(timeout=30)
            assert message.key == (number,) and torch.equal(message.value, large)
        assert two.lost.get(timeout=30) == CLOSED
        one.links.close()


def test_a_message_that_nobody_takes_does_not_keep_a_rank_from_closing() -> None:
    with ends() as (end, _):
        end.links.send(1, Message("value", (), torch.zeros(1 << 24)))


class Memory(bytearray):
    """Memory of a tensor that a weak reference tells the end of."""


@pytest.mark.parametrize("part", [False, True])
def test_what_was_sent_is_kept_until_it_is_there_and_no_longer(part: bool) -> None:
    """Of a part of a tensor, no more than the part is kept."""
    with both() as (one, two):
        memory = Memory(8 * FIRST)
        kept = weakref.ref(memory)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        sent = whole[: 4 * FIRST] if part else whole
        one.links.send(1, Message("value", (), sent))
        size = len(sent)
        del memory, whole, sent
        assert not part or kept() is None
        while not one.links.taken(1, 10):
            pass
        assert kept() is None
        assert torch.equal(two.messages.get(timeout=30).value, torch.zeros(size, dtype=torch.uint8))

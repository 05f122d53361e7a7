"""Memory that two ranks of a host share: what arrives, when it is used again, and what is left."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxpipe import RankError
from fxpipe.runtime.ranks import shared
from fxpipe.runtime.ranks.message import Message, pack, unpacking
from fxpipe.runtime.ranks.shared import LOCAL, BorrowedMemory, LentMemory, Slot, share

pytestmark = pytest.mark.skipif(
    LOCAL is None or not hasattr(os, "memfd_create"), reason="no memory can be shared here"
)

LARGE = 1 << 15  # elements: of every type more bytes than go through the socket


class Joined:
    """Two ends that share memory; what one sends is received at the other one.

    Attributes:
        lent: of the end that sends.
        borrowed: the same memory at the other one.
        sent: bytes that the last message had besides what is shared.
    """

    def __init__(self, lent: LentMemory, borrowed: BorrowedMemory) -> None:
        self.lent, self.borrowed, self.sent = lent, borrowed, 0

    def through(self, value: object) -> object:
        """What arrives when this is sent."""
        packed = pack(Message("value", (), value), self.lent)
        sent = b"".join(map(bytes, packed))
        self.sent = len(sent)
        reader = unpacking(self.borrowed)
        for space in reader:
            if isinstance(space, Message):
                return space.value
            space[:], sent = sent[: len(space)], sent[len(space) :]
        raise AssertionError

    def tensor(self, value: Tensor) -> Tensor:
        """The same for a tensor."""
        arrived = self.through(value)
        assert isinstance(arrived, Tensor)
        return arrived


@contextmanager
def joined() -> Iterator[Joined]:
    one, two = socket.socketpair()
    with one, two:
        # both ends are in one thread: each has to offer its memory before the other one takes it
        lent = [shared._lend(each) for each in (one, two)]
        borrowed = [shared._borrow(each) for each in (one, two)]
    try:
        yield Joined(lent[0], borrowed[1])
    finally:
        for mine, other in zip(lent, borrowed, strict=True):
            mine.close()
            other.close()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_rank_that_leaves_before_memory_is_shared_is_named(when: str) -> None:
    gc.collect()  # of other tests
    files = len(os.listdir("/proc/self/fd"))
    mine, other = socket.socketpair()
    mine.settimeout(10)

    def leave() -> None:
        if when == "meanwhile":  # it has what is sent to it, and sends nothing
            other.recv(1)
        other.close()

    thread = threading.Thread(target=leave)
    thread.start()
    if when == "before":
        thread.join()
    with pytest.raises(RankError, match="two left while the ranks connected") as raised:
        share({1: mine}, ["one", "two"])
    assert raised.value.rank == 1
    thread.join()
    del raised
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Large tensors of many types and layouts: permuted, cut, repeated, overlapping, shifted."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.uint8, torch.complex64]))
    base = torch.arange(4 * LARGE + 8, dtype=torch.float32).to(dtype)
    start = draw(st.integers(0, 8))
    whole = base[start : start + 4 * LARGE].view(4, 8, LARGE // 8)
    kind = draw(st.sampled_from(["as it is", "permuted", "cut", "repeated", "overlapping", "conj"]))
    match kind:
        case "permuted":
            return whole.permute(draw(st.permutations(range(3))))
        case "cut":
            return whole[:, draw(st.integers(0, 3)) : draw(st.integers(4, 8))]
        case "repeated":
            return whole[:, :1].expand(4, 8, LARGE // 8)
        case "overlapping":
            return base.as_strided((4, LARGE), (7, 1))
        case "conj":
            return whole.conj()
    return whole


@settings(deadline=None, max_examples=60)
@given(st.lists(tensors(), min_size=1, max_size=3))
def test_a_tensor_arrives_as_it_was_with_its_strides_and_its_alignment(sent: list[Tensor]) -> None:
    with joined() as ends:
        arrived = ends.through(sent)
        assert isinstance(arrived, list)
        for one, other in zip(sent, arrived, strict=True):
            assert torch.equal(one, other) and one.dtype == other.dtype
            assert one.stride() == other.stride()
            assert (one.data_ptr() - other.data_ptr()) % 64 == 0


def test_a_large_tensor_is_not_in_the_message_and_a_small_one_is() -> None:
    with joined() as ends:
        ends.tensor(torch.randn(LARGE))
        assert ends.sent < 1000
        ends.tensor(torch.randn(1000))
        assert ends.sent > 4000


def test_memory_is_used_again_once_nothing_refers_to_what_was_there_and_not_before() -> None:
    with joined() as ends:
        value = torch.randn(LARGE)
        first = ends.tensor(value)
        view = first.view(2, -1)[1]
        place = first.data_ptr()
        del first
        gc.collect()
        assert ends.tensor(torch.zeros(LARGE)).data_ptr() != place
        assert torch.equal(view, value.view(2, -1)[1])
        del view
        gc.collect()
        assert ends.tensor(torch.zeros(LARGE)).data_ptr() == place
        size = os.fstat(ends.lent._file).st_size
        for _ in range(100):
            ends.tensor(value)
        assert os.fstat(ends.lent._file).st_size == size


def test_what_finds_no_room_goes_through_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MOST", 1 << 20)
    with joined() as ends:
        value = torch.randn(LARGE)
        kept = [ends.tensor(value) for _ in range(20)]
        assert ends.sent > value.nbytes
        assert all(torch.equal(each, value) for each in kept)
        assert os.fstat(ends.lent._file).st_size <= 1 << 20
        del kept
        gc.collect()
        ends.tensor(value)
        assert ends.sent < 1000


def test_a_message_that_cannot_be_sent_leaves_no_memory_in_use() -> None:
    with joined() as ends:
        for _ in range(3):
            with pytest.raises(Exception, match="would have to go from one rank to another"):
                pack(Message("value", (), [torch.randn(LARGE), object()]), ends.lent)
        assert bytes(ends.lent._used).count(1) == 0


@pytest.mark.parametrize(
    "slot",
    [
        Slot(-1, 4096, 1 << 20, 0, 4096),
        Slot(0, 0, 1 << 20, 0, 4096),
        Slot(0, 4096, 1 << 20, 1 << 20, 4096),
        Slot(0, 4096, 1 << 20, -4096, 4096),
        Slot(0, 4096, 1 << 27, 1 << 20, 4096),
        Slot(0, 1 << 27, 1 << 20, 0, 4096),
        Slot(0, 4096, 1 << 20, 0, -1),
        Slot(1 << 20, 4096, 1 << 20, 0, 4096),
    ],
)
def test_a_place_that_is_not_in_the_memory_is_refused(slot: Slot) -> None:
    with joined() as ends:
        ends.tensor(torch.randn(LARGE))
        with pytest.raises(ValueError):
            ends.borrowed.view(slot)


@pytest.mark.parametrize("layout", [[1 << 30, 1, 0], [LARGE, -1, 0], [LARGE, 1, -8]])
def test_a_tensor_that_is_not_in_its_place_is_refused(layout: list[int]) -> None:
    shape, stride, start = layout
    with joined() as ends:
        slot = ends.lent.take(4 * LARGE)
        assert slot is not None
        head = (
            f'["value",[],{{"tensor":0}},[["float32",[{shape}],[{stride}],{start},{list(slot)}]]]'
        )
        sent = head.encode()
        reader = unpacking(ends.borrowed)
        prefix = next(reader)
        assert isinstance(prefix, memoryview)
        prefix[:] = len(sent).to_bytes(4, "big") + bytes(8)
        space = next(reader)
        assert isinstance(space, memoryview)
        space[:] = sent
        with pytest.raises(ValueError):
            next(reader)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_that_drops_a_tensor_does_not_free_its_memory() -> None:
    with joined() as ends:
        arrived = ends.tensor(torch.randn(LARGE))
        child = os.fork()
        if not child:
            del arrived
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
        assert bytes(ends.lent._used).count(1) == 1
        place = arrived.data_ptr()
        assert ends.tensor(torch.zeros(LARGE)).data_ptr() != place


def test_nothing_stays_open() -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with joined() as ends:
        ends.tensor(torch.randn(LARGE))
    del ends
    gc.collect()
    before = files()
    with joined() as ends:
        kept = ends.tensor(torch.randn(LARGE))
    assert ends.lent.take(4096) is None
    with pytest.raises(ValueError):
        ends.borrowed.view(Slot(0, 4096, 1 << 20, 0, 4096))
    del ends, kept
    gc.collect()
    assert files() == before

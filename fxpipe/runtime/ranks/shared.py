"""Memory that two processes of one host share, in which large tensors go from one to the other.

A socket copies what is sent into the system and out of it again. Here the sender copies a tensor
once, and the receiver computes on it where it is. The memory has no name, so that nothing is left
behind however a process ends.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fxpipe.errors import RankError, told

LEAST = 1 << 15
"""Tensors of fewer bytes go through the socket: shared memory costs some microseconds each."""

MOST = 1 << 28
"""Bytes that one process shares with another one at most. What does not fit goes through the
socket."""

SLOTS = mmap.PAGESIZE
"""How many tensors may be shared at once. The first page has a byte for each: 1 while it is used.
"""

LOCAL = getattr(socket, "AF_UNIX", None)
"""The family of connections inside one host, over which memory can be handed."""

_NONE = -1  # no file
_FIRST = 1 << 20  # bytes of the first segment; each further one is as large as all before it


class Slot(NamedTuple):
    """Memory for one tensor at a time.

    Attributes:
        number: the place of its byte in the first page.
        start: where the segment of the file begins that it is in.
        length: the bytes of that segment, which is mapped at once.
        offset: where it begins in the segment.
        capacity: its bytes.
    """

    number: int
    start: int
    length: int
    offset: int
    capacity: int


class LentMemory:
    """The memory that this process lends another one: it writes, the other one reads.

    A step sends tensors of the same sizes as the one before, so that slots are used again.
    """

    def __init__(self, file: int) -> None:
        """Args: file: the descriptor of an empty file without a name."""
        self._file = file
        self._lock = threading.Lock()
        self._slots: list[Slot] = []
        self._segments: dict[int, mmap.mmap] = {}
        self._size = self._taken = SLOTS
        os.ftruncate(file, SLOTS)
        self._used = mmap.mmap(file, SLOTS)

    def take(self, size: int) -> Slot | None:
        """A free slot of at least so many bytes, used from now on; None if there is none."""
        with self._lock:
            free = (x for x in self._slots if x.capacity >= size and not self._used[x.number])
            slot = min(free, key=lambda x: x.capacity, default=None)
            if slot is None or slot.capacity > 2 * size:  # one so large will be needed itself
                slot = self._another(size) or slot
            if slot is not None:
                self._used[slot.number] = 1
            return slot

    def view(self, slot: Slot) -> memoryview:
        """The memory of a slot."""
        return memoryview(self._segments[slot.start])[slot.offset : slot.offset + slot.capacity]

    def give_back(self, slot: Slot) -> None:
        """A slot is free again, whose tensor was not sent."""
        self._used[slot.number] = 0

    def close(self) -> None:
        """Lend nothing more. What was sent stays with the other process."""
        with self._lock:
            self._file = _closed(self._file)

    def _another(self, size: int) -> Slot | None:
        capacity = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._file == _NONE or len(self._slots) == SLOTS:
            return None
        start, segment = next(reversed(self._segments.items()), (0, None))
        if segment is None or self._taken + capacity > self._size:
            start = self._size
            length = min(max(_FIRST, start - SLOTS, capacity), MOST - start)
            if length < capacity:
                return None
            try:
                os.ftruncate(self._file, start + length)
                segment = self._segments[start] = mmap.mmap(self._file, length, offset=start)
            except (OSError, ValueError):  # there is no more memory to share, or to map
                return None
            self._size, self._taken = start + length, start
        slot = Slot(len(self._slots), start, len(segment), self._taken - start, capacity)
        self._taken += capacity
        self._slots.append(slot)
        return slot


class BorrowedMemory:
    """The memory that another process lends this one."""

    def __init__(self, file: int) -> None:
        """Args: file: the descriptor that the other process has sent."""
        self._file = file
        self._process = os.getpid()
        self._segments: dict[int, mmap.mmap] = {}
        self._used: mmap.mmap | None = None

    def view(self, slot: Slot) -> memoryview:
        """A slot. The other process may use it again when nothing refers to the view any more.

        Raises:
            ValueError: there is no such slot.
        """
        number, start, length, offset, capacity = slot
        sound = 0 <= number < SLOTS <= start <= MOST and 0 < length <= MOST
        sound = sound and offset >= 0 and 0 < capacity <= length - offset
        if not sound or self._file == _NONE:
            raise ValueError(f"there is no {slot}")
        if self._used is None:
            self._used = mmap.mmap(self._file, SLOTS)
        if start not in self._segments:
            self._segments[start] = mmap.mmap(self._file, length, offset=start)
        view = memoryview(self._segments[start])[offset : offset + capacity]
        if len(view) != capacity:
            raise ValueError(f"{slot} does not end where it should")
        weakref.finalize(view, self._free, number).atexit = False
        return view

    def close(self) -> None:
        """Borrow nothing more. What is here stays."""
        self._file = _closed(self._file)

    def _free(self, number: int) -> None:
        # a forked process drops its copy of the view, while this one goes on using the memory
        if self._used is not None and os.getpid() == self._process:
            self._used[number] = 0


def _closed(file: int) -> int:
    if file != _NONE:
        os.close(file)
    return _NONE


Shared = tuple[LentMemory | None, BorrowedMemory | None]
"""What a process lends another one, and borrows from it."""


def share(connections: Mapping[int, socket.socket], names: Sequence[str]) -> dict[int, Shared]:
    """Rank → memory shared with it over its connection; each rank calls this.

    Connections between hosts, and systems without such memory, share none.

    Raises:
        RankError: a rank has left meanwhile; all connections are closed then.
    """
    able = hasattr(os, "memfd_create")
    local = [r for r, each in connections.items() if able and each.family == LOCAL]
    shared: dict[int, Shared] = dict.fromkeys(connections, (None, None))
    rank = -1
    try:
        for rank in local:
            shared[rank] = _lend(connections[rank]), None
        for rank in local:
            shared[rank] = shared[rank][0], _borrow(connections[rank])
    except OSError as error:
        memory = [each for own in shared.values() for each in own if each is not None]
        for each in (*connections.values(), *memory):
            each.close()
        raise RankError(
            f"{names[rank]} left while the ranks connected ({told(error)}); its own error says "
            "why: start all ranks again",
            rank=rank,
        ) from error
    return shared


def _lend(connection: socket.socket) -> LentMemory:
    file = os.memfd_create("fxpipe")
    try:
        socket.send_fds(connection, [b"m"], [file])
    except OSError:
        os.close(file)
        raise
    return LentMemory(file)


def _borrow(connection: socket.socket) -> BorrowedMemory:
    _, files, *_ = socket.recv_fds(connection, 1, 1)
    if not files:
        raise ConnectionError("the connection was closed")
    return BorrowedMemory(*files)

"""Memory that two processes of one host share, to pass large tensors from one to the other.

A socket copies every byte twice, into the kernel and out of it. Here the sender copies a tensor
once, and the receiver computes on it in place. The memory has no name, so nothing is left behind,
however a process ends.
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
"""Tensors of fewer bytes go through the socket: shared memory costs some microseconds for each."""

MOST = 1 << 28
"""The maximum number of bytes lent to one process. Tensors beyond go through the socket."""

SLOTS = mmap.PAGESIZE
"""The maximum number of slots. The first page has a byte for each slot: 1 while it is in use."""

LOCAL = getattr(socket, "AF_UNIX", None)
"""The family of sockets within one host, over which a file descriptor can be sent."""

_NONE = -1  # no file
_FIRST = 1 << 20  # bytes of the first segment; each further one is as large as all before it


class Slot(NamedTuple):
    """Memory for one tensor at a time.

    Attributes:
        number: the index of its byte in the first page.
        start: the offset in the file of its segment, which is mapped as a whole.
        length: the bytes of the segment.
        offset: where the slot begins in the segment.
        capacity: the bytes of the slot.
    """

    number: int
    start: int
    length: int
    offset: int
    capacity: int


class LentMemory:
    """Memory that this process lends to another process: it writes, the other one reads.

    Slots are reused: each step sends tensors of the same sizes as the step before.
    """

    def __init__(self, file: int) -> None:
        """``file``: the descriptor of an empty file without a name."""
        self._file = file
        self._lock = threading.Lock()
        self._slots: list[Slot] = []
        self._segments: dict[int, mmap.mmap] = {}
        self._size = self._taken = SLOTS
        os.ftruncate(file, SLOTS)
        self._used = mmap.mmap(file, SLOTS)

    def take(self, size: int) -> Slot | None:
        """Take a free slot of at least ``size`` bytes; None if there is none."""
        with self._lock:
            free = (x for x in self._slots if x.capacity >= size and not self._used[x.number])
            slot = min(free, key=lambda x: x.capacity, default=None)
            if slot is None or slot.capacity > 2 * size:  # keep it for a larger tensor
                slot = self._new_slot(size) or slot
            if slot is not None:
                self._used[slot.number] = 1
            return slot

    def view(self, slot: Slot) -> memoryview:
        """The memory of a slot."""
        return memoryview(self._segments[slot.start])[slot.offset : slot.offset + slot.capacity]

    def give_back(self, slot: Slot) -> None:
        """Free a slot whose tensor was not sent."""
        self._used[slot.number] = 0

    def close(self) -> None:
        """Lend no more memory. The other process keeps the tensors that were sent."""
        with self._lock:
            self._file = _closed(self._file)

    def _new_slot(self, size: int) -> Slot | None:
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
            except (OSError, ValueError):  # no more memory can be shared or mapped
                return None
            self._size, self._taken = start + length, start
        slot = Slot(len(self._slots), start, len(segment), self._taken - start, capacity)
        self._taken += capacity
        self._slots.append(slot)
        return slot


class BorrowedMemory:
    """Memory that another process lends to this one."""

    def __init__(self, file: int) -> None:
        """``file``: the descriptor that the other process has sent."""
        self._file = file
        self._process = os.getpid()
        self._segments: dict[int, mmap.mmap] = {}
        self._used: mmap.mmap | None = None

    def view(self, slot: Slot) -> memoryview:
        """Return the memory of a slot, which becomes free when nothing refers to the view any more.

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
        """Borrow no more memory. The tensors that have arrived stay valid."""
        self._file = _closed(self._file)

    def _free(self, number: int) -> None:
        # not in a forked process: its parent goes on using the memory
        if self._used is not None and os.getpid() == self._process:
            self._used[number] = 0


def _closed(file: int) -> int:
    if file != _NONE:
        os.close(file)
    return _NONE


Shared = tuple[LentMemory | None, BorrowedMemory | None]
"""The memory lent to another process, and the memory borrowed from it."""


def share(connections: Mapping[int, socket.socket], names: Sequence[str]) -> dict[int, Shared]:
    """Set up memory shared with the other ranks of this host; every rank must call this.

    Returns:
        Other rank → memory shared with it; none between hosts, or on systems without support.

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
        memory = [part for pair in shared.values() for part in pair if part is not None]
        for resource in (*connections.values(), *memory):
            resource.close()
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

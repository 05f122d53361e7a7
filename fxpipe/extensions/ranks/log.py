"""The log: what the ranks of a pipe tell each other, which all of them read in one order.

So all ranks decide alike, for example whether an exchange was complete before a rank failed. The
log is in the store of torch.distributed. An entry gets a number, by counting up a key, and is then
written under that number, for good. Each rank says with its entries how far it has read, and drops
from the store what all have read. What is larger than ``LARGE`` goes over a gloo group of all
ranks, as the store refuses 8 MB; then the log has its size.

A thread reads: it waits for nothing else, and hands every entry on. A rank whose process ends or
falls silent is noticed by the next one, which has a receive from it posted at any time, and logs
that it is gone. That is the last entry that anybody reads.
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.errors import told
from fxpipe.extensions.ranks import packing
from fxpipe.extensions.ranks.packing import RefusedError

LARGE = 1 << 18
"""The bytes above which an entry's value goes over the group."""

BEAT = 1.0
"""Seconds between two signs of life to the next rank."""

SILENCE = 30.0
"""Seconds without a sign of life after which a rank counts as lost: its process or the network has
stopped. (A process that ends is noticed at once.) Long enough for a process that is only busy, such
as in an extension that computes for seconds while it holds the GIL."""

SLOWEST = 1e6
"""Bytes a second of the slowest network: a large value may take longer than ``SILENCE``."""

DOUBT = 0.3
"""Seconds after which a connection that was closed means that the rank is gone: a rank that times
out closes its connections, and then says for whom."""

FAREWELL = 1.0
"""Seconds that closing waits until the log is read to its end."""

PATIENCE = 10.0
"""Seconds that a thread may take to leave the store and gloo once nothing keeps it there."""

CLOSED = "has closed its pipe or ended"
"""The reason why a rank is gone, if it said goodbye."""

STORE = -1
"""Stands for the store where it is lost, and with it all ranks."""

_EVER = timedelta(days=20)  # the most that fits the store's milliseconds
_HOLE = b"-"  # is written under a number where nothing came
_BEAT, _LARGE, _POISON = range(3)  # gloo's tags


class Entry(NamedTuple):
    """What one rank tells others.

    Attributes:
        kind: says how it is handled, such as ``said``.
        key: says what it belongs to: numbers, strings and tuples of them.
        value: what is told: control, see ``packing``, with values of the user as ``enclosed``
            returns them.
    """

    kind: str
    key: tuple[Any, ...] = ()
    value: Any = None


Delivers = Callable[[int, Entry], None]


class Log:
    """A rank's view of the log.

    Attributes:
        gone: whether the last entry was read.
    """

    def __init__(
        self, rank: int, size: int, store: Any, group: Any, deliver: weakref.WeakMethod[Delivers]
    ) -> None:
        """Start the threads.

        Args:
            rank: the number of this rank.
            size: the number of ranks.
            store: a store of torch.distributed that has nothing but the log.
            group: a gloo group of all ranks, which belongs to the log.
            deliver: called by a thread with the number of a rank and an entry of it, for each entry
                in order, those of this rank included. The last one is ``gone``, with the lost
                rank, or ``STORE``, as its key and the reason as its value. The log does not keep
                its object.
        """
        self.gone = False
        self._rank, self._size, self._deliver = rank, size, deliver
        self._reads, self._writes = _connected(store), _connected(store)
        self._group, self._process = group, os.getpid()
        self._telling = threading.RLock()
        self._own = deque[int]()  # numbers of entries written here that are still in the store
        self._large = deque[Tensor]()  # what was written here and not been sent yet
        self._sent = deque[tuple[int, Any]]()  # number → memory and sends
        self._read, self._seen = 0, [0] * size
        self._closing = threading.Event()
        works = {"log": self._follow, "listen": self._listen, "beat": self._beat}
        self._threads = [
            threading.Thread(target=work, name=f"fxpipe-{name}", daemon=True)
            for name, work in works.items()
        ]
        for thread in self._threads:
            thread.start()
        if not _open:
            atexit.register(_close_all)  # before workers are joined, of which some wait for ranks
        _open.add(self)

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that reads the log."""
        return os.getpid() != self._process

    def tell(self, entry: Entry, ranks: Collection[int] | None = None) -> int:
        """Add an entry for some ranks, by default for all; never waits for another rank.

        Returns:
            Its number; 0 without the store, which the thread that reads says.

        Raises:
            InputError: it has something that cannot be pickled.
        """
        data = packing.pack(tuple(entry))
        large = len(data) > LARGE
        size, here = (len(data), b"") if large else (0, bytes(data))
        with self._telling, suppress(RuntimeError):
            # who writes, up to where it has read, for whom it writes, and what
            packed = pickle.dumps((self._rank, self._read, ranks, size, here))
            if large:
                self._large.append(torch.frombuffer(data, dtype=torch.uint8))
            while True:
                number: int = self._writes.add("last", 1)
                if self._writes.compare_set(str(number), "", packed) == packed:
                    self._own.append(number)
                    return number
        return 0

    def end(self) -> None:
        """Start to close: say goodbye."""
        self._closing.set()

    def close(self) -> None:
        """``end``, and wait until it is done: a thread that is left inside gloo or the store when
        Python ends would abort the process."""
        self.end()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(3 * PATIENCE)

    def _follow(self) -> None:
        """Read until a rank is gone."""
        try:
            while not self.gone:
                self._take(self._reads.get(str(self._read + 1)))
                last = self._reads.add("last", 0)
                if more := [*map(str, range(self._read + 1, last + 1))]:
                    for packed in self._reads.multi_get(more):
                        self._take(packed)
                self._drop()
        except Exception as error:
            lost = Entry("gone", (STORE,), f"cannot be reached any more ({told(error)})")
            self._hand_on(STORE, lost)

    def _take(self, packed: bytes) -> None:
        """Read the next entry."""
        self._read += 1
        if self.gone or packed == _HOLE:
            return
        try:
            rank, seen, ranks, size, data = packing.unpack(packed)
        except RefusedError as error:
            self._hand_on(STORE, Entry("gone", (STORE,), _refused("holds", error)))
            return
        self._seen[rank] = seen
        mine = ranks is None or self._rank in ranks
        if size and rank == self._rank:
            memory = self._large.popleft()
            others = [r for r in ranks or range(self._size) if r != self._rank]
            with suppress(RuntimeError):
                works = [self._group.send([memory], other, _LARGE) for other in others]
                self._sent.append((self._read, (memory, works)))
            data = memory.numpy().data
        elif size and mine:
            memory = torch.empty(size, dtype=torch.uint8)
            wait = timedelta(seconds=SILENCE + size / SLOWEST)
            try:
                self._group.recv([memory], rank, _LARGE).wait(wait)
            except RuntimeError as error:
                threading.Timer(DOUBT, self._part, (rank, _reason(error))).start()
                return
            self.tell(Entry("got"))
            data = memory.numpy().data
        if mine:
            try:
                entry = Entry(*packing.unpack(data))
            except RefusedError as error:
                self._part(rank, _refused("has sent", error))
            else:
                self._hand_on(rank, entry)

    def _hand_on(self, rank: int, entry: Entry) -> None:
        if entry.kind == "gone":
            self.gone = True
            self._closing.set()
        if entry.kind != "got" and (deliver := self._deliver()) is not None:
            deliver(rank, entry)

    def _drop(self) -> None:
        """Drop what all ranks have read."""
        self._seen[self._rank] = self._read
        least = min(self._seen)
        while self._sent and self._sent[0][0] <= least:
            self._sent.popleft()
        while self._own and self._own[0] <= least:
            self._reads.delete_key(str(self._own.popleft()))

    def _listen(self) -> None:
        """Wait for signs of life of the rank before this one, until it is gone."""
        before, byte = (self._rank - 1) % self._size, torch.empty(1, dtype=torch.uint8)
        try:
            while not self.gone:
                self._group.recv([byte], before, _BEAT).wait(timedelta(seconds=SILENCE))
        except RuntimeError as error:
            if not _late(error):
                self._threads[0].join(DOUBT)
            self._part(before, _reason(error))

    def _beat(self) -> None:
        """Send signs of life; at the end, say goodbye."""
        after, byte = (self._rank + 1) % self._size, torch.zeros(1, dtype=torch.uint8)
        sent = deque[Any](maxlen=int(4 * SILENCE / BEAT))
        while not self._closing.wait(BEAT):
            with suppress(RuntimeError):
                sent.append(self._group.send([byte], after, _BEAT))
        follows, listens, _ = self._threads
        deadline = time.monotonic() + SILENCE
        while self._sent and not self.gone and time.monotonic() < deadline:
            time.sleep(0.01)  # a large value may be on its way
        self._part(self._rank, CLOSED)
        follows.join(FAREWELL)
        poison(self._group)
        follows.join(PATIENCE)
        listens.join(PATIENCE)
        self._group = None
        _open.discard(self)

    def _part(self, rank: int, why: str) -> None:
        """Log that a rank is gone, as the last entry. If it ended between counting and writing, the
        others would wait for what it wrote; so something is written there."""
        if self.gone:
            return
        with suppress(RuntimeError):
            for number in range(self._read + 1, self.tell(Entry("gone", (rank,), why))):
                self._writes.compare_set(str(number), "", _HOLE)


_open = set[Log]()


def _close_all() -> None:
    """Close all logs that are open, at exit."""
    for log in list(_open):
        if not log.forked:
            log.close()


def poison(group: Any) -> None:
    """End all that is pending in a gloo group, here and at the other ends, for good: a wait that
    times out does so, and nothing else does."""
    with suppress(RuntimeError):
        byte, other = torch.empty(1, dtype=torch.uint8), int(group.rank() == 0)
        group.recv([byte], other, _POISON).wait(timedelta(milliseconds=1))


def _connected(store: Any) -> Any:
    """Return a connection of its own to a store. On Linux it ends when the store's host has been
    silent for ``SILENCE``; torch sets no limit, so one whose network is gone would wait for ever.
    As torch does not tell which socket it is, the new one is taken."""
    before = _sockets()
    found = store.clone()
    found.set_timeout(_EVER)
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    for _, number in _sockets() - before:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            peer = connection.getpeername()  # a text where it is no socket of the internet
            if isinstance(peer, tuple) and peer[1] == getattr(store, "port", None):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                    connection.setsockopt(socket.IPPROTO_TCP, option, max(1, int(SILENCE / 3)))
                limit = int(SILENCE * 1000)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
    return found


def _sockets() -> set[tuple[str, int]]:
    """The sockets of this process, as Linux names them, and their numbers."""
    found = set()
    with suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # it was the folder itself
                name = os.readlink(f"/proc/self/fd/{number}")
                if name.startswith("socket:"):
                    found.add((name, int(number)))
    return found


def _reason(error: RuntimeError) -> str:
    """Why a rank is gone, from what gloo says."""
    if _late(error):
        return f"has given no sign of life for {SILENCE:.0f} s"
    if any(each in str(error) for each in ("closed", "reset", "Broken pipe")):
        return "has ended, or its connection was closed"
    return f"cannot be reached any more ({told(error)})"


def _refused(verb: str, error: RefusedError) -> str:
    return f"{verb} {error}, which no rank sends to agree with others; it was not run"


def _late(error: RuntimeError) -> bool:
    """Whether gloo has ended a wait because nothing came."""
    return "imed out" in str(error) or "timeout" in str(error)

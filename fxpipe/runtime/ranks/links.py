"""Messages to and from the other ranks, over gloo process groups of two ranks each.

No rank ever waits for another in a cycle, whatever a program does. For each other rank a thread
always has receives posted and takes whatever comes; it waits for nothing else. Nobody waits for a
send: it is posted by whoever calls, in the order of the calls, and its memory is kept until the
receiver says that it has it. (gloo's own wait for a send may last for ever where the other process
ends at the wrong moment.) Nothing that computes waits inside gloo, where Python would handle no
signals; it waits for a queue of its own.

The groups have two members, as gloo ends a pending receive only together with all that is pending
in its group: when the other process ends, or when a receive of this process times out.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import told
from fxpipe.runtime.ranks.message import PREFIX, Message, pack, unpacking

BEAT = 1.0
"""Seconds without other messages after which a rank sends a sign of life."""

SILENCE = 30.0
"""Seconds without a sign of life after which a rank counts as lost: its process or the network has
stopped. (A process that ends is noticed at once.) Long enough for a process that is only busy, such
as in an extension that computes for seconds while it holds the GIL."""

SLOWEST = 1e6
"""Bytes a second of the slowest network: a large tensor may take longer than ``SILENCE``."""

DOUBT = 0.5
"""Seconds for which messages of a rank are still read after another rank has lost it."""

FAREWELL = 1.0
"""Seconds that closing waits for the messages that are still under way."""

PATIENCE = 10.0
"""Seconds that a thread may take to leave gloo once all that it waits for has been ended."""

CLOSED = "has closed its pipe or ended"
"""The reason why a rank is gone, if it said goodbye."""

FIRST = 1 << 16
"""The maximum number of bytes of the first transfer of a message: all of it, if it fits. Such a
message is copied once on each side, others are not."""

OFTEN = 16
"""Small messages after which the receiver says that it has them; it says so at once of others."""

AHEAD = 4
"""First transfers for which receives are posted: what is sent before a process ends then counts."""

_FIRST, _REST, _POISON = range(3)  # gloo's tags; it keeps the order of each


class Peer:
    """The group of this rank and another one.

    Attributes:
        rank: the number of that rank.
        spoke: when something was last sent.
        gone: why the rank is lost; empty while it is not.
        doubt: why another rank has lost it, and when that was reported; empty if none has.
        thread: takes what comes.
    """

    thread: threading.Thread

    def __init__(self, rank: int, group: Any, *, higher: bool) -> None:
        """``higher``: whether the other rank's number is the higher one."""
        self.rank = rank
        self.spoke = time.monotonic()
        self.gone = ""
        self.doubt = "", 0.0
        self._group, self._other = group, int(higher)
        self._posting = threading.Condition()  # notified of what is released
        self._kept = deque[list[tuple[Tensor, Any]]]()  # the last messages' memory and sends
        self._released = self._large = 0  # messages of before; up to the last large one
        self._arrived = self._told = 0  # messages, and those of which the sender knows
        self._parting = False

    def send(self, parts: list[memoryview]) -> None:
        """Post the transfers of a packed message, unless the rank is lost."""
        if small := sum(map(len, parts)) <= FIRST:
            parts = [memoryview(bytearray().join(parts))]
        elif len(parts[0]) > FIRST:
            parts = [parts[0][:FIRST], parts[0][FIRST:], *parts[1:]]
        with self._posting:
            if self.gone:
                return
            self.spoke = time.monotonic()
            sends: list[tuple[Tensor, Any]] = []
            self._kept.append(sends)
            if not small:
                self._large = self._released + len(self._kept)
            for part in parts:
                memory = torch.frombuffer(part, dtype=torch.uint8)
                try:
                    work = self._group.send([memory], self._other, _REST if sends else _FIRST)
                except RuntimeError:  # the thread that receives says why
                    return
                sends.append((memory, work))

    def taken(self, timeout: float) -> bool:
        """Wait until the rank has all large messages, or is lost. Returns whether that is so."""
        with self._posting:
            large = self._large
            return self._posting.wait_for(
                lambda: self.gone != "" or self._released >= large, timeout
            )

    def tell(self) -> None:
        """Say how many messages have arrived, as a sign of life."""
        self._told = self._arrived
        self.send(pack(Message("got", (self._told,))))

    def farewell(self) -> None:
        """Say goodbye, once."""
        if not self._parting:
            self._parting = True
            self.send(pack(Message("bye")))

    def messages(self) -> Iterator[Message]:
        """Take what comes, until ``_Ended``; each wait ends after ``SILENCE``."""
        reading = unpacking()
        item = next(reading)
        posted = deque(self._post(torch.empty(FIRST, dtype=torch.uint8)) for _ in range(AHEAD))
        while True:
            first, work = posted.popleft()
            self._wait(work, FIRST)
            left = _bytes(first)
            size, rest = PREFIX.unpack(left[: PREFIX.size])
            if large := PREFIX.size + size + rest > FIRST:
                left = left[: PREFIX.size + size]
            while not isinstance(item, Message):
                count = min(len(item), len(left))
                item[:count], left = left[:count], left[count:]
                if count < len(item):
                    self._fill(item[count:])
                item = next(reading)
            posted.append(self._post(first))
            self._arrived += 1
            if large or self._arrived - self._told >= OFTEN:
                self.tell()
            if item.kind == "got":
                self._release(*item.key)
            else:
                yield item
            item = next(reading)

    def leave(self, why: str) -> None:
        """Send no more."""
        with self._posting:
            self.gone = why
            self._posting.notify_all()

    def poison(self) -> None:
        """End all that is pending, here and there."""
        with suppress(RuntimeError):
            byte = torch.empty(1, dtype=torch.uint8)
            self._group.recv([byte], self._other, _POISON).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Give back the group."""
        self._kept.clear()
        self._group = None

    def _release(self, arrived: int) -> None:
        """Keep no longer what the other rank has."""
        with self._posting:
            while self._released < arrived and self._kept:
                self._kept.popleft()
                self._released += 1
            self._posting.notify_all()

    def _fill(self, memory: memoryview) -> None:
        _, work = self._post(torch.frombuffer(memory, dtype=torch.uint8), _REST)
        self._wait(work, len(memory))

    def _post(self, memory: Tensor, tag: int = _FIRST) -> tuple[Tensor, Any]:
        """Post a receive into memory. Returns both."""
        try:
            return memory, self._group.recv([memory], self._other, tag)
        except RuntimeError as error:
            raise _Ended(error) from error

    def _wait(self, work: Any, size: int) -> None:
        """Wait for a receive of some bytes."""
        try:
            work.wait(timedelta(seconds=SILENCE + size / SLOWEST))
        except RuntimeError as error:
            raise _Ended(error) from error


class _Ended(Exception):
    """gloo has ended what was pending, by its error."""


def _bytes(memory: Tensor) -> memoryview:
    """The memory of a tensor of bytes, which must outlive the view."""
    return memoryview((ctypes.c_char * len(memory)).from_address(memory.data_ptr())).cast("B")


class Links:
    """Sends messages to the other ranks, and delivers theirs in order. Sending never waits."""

    def __init__(
        self,
        rank: int,
        groups: Mapping[int, Any],
        deliver: Callable[[int, Message], None],
        lost: Callable[[int, str], None],
    ) -> None:
        """Start the threads.

        Args:
            rank: the number of this rank.
            groups: rank → a gloo process group of that rank and this one, the lower one first.
            deliver: called by a thread that reads, with a rank and a message from it. At any time
                one thread calls.
            lost: called likewise, once for each lost rank, with the rank and the reason.
        """
        self._peers = {r: Peer(r, group, higher=r > rank) for r, group in groups.items()}
        self._deliver, self._lost = deliver, lost
        self._delivering = threading.RLock()
        self._closing = threading.Event()
        self._looked = time.monotonic()
        self._process = os.getpid()
        for peer in self._peers.values():
            peer.thread = threading.Thread(
                target=self._receive, args=(peer,), name="fxpipe-link", daemon=True
            )
        self._thread = threading.Thread(target=self._look, name="fxpipe-links", daemon=True)
        for thread in self._threads:
            thread.start()
        _open.add(self)

    def send(self, rank: int, message: Message) -> None:
        """Send a message to a rank, unless that rank is lost.

        Raises:
            InputError: the message contains something that cannot be sent.
        """
        self._peers[rank].send(pack(message))

    def send_all(self, message: Message, ranks: Collection[int] | None = None) -> None:
        """Send a message to all other ranks, or to those of ``ranks`` except this one."""
        peers = [p for rank, p in self._peers.items() if ranks is None or rank in ranks]
        if peers:
            packed = pack(message)
            for peer in peers:
                peer.send(packed)

    def taken(self, rank: int, timeout: float) -> bool:
        """Wait until a rank has all large messages, or is lost. Returns whether that is so."""
        return self._peers[rank].taken(timeout)

    def doubt(self, rank: int, why: str) -> None:
        """Give up a rank that another rank has lost.

        First take, for a moment, what it had sent: other ranks may have received it, and all must
        agree. Usually its group with this rank ends at the same time.
        """
        self._peers[rank].doubt = why, time.monotonic()

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that owns the groups."""
        return os.getpid() != self._process

    def end(self) -> None:
        """Start to close: say goodbye, and wait for at most ``FAREWELL`` seconds until the others
        have everything."""
        self._closing.set()

    def close(self) -> None:
        """``end``, and wait until it is done: a thread that is left inside gloo when Python ends
        would abort the process."""
        self.end()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(FAREWELL + PATIENCE)

    @property
    def _threads(self) -> list[threading.Thread]:
        return [*(peer.thread for peer in self._peers.values()), self._thread]

    def _receive(self, peer: Peer) -> None:
        """Deliver what comes from a rank, until it is lost or says goodbye."""
        try:
            for message in peer.messages():
                if message.kind == "bye":
                    peer.farewell()
                    return self._give_up(peer, CLOSED)
                if not self._closing.is_set():
                    with self._delivering:
                        if not peer.gone:
                            self._deliver(peer.rank, message)
                del message
        except _Ended as error:
            self._give_up(peer, self._reason(error.args[0]))
        except Exception as error:
            self._give_up(peer, f"has sent something that cannot be read ({told(error)})")

    def _reason(self, error: RuntimeError) -> str:
        """Why a rank is lost, from what gloo says."""
        text = str(error)
        if "imed out" in text or "timeout" in text:
            slept = time.monotonic() - self._looked
            if slept > SILENCE / 2:
                return f"was not heard, as this process had stopped for {slept:.0f} s"
            return f"has given no sign of life for {SILENCE:.0f} s"
        if any(each in text for each in ("closed", "reset", "Broken pipe")):
            return "has ended, or its connection was closed"
        return f"cannot be reached any more ({told(error)})"

    def _give_up(self, peer: Peer, why: str) -> None:
        """Lose a rank; before it those that another rank has lost: it may have left for them."""
        doubted = [each for each in self._peers.values() if each.doubt[0] and each is not peer]
        with self._delivering:
            for lost, reason in [*((each, each.doubt[0]) for each in doubted), (peer, why)]:
                if lost.gone:
                    continue
                lost.leave(reason)
                if reason != CLOSED:
                    lost.poison()
                if not self._closing.is_set():
                    self._lost(lost.rank, reason)

    def _look(self) -> None:
        """Send signs of life, give up doubted ranks; at the end, say goodbye."""
        while not self._closing.wait(BEAT / 2):
            self._looked = now = time.monotonic()
            for peer in self._peers.values():
                why, since = peer.doubt
                if why and now - since > DOUBT:
                    self._give_up(peer, why)
                elif now - peer.spoke > BEAT:
                    peer.tell()
        for peer in self._peers.values():
            peer.farewell()
            peer.leave("closed")
        deadline = time.monotonic() + FAREWELL
        for peer in self._peers.values():
            peer.thread.join(max(deadline - time.monotonic(), 0))
            if peer.thread.is_alive():
                peer.poison()
                peer.thread.join(PATIENCE)
            peer.close()
        _open.discard(self)


_open = set[Links]()


def close_all() -> None:
    """Close all links that are open, at exit."""
    for links in list(_open):
        if not links.forked:
            links.close()

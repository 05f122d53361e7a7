"""Connections to the other ranks: one socket each, served by one thread.

Messages between CPU ranks do not use ``torch.distributed``: gloo cannot cancel a pending receive,
so each failure would require new process groups. Here unwanted messages are read and dropped.
"""

from __future__ import annotations

import os
import select
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from types import MappingProxyType

from fxpipe.errors import told
from fxpipe.runtime.ranks.message import Message, pack
from fxpipe.runtime.ranks.peer import Peer
from fxpipe.runtime.ranks.shared import Shared

BEAT = 1.0
"""Seconds without other messages after which a rank sends a sign of life."""

SILENCE = 30.0
"""Seconds without a sign of life after which a rank counts as lost: its process or the network has
stopped. (A process that ends is noticed at once.) Long enough for a process that is only busy, such
as in an extension that computes for seconds while it holds the GIL."""

DOUBT = 0.5
"""Seconds for which messages of a rank are still read after another rank has lost it."""

CLOSED = "has closed its pipe or ended"
"""The reason why a rank is gone, if it said goodbye."""

SHORT = 0.03
"""Seconds after a ``pump`` for which the links' thread leaves reading to the next ``pump``."""

SPIN = 0.0002
"""Seconds of busy waiting for a message before a thread sleeps: waking a sleeping core takes about
as long, above all on a virtual machine."""

_AT_ONCE = 64
"""Pieces to read from one connection before the others have their turn."""


class Links:
    """Sends messages to the other ranks, and delivers theirs in order.

    Sending never waits: a thread sends what a socket does not take at once. The same thread reads
    whatever arrives, so no rank ever waits for another one to read. A thread that waits for a
    message reads the sockets itself, see ``pump``: handing it over would double the latency.
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        deliver: Callable[[int, Message], None],
        lost: Callable[[int, str], None],
        shared: Mapping[int, Shared] = MappingProxyType({}),
        *,
        spins: bool = False,
    ) -> None:
        """Start the thread.

        Args:
            sockets: rank → a connected socket to it.
            deliver: called by the thread that reads, with a rank and a message from it.
            lost: called by that thread, once for each lost rank, with the rank and the reason.
            shared: rank → the memory shared with it, if any.
            spins: whether a thread that waits may keep a core busy, see ``SPIN``.
        """
        nothing: Shared = (None, None)
        self._peers = {r: Peer(r, each, shared.get(r, nothing)) for r, each in sockets.items()}
        self._deliver, self._lost = deliver, lost
        self._selector = selectors.DefaultSelector()
        self._reading = threading.Lock()
        self._waiting = select.poll()  # for the thread in ``pump``
        self._woken, self._wake = socket.socketpair()
        self._stirred, self._stir = socket.socketpair()
        self._wakers = self._woken, self._wake, self._stirred, self._stir
        for waker in self._wakers:
            waker.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._waiting.register(self._stirred, select.POLLIN)
        self._by_socket = {peer.socket.fileno(): peer for peer in self._peers.values()}
        for peer in self._peers.values():
            peer.socket.setblocking(False)
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)
            self._waiting.register(peer.socket, select.POLLIN)
        self._pause = select.poll()
        self._pause.register(self._woken, select.POLLIN)
        self._spin = SPIN if spins else 0.0
        self._pumped = self._looked = 0.0  # when ``pump`` last read, and ``_look`` last ran
        self._closing = False
        self._process = os.getpid()
        _every.add(self)
        self._thread = threading.Thread(target=self._run, name="fxpipe-links", daemon=True)
        self._thread.start()

    def send(self, rank: int, message: Message) -> None:
        """Send a message to a rank, unless that rank is lost.

        Raises:
            InputError: the message contains something that cannot be sent.
        """
        peer = self._peers[rank]
        self._send(peer, pack(message, peer.lent))

    def send_all(self, message: Message, ranks: Collection[int] | None = None) -> None:
        """Send a message to all other ranks, or to those of ``ranks`` except this one."""
        peers = [p for rank, p in self._peers.items() if ranks is None or rank in ranks]
        if peers:
            packed = pack(message)
            for peer in peers:
                self._send(peer, packed)

    def doubt(self, rank: int, why: str) -> None:
        """Give up a rank that another rank has lost.

        First read, for a moment, what it had sent: other ranks may have received it, and all must
        agree. Usually its connection to this rank ends at the same time.
        """
        self._peers[rank].doubt = why, time.monotonic()
        self._notify()

    def pump(self, arrived: Callable[[], bool], timeout: float) -> None:
        """Wait until something is delivered, for at most ``timeout`` seconds.

        Messages are read here, or by another thread that reads already. ``arrived`` returns whether
        what the caller waits for has arrived meanwhile.
        """
        if not self._reading.acquire(timeout=timeout):
            return
        try:
            self._pumped = time.monotonic()
            if arrived():
                return
            ready, until = self._waiting.poll(0), self._pumped + self._spin
            while not ready and time.monotonic() < until:
                ready = self._waiting.poll(0)
            for descriptor, _ in ready or self._waiting.poll(1000 * timeout):
                if descriptor in self._by_socket:
                    self._read(self._by_socket[descriptor])
                else:
                    _drain(self._stirred)
            self._pumped = time.monotonic()
        finally:
            self._reading.release()

    def stir(self) -> None:
        """Wake the thread that waits in ``pump``."""
        with suppress(OSError):
            self._stir.send(b"!")

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that owns the connections."""
        return os.getpid() != self._process

    def end(self) -> None:
        """Start to close: send the remaining messages, for at most a second, and say goodbye."""
        self._closing = True
        self._notify()

    def close(self) -> None:
        """``end``, and wait until it is done."""
        self.end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _drop(self) -> None:
        """Close what a forked process has inherited.

        A connection lasts until every process has closed it, and the other ranks must notice when
        the parent process ends. Takes no lock: a thread of the parent may have held it at the fork.
        """
        for peer in self._peers.values():
            peer.socket.close()
        for waker in self._wakers:
            waker.close()
        self._selector.close()

    def _send(self, peer: Peer, packed: list[memoryview]) -> None:
        with peer.lock:
            if peer.gone:
                return
            peer.spoke = time.monotonic()
            peer.unsent.append(deque(packed))
            if len(peer.unsent) > 1 or peer.push():
                return  # the thread is sending, or nothing is left
        self._notify()

    def _notify(self) -> None:
        with suppress(OSError):
            self._wake.send(b"!")

    def _run(self) -> None:
        why = "closed"
        try:
            self._serve()
        except BaseException as error:
            why = f"cannot be reached any more, as the connections' thread ended ({told(error)})"
            raise
        finally:
            for peer in self._peers.values():
                self._give_up(peer, why)
            self._selector.close()
            for waker in self._wakers:
                waker.close()

    def _serve(self) -> None:
        last, deadline = time.monotonic(), float("inf")
        while True:
            rest = self._served()  # woken meanwhile, it goes on: something may be left to write
            if rest > 0 and not self._pause.poll(1000 * rest):
                continue
            for key, events in self._selector.select(BEAT / 2 if not self._closing else 0.05):
                peer: Peer | None = key.data
                if peer is None:
                    _drain(self._woken)
                    continue
                if events & selectors.EVENT_WRITE:
                    with peer.lock:
                        peer.push()
                if events & selectors.EVENT_READ:
                    if not self._reading.acquire(blocking=False):
                        self._pumped = time.monotonic()  # the thread in ``pump`` reads it
                        continue
                    try:
                        self._read(peer)
                    finally:
                        self._reading.release()
            now = time.monotonic()
            if now - last > SILENCE / 2:  # this process was stopped, the others may be alive
                for peer in self._peers.values():
                    peer.heard = now
            last = self._looked = now
            for peer in self._peers.values():
                self._look(peer, now)
            if self._closing:
                if deadline == float("inf"):
                    deadline = now + 1
                    self.send_all(Message("bye"))
                # the others close their ends when they have read everything, so nothing is lost
                if now > deadline or all(peer.gone for peer in self._peers.values()):
                    return

    def _served(self) -> float:
        """The seconds for which this thread may leave reading to a thread that has just pumped; 0
        if something has to be written or given up."""
        now = time.monotonic()
        busy = (peer.unsent or (peer.doubt[0] and not peer.gone) for peer in self._peers.values())
        if self._closing or any(busy):
            return 0.0
        return min(self._pumped + SHORT, self._looked + BEAT) - now

    def _look(self, peer: Peer, now: float) -> None:
        """Send a sign of life if one is due; give up a lost rank; else choose what to wait for."""
        if peer.gone:
            return
        if now - peer.spoke > BEAT:
            self._send(peer, pack(Message("beat")))
        why, since = peer.doubt
        if now - peer.heard > SILENCE:
            why, since = f"has given no sign of life for {SILENCE:.0f} s", 0.0
        if peer.broken or (why and now - since > DOUBT):
            with self._reading:
                self._read(peer)  # what it sent before it was lost counts
                self._give_up(peer, peer.broken or why)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        with suppress(KeyError, ValueError):  # another thread may have given it up
            if self._selector.get_key(peer.socket).events != wanted:
                self._selector.modify(peer.socket, wanted, peer)

    def _read(self, peer: Peer) -> None:
        """Read what has arrived, and deliver complete messages."""
        if peer.gone:
            return
        try:
            for _ in range(_AT_ONCE):
                room = peer.room()
                count = peer.socket.recv_into(room)
                if not count:
                    return self._give_up(peer, "has ended, or its connection was closed")
                peer.heard = time.monotonic()
                for message in peer.read(room[:count]):
                    if message.kind == "bye":
                        return self._give_up(peer, CLOSED)
                    if message.kind != "beat" and not self._closing:
                        self._deliver(peer.rank, message)
                if count < len(room):
                    return  # no more has arrived
        except BlockingIOError:
            pass
        except OSError as error:
            self._give_up(peer, f"cannot be reached any more ({told(error)})")
        except Exception as error:
            self._give_up(peer, f"has sent something that cannot be read ({told(error)})")

    def _give_up(self, peer: Peer, why: str) -> None:
        for other in self._peers.values():  # doubted ranks first: the peer may have left for them
            doubt, _ = other.doubt
            if doubt and not other.gone and other is not peer and not self._closing:
                other.doubt = "", 0.0
                self._read(other)
                self._give_up(other, doubt)
        if peer.gone:
            return
        peer.gone = why
        with peer.lock:
            peer.unsent.clear()
            with suppress(KeyError, ValueError):
                self._selector.unregister(peer.socket)
            with suppress(KeyError, ValueError):
                self._waiting.unregister(peer.socket)
            peer.close()
        if not self._closing:
            self._lost(peer.rank, why)


def _drain(pipe: socket.socket) -> None:
    with suppress(OSError):
        pipe.recv(4096)


_every = weakref.WeakSet[Links]()


def _forked() -> None:
    for links in list(_every):
        links._drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)

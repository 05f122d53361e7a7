"""Connections to the other ranks: one socket each, served by one thread.

``torch.distributed`` is not used for messages between CPU ranks: a receive of gloo's that is
pending cannot be given up, so that after a failure nothing less than new process groups would help.
Here a message that nobody wants any more is read and dropped.
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
"""Seconds after which a rank that has sent nothing else says that it is alive."""

SILENCE = 30.0
"""Seconds without a sign of life after which a rank counts as lost: it is stopped, or the network
is. A process that ends is noticed at once. One that is busy is alive, even where an extension
computes for some seconds without letting other threads run."""

DOUBT = 0.5
"""Seconds for which what a rank has sent is still read after another one has lost it."""

CLOSED = "has closed its pipe or ended"
"""Why a rank is gone that has said goodbye."""

SHORT = 0.03
"""Seconds for which a thread counts as one that reads, after it has waited for a message."""

SPIN = 0.0002
"""Seconds for which a thread that waits for a message asks again and again before it sleeps: waking
a sleeping core takes as long, above all on a virtual machine."""

_AT_ONCE = 64
"""Pieces that are read of one connection before the others have their turn."""


class Links:
    """Sends messages to the other ranks, and delivers theirs in order.

    Sending never waits: what a socket does not take at once is sent by the thread. The thread reads
    whatever arrives, so that no rank ever waits for another one to read. A thread that waits for a
    message reads itself, see ``pump``: that saves handing it over, half of the time of a message.
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
            shared: rank → the memory that it shares with this one, where it does.
            spins: whether a thread that waits may keep a core busy, see ``SPIN``.
            deliver: called by the thread that reads with a rank and a message from it.
            lost: called by that thread, once for a rank, with what has happened to it.
        """
        nothing: Shared = (None, None)
        self._peers = {r: Peer(r, each, shared.get(r, nothing)) for r, each in sockets.items()}
        self._deliver, self._lost = deliver, lost
        self._selector = selectors.DefaultSelector()
        self._reading = threading.Lock()
        self._waiting = select.poll()  # what a thread waits for that reads itself
        self._woken, self._wake = socket.socketpair()
        self._stirred, self._stir = socket.socketpair()
        self._wakers = self._woken, self._wake, self._stirred, self._stir
        for each in self._wakers:
            each.setblocking(False)
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
        self._pumped = self._looked = 0.0  # when a thread read itself, and when this one looked
        self._closing = False
        self._process = os.getpid()
        _every.add(self)
        self._thread = threading.Thread(target=self._run, name="fxpipe-links", daemon=True)
        self._thread.start()

    def send(self, rank: int, message: Message) -> None:
        """Send a message to a rank; to one that is lost it is not sent.

        Raises:
            InputError: the message has something in it that cannot be sent.
        """
        peer = self._peers[rank]
        self._send(peer, pack(message, peer.lent))

    def send_all(self, message: Message, ranks: Collection[int] | None = None) -> None:
        """Send a message to every other rank, or to those of some ranks that are others."""
        peers = [p for rank, p in self._peers.items() if ranks is None or rank in ranks]
        if peers:
            packed = pack(message)
            for peer in peers:
                self._send(peer, packed)

    def doubt(self, rank: int, why: str) -> None:
        """Give up a rank that another one has lost, though after a moment in which what it has sent
        is read: the others count it. Mostly its connection to this one ends at the same time."""
        self._peers[rank].doubt = why, time.monotonic()
        self._notify()

    def pump(self, arrived: Callable[[], bool], timeout: float) -> None:
        """Wait until something was delivered, or for so many seconds: here, or, while another
        thread reads, by that one. ``arrived`` says whether what the caller waits for is there."""
        if not self._reading.acquire(timeout=timeout):
            return
        try:
            self._pumped = time.monotonic()
            if arrived():
                return
            found, until = self._waiting.poll(0), self._pumped + self._spin
            while not found and time.monotonic() < until:
                found = self._waiting.poll(0)
            for descriptor, _ in found or self._waiting.poll(1000 * timeout):
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
        """Whether this process was forked from the one that has the connections."""
        return os.getpid() != self._process

    def end(self) -> None:
        """Say goodbye: send what is left, for at most a second, and end the connections."""
        self._closing = True
        self._notify()

    def close(self) -> None:
        """The same, and wait for it."""
        self.end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _drop(self) -> None:
        """Close what a forked process has inherited: a connection lasts until all have closed it,
        and the others have to notice when the process ends that it was forked from. Nothing that
        takes a lock, which a thread that was not forked may hold for ever."""
        for peer in self._peers.values():
            peer.socket.close()
        for each in self._wakers:
            each.close()
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
        with suppress(BlockingIOError, OSError):
            self._wake.send(b"!")

    def _run(self) -> None:
        why = "closed"
        try:
            self._serve()
        except BaseException as error:
            why = f"cannot be reached any more, as the thread of connections ended ({told(error)})"
            raise
        finally:
            for peer in self._peers.values():
                self._give_up(peer, why)
            self._selector.close()
            for each in self._wakers:
                each.close()

    def _serve(self) -> None:
        last, deadline = time.monotonic(), float("inf")
        while True:
            if (rest := self._served()) > 0:
                if self._pause.poll(1000 * rest):
                    _drain(self._woken)
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
                        self._pumped = time.monotonic()  # the thread that waits reads it
                        continue
                    try:
                        self._read(peer)
                    finally:
                        self._reading.release()
            now = time.monotonic()
            if now - last > SILENCE / 2:  # this process was stopped: the others may be well
                for peer in self._peers.values():
                    peer.heard = now
            last = self._looked = now
            for peer in self._peers.values():
                self._look(peer, now)
            if self._closing:
                if deadline == float("inf"):
                    deadline = now + 1
                    self.send_all(Message("bye"))
                # the others close their ends when they have read all, so that nothing is lost
                if now > deadline or all(peer.gone for peer in self._peers.values()):
                    return

    def _served(self) -> float:
        """For how many seconds this thread may leave reading to another one, which has just waited
        for a message in ``pump`` itself; none where something has to be written or given up."""
        now = time.monotonic()
        busy = (peer.unsent or (peer.doubt[0] and not peer.gone) for peer in self._peers.values())
        if self._closing or any(busy):
            return 0.0
        return min(self._pumped + SHORT, self._looked + BEAT) - now

    def _look(self, peer: Peer, now: float) -> None:
        """Ask for what a connection needs now: to be written, a sign of life, or to be given up."""
        if peer.gone:
            return
        if now - peer.spoke > BEAT:
            self._send(peer, pack(Message("beat")))
        why, since = peer.doubt
        if now - peer.heard > SILENCE:
            why, since = f"has given no sign of life for {SILENCE:.0f} s", 0.0
        if peer.broken or (why and now - since > DOUBT):
            with self._reading:
                self._read(peer)  # what it had said before it was lost counts
                self._give_up(peer, peer.broken or why)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        with suppress(KeyError, ValueError):  # another thread may give it up meanwhile
            if self._selector.get_key(peer.socket).events != wanted:
                self._selector.modify(peer.socket, wanted, peer)

    def _read(self, peer: Peer) -> None:
        """Read what has arrived, and deliver the messages that are complete."""
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
        for other in self._peers.values():  # this one may have left because of them
            doubt, _ = other.doubt
            if doubt and not other.gone and other is not peer and not self._closing:
                other.doubt = "", 0.0
                self._read(other)
                self._give_up(other, doubt)
        if peer.gone:
            return
        peer.gone = why
        self._leave(peer)
        if not self._closing:
            self._lost(peer.rank, why)

    def _leave(self, peer: Peer) -> None:
        with peer.lock:
            peer.unsent.clear()
            with suppress(KeyError, ValueError):
                self._selector.unregister(peer.socket)
            with suppress(KeyError, ValueError):
                self._waiting.unregister(peer.socket)
            peer.close()


def _drain(pipe: socket.socket) -> None:
    with suppress(OSError):
        pipe.recv(4096)


_every = weakref.WeakSet[Links]()


def _forked() -> None:
    for links in list(_every):
        links._drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)

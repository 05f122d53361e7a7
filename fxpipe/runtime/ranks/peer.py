"""One connection to another rank: the messages still to be sent, and the one that arrives."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Iterator

from fxpipe.errors import told
from fxpipe.runtime.ranks.message import Message, unpacking
from fxpipe.runtime.ranks.shared import Shared

_AT_ONCE = 64
"""Pieces of memory to send in one system call."""

_AHEAD = 1 << 14
"""Bytes to read in one system call; they may hold many small messages."""


class Peer:
    """The connection to another rank.

    Attributes:
        rank: the number of that rank.
        socket: the connection.
        lock: held to write.
        unsent: the unsent parts of each message.
        lent: memory of this process that the peer reads; None if none is shared.
        borrowed: memory of the peer that this process reads; None if none is shared.
        spoke: when something was last sent.
        heard: when something last arrived.
        gone: why the connection has ended; empty while it lasts.
        broken: the error of a write; empty if there was none.
        doubt: why another rank has lost this peer, and when that was reported; empty if none has.
        arriving: reads messages, see ``unpacking``.
        space: the memory to be filled next.
        filled: how many of its bytes are filled.
    """

    def __init__(self, rank: int, connection: socket.socket, shared: Shared = (None, None)) -> None:
        self.rank = rank
        self.socket = connection
        self.lock = threading.Lock()
        self.unsent: deque[deque[memoryview]] = deque()
        self.spoke = self.heard = time.monotonic()
        self.gone = self.broken = ""
        self.doubt = "", 0.0
        self.lent, self.borrowed = shared
        self.arriving = unpacking(self.borrowed)
        first = next(self.arriving)
        assert isinstance(first, memoryview)
        self.space, self.filled = first, 0
        self._ahead = memoryview(bytearray(_AHEAD))

    def room(self) -> memoryview:
        """Return memory for what arrives next: a large tensor's, or a buffer to copy from."""
        space = self.space[self.filled :]
        return space if len(space) > _AHEAD else self._ahead

    def read(self, arrived: memoryview) -> Iterator[Message]:
        """Take the bytes that have arrived in ``room``; yields the messages that they complete."""
        copied = arrived.obj is self._ahead.obj
        while True:
            count = min(len(arrived), len(self.space) - self.filled)
            if copied:
                self.space[self.filled : self.filled + count] = arrived[:count]
            self.filled, arrived = self.filled + count, arrived[count:]
            if self.filled < len(self.space):
                return
            while isinstance(item := next(self.arriving), Message):
                yield item
            self.space, self.filled = item, 0

    def push(self) -> bool:
        """Write as much as the socket takes. Returns whether nothing is left."""
        try:
            while self.unsent and not self.gone:
                parts = self.unsent[0]
                count = self.socket.sendmsg([*parts][:_AT_ONCE])
                while parts and count >= len(parts[0]):
                    count -= len(parts.popleft())
                if parts:
                    parts[0] = parts[0][count:]
                else:
                    self.unsent.popleft()
        except BlockingIOError:
            return False
        except OSError as error:
            self.broken = f"cannot be reached any more ({told(error)})"
            self.unsent.clear()
            return False
        return True

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()
        for memory in (self.lent, self.borrowed):
            if memory is not None:
                memory.close()

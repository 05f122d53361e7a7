"""One connection to another rank: what is to be sent to it, and what has arrived of a message."""

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
"""Pieces of memory handed to the system in one call."""

_AHEAD = 1 << 14
"""Bytes that are read in one call, where they may be many small messages."""


class Peer:
    """Another rank.

    Attributes:
        rank: its number.
        socket: the connection.
        lock: held to write.
        unsent: what is left of each message that is not sent completely.
        lent: memory of this process that the other one reads; None where none is shared.
        borrowed: memory of the other process that this one reads; likewise.
        spoke: when something was last sent to it.
        heard: when something last came from it.
        gone: why there is no connection any more; empty while there is one.
        broken: the error of a write; empty while there was none.
        doubt: why another rank has lost it, and when that was told; empty while none has.
        arriving: reads messages, see ``unpacking``.
        space: the memory that is filled next.
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
        """Memory for what arrives next: that of a large tensor, or some that ``read`` copies."""
        space = self.space[self.filled :]
        return space if len(space) > _AHEAD else self._ahead

    def read(self, arrived: memoryview) -> Iterator[Message]:
        """The messages that are complete with this, which is the first part of ``room``."""
        copied = arrived.obj is self._ahead.obj
        while True:
            count = min(len(arrived), len(self.space) - self.filled)
            if copied:
                self.space[self.filled : self.filled + count] = arrived[:count]
            self.filled, arrived = self.filled + count, arrived[count:]
            if self.filled < len(self.space):
                return
            made = next(self.arriving)
            while isinstance(made, Message):
                yield made
                made = next(self.arriving)
            self.space, self.filled = made, 0

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

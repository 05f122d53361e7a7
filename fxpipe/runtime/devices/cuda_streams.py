"""CUDA streams, of which torch has 32 a device and hands them out in turn, again and again.

A stream that computes is nobody else's: what else were given to it would wait for the computations
before it, and would become a part of them where they are captured.
"""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

import torch

TRIES = 32
"""Streams of torch's pool to look at: all of a device, where nobody else asks meanwhile."""


class Streams:
    """The streams of one user. They are its own as long as it has this."""

    def __init__(self) -> None:
        """It has none yet."""
        self._own: list[tuple[torch.cuda.Stream, bool]] = []
        with _lock:
            _all[self] = None

    def take(self, stream: torch.cuda.Stream) -> torch.cuda.Stream:
        """Compute on a stream that somebody has chosen."""
        with _lock:
            self._own.append((stream, True))
        return stream

    def make(self, device: torch.device, *, computes: bool = False) -> torch.cuda.Stream:
        """Make a stream.

        Args:
            device: where.
            computes: whether it is to compute; then nobody else may have it. A stream that
                copies is shared with others that do, if need be.
        """
        with _lock:
            others = [pair for each in _all for pair in each._own]
            computing = [stream for stream, own in others if own]
            taken = [stream for stream, _ in others] if computes else computing
            stream = torch.cuda.Stream(device)
            for _ in range(TRIES):
                if stream not in taken:
                    break
                stream = torch.cuda.Stream(device)
            self._own.append((stream, computes))
        return stream


_all: WeakKeyDictionary[Streams, None] = WeakKeyDictionary()
_lock = threading.Lock()

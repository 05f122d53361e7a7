"""Hosts of a network of their own, joined by a switch that delays frames and loses some.

A host is a network namespace whose only way out is a TAP device; its frames come to this process,
which hands them on to all other hosts. Needs the rights to make both.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_SET, _TAP, _PLAIN = 0x400454CA, 0x0002, 0x1000
"""What Linux calls TUNSETIFF, IFF_TAP and IFF_NO_PI."""

FRAME = 65536


class Switch:
    """Hands frames from each host to all others.

    Args:
        taps: a file descriptor for each host.
        delay: the seconds that a frame takes at least.
        loss: the share of frames that are lost.
        seed: which frames are lost.
    """

    def __init__(self, taps: list[int], delay: float, loss: float, seed: int = 0) -> None:
        self.unplugged: set[int] = set()
        self.lost = 0
        self._taps, self._delay, self._loss = taps, delay, loss
        self._random = random.Random(seed)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        count = 0
        while not self._ended.is_set():
            now = time.monotonic()
            until = waiting[0][0] - now if waiting else 0.1
            for tap in select.select(self._taps, [], [], min(0.1, max(0.0, until)))[0]:
                frame = os.read(tap, FRAME)
                for other in self._taps:
                    if other == tap or self._is_lost(tap, other):
                        continue
                    count += 1
                    heapq.heappush(waiting, (time.monotonic() + self._delay, count, other, frame))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, tap, frame = heapq.heappop(waiting)
                os.write(tap, frame)

    def _is_lost(self, *taps: int) -> bool:
        if any(self._taps.index(tap) in self.unplugged for tap in taps):
            return True
        lost = self._random.random() < self._loss
        self.lost += lost
        return lost


@contextmanager
def hosts(count: int, delay: float, loss: float) -> Iterator[tuple[list[str], Switch]]:
    """Namespaces with the addresses 10.77.31.1 and on, and the switch between them.

    Raises:
        OSError: this process may not make them.
    """
    names = [f"fxpipe-{os.getpid()}-{rank}" for rank in range(count)]
    with ExitStack() as undo:
        taps = []
        for rank, name in enumerate(names):
            device = f"fx{os.getpid() % 10**6}h{rank}"
            tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            undo.callback(os.close, tap)
            fcntl.ioctl(tap, _SET, struct.pack("16sH22x", device.encode(), _TAP | _PLAIN))
            taps.append(tap)
            ip("netns", "add", name)
            undo.callback(ip, "netns", "delete", name)
            ip("link", "set", device, "netns", name)
            ip("-n", name, "link", "set", device, "name", "joined")
            ip("-n", name, "address", "add", f"{address(rank)}/24", "dev", "joined")
            ip("-n", name, "link", "set", "joined", "up")
            ip("-n", name, "link", "set", "lo", "up")
        switch = Switch(taps, delay, loss)
        undo.callback(switch.close)
        yield names, switch


def address(rank: int) -> str:
    """The address of a host."""
    return f"10.77.31.{1 + rank}"


def ip(*words: str) -> None:
    """Run ``ip``. Raises OSError if it fails."""
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")

"""The tree: what the ranks of a pipe tell each other, over connections to a few neighbours.

Each rank is connected with its parent in a tree and with up to ``FAN`` children, by a gloo group of
two for each. What all ranks say in an exchange goes up: each passes on what all below it have said,
as one message, and equal statements only once. The root answers, and the answer goes down to all.
The root also decides whether an exchange was complete before a rank failed; as its decisions reach
every rank in their order, all decide alike. What is for some ranks alone goes where these are.

A thread for each neighbour waits for what it tells. A rank whose process ends or falls silent is
noticed by its neighbours, which tell all ranks that are still connected with them that it is gone.
That is the last that anybody hears. No warm step asks anything of torch.distributed's store: the
root alone looks whether it is still there.
"""

from __future__ import annotations

import atexit
import os
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import told
from fxpipe.extensions.ranks.packing import RefusedError, pack, unpack

FAN = 4
"""The most children of a rank: 1,024 ranks are then at most 5 messages away from the root."""

FRAME = 512
"""The most bytes of a message and its head; a longer message follows its head. What a warm step
exchanges fits."""

BEAT = 1.0
"""Seconds between two signs of life to each neighbour."""

SILENCE = 30.0
"""Seconds without a sign of life after which a rank counts as lost: its process or the network has
stopped. (A process that ends is noticed at once.) Long enough for a process that is only busy, such
as in an extension that computes for seconds while it holds the GIL."""

SLOWEST = 1e6
"""Bytes a second of the slowest network: a large value may take longer than ``SILENCE``."""

FAREWELL = 3.0
"""Seconds that closing waits until the neighbours that are there have read everything."""

PATIENCE = 10.0
"""Seconds that a thread may take to leave gloo once nothing keeps it there."""

OUTCOME = -1
"""The number of the exchange after a failure, wherever in the call each rank was then."""

CLOSED = "has closed its pipe or ended"
"""The reason why a rank is gone, if it said goodbye."""

STORE = -1
"""Stands for the store where it is lost, and with it all ranks."""

ALL = -1
"""Stands for all ranks, as a set of bits."""

Key = tuple[Any, ...]
"""Names an exchange: the number of a call, and what tells it from others in this call."""

Delivers = Callable[[str, int, Key, Any], None]

_EVER = timedelta(days=20)  # the most that fits gloo's milliseconds
_FRAME, _REST, _POISON = range(3)  # gloo's tags
_HEAD = struct.Struct("<QQ")  # bytes of the message, and how many the sender had received


class Neighbour:
    """The connection with a neighbour.

    Attributes:
        rank: the neighbour.
        leads: the ranks on its side, as bits.
        over: whether it is known to be gone.
        late: when it will have been silent for too long.
        unread: whether the neighbour is not known to have all that was told it.
    """

    def __init__(self, rank: int, group: Any, leads: int) -> None:
        """``group`` is a gloo group of this rank and the neighbour."""
        self.rank, self.leads, self.over = rank, leads, False
        self._sent = self._told = self._arrived = self._received = 0
        self._group, self._other = group, 1 - group.rank()
        self._sending = threading.Lock()
        self._kept = deque[Any]()  # what is not known to have arrived
        self.hears()

    @property
    def unread(self) -> bool:
        return not self.over and self._arrived < self._told

    def hears(self, more: float = 0.0) -> None:
        """Note a sign of life; the next one may take ``more`` seconds longer."""
        self.late = time.monotonic() + SILENCE + more

    def send(self, message: bytearray | bytes = b"") -> None:
        """Send a message, by default a sign of life; never waits for the neighbour."""
        size = len(message)
        with self._sending, suppress(RuntimeError):  # whoever receives from it says why
            head = _HEAD.pack(size, self._received)
            if size <= FRAME - _HEAD.size:
                parts = [(_FRAME, bytearray(head + message))]
            else:
                rest = bytearray(message) if isinstance(message, bytes) else message
                parts = [(_FRAME, bytearray(head)), (_REST, rest)]
            for tag, part in parts:
                memory = torch.frombuffer(part, dtype=torch.uint8)
                self._kept.append((self._sent + 1, memory, self._begin("send", memory, tag)))
            self._sent += 1
            self._told = self._sent if size else self._told

    def received(self) -> Iterator[bytearray]:
        """The neighbour's messages. Raises RuntimeError when it is gone."""
        frames = deque(self._room(torch.empty(FRAME, dtype=torch.uint8)) for _ in range(2))
        while True:
            frame, work = frames.popleft()
            work.wait(_EVER)
            head = frame.numpy().tobytes()
            frames.append(self._room(frame))  # one is always posted, so that no sender asks first
            size, self._arrived = _HEAD.unpack_from(head)
            while self._kept and self._kept[0][0] <= self._arrived:
                self._kept.popleft()
            message = bytearray(head[_HEAD.size : _HEAD.size + size])
            if size > FRAME - _HEAD.size:
                message = bytearray(size)
                self.hears(size / SLOWEST)
                rest = torch.frombuffer(message, dtype=torch.uint8)
                self._begin("recv", rest, _REST).wait(_EVER)
            self._received += 1
            self.hears()
            if size > FRAME:
                self.send()  # its memory there is free now
            if size:
                yield message

    def poison(self) -> None:
        """End all that is pending, at both ends."""
        poison(self._group)

    def _room(self, frame: Tensor) -> tuple[Tensor, Any]:
        return frame, self._begin("recv", frame, _FRAME)

    def _begin(self, what: str, memory: Tensor, tag: int) -> Any:
        return getattr(self._group, what)([memory], self._other, tag)


@dataclass
class _Said:
    """What was said in an exchange by the ranks from here down.

    Attributes:
        unsent: statement → the ranks that say it, as bits, as far as it was not passed on.
        ranks: all that have said something.
        since: when the first of them did.
    """

    unsent: dict[bytes, int] = field(default_factory=dict)
    ranks: int = 0
    since: float = field(default_factory=time.monotonic)


class Tree:
    """A rank's place in the tree.

    Attributes:
        gone: whether a rank is gone, so that nothing is told any more.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        groups: Mapping[int, Any],
        store: Any,
        deliver: weakref.WeakMethod[Delivers],
    ) -> None:
        """Start the threads.

        Args:
            rank: the number of this rank.
            size: the number of ranks.
            groups: neighbour → a gloo group of it and this rank, the parent first; they belong to
                the tree.
            store: at which the root looks; None if it has nothing to do with it.
            deliver: called by a thread for what comes here, with its kind, the rank that tells it,
                its key and its value: ``answer`` with what all ranks have said, as bits by
                statement, and whether that is all; ``failed``; ``gone`` with the lost rank, or
                ``STORE``, as its key and the reason; other kinds as they were told. The tree does
                not keep its object.
        """
        self.gone = False
        self._rank, self._deliver, self._store = rank, deliver, store
        self._below, whole = below(rank, size), (1 << size) - 1
        self._edges = [
            Neighbour(other, group, whole ^ self._below if other < rank else below(other, size))
            for other, group in groups.items()
        ]
        self._parent = self._edges[0] if rank else None
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._saying: dict[Key, _Said] = {}
        self._answered = set[Key]()  # by the root, in the last call
        self._failed = set[int]()  # the calls that the root has let fail
        self._closing = threading.Event()
        self._looked = time.monotonic()
        works: list[Callable[[], None]] = [self._beat]
        works += [lambda edge=edge: self._read(edge) for edge in self._edges]  # type: ignore[misc]
        if not rank and store is not None:
            works.append(self._look)  # it may be left waiting for the store
        self._threads = [
            threading.Thread(target=work, name="fxpipe-tree", daemon=True) for work in works
        ]
        for thread in self._threads:
            thread.start()
        if not _open:
            atexit.register(_close_all)  # before workers are joined, of which some wait for ranks
        _open.add(self)

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that has the connections."""
        return os.getpid() != self._process

    def say(self, key: Key, statement: bytes) -> None:
        """Take part in an exchange; the answer is delivered."""
        with self._lock:
            self._gather(key, {statement: 1 << self._rank})

    def tell(self, kind: str, key: Key, value: Any, ranks: Collection[int] | None = None) -> None:
        """Tell something to some ranks, by default to all, in the order of the calls; never waits
        for another rank. Raises InputError if the value cannot be pickled."""
        to = ALL if ranks is None else sum(1 << rank for rank in ranks)
        message = pack((kind, self._rank, to, key, value))
        with self._lock:
            self._handle(message, None)

    def part(self, rank: int, why: str) -> None:
        """Tell that a rank is gone, which is the last that is told."""
        self.tell("gone", (rank,), why)

    def end(self) -> None:
        """Start to close: say goodbye."""
        self._closing.set()

    def close(self) -> None:
        """``end``, and wait until it is done: a thread that is left inside gloo when Python ends
        would abort the process."""
        self.end()
        for thread in self._threads[: 1 + len(self._edges)]:
            if thread is not threading.current_thread():
                thread.join(3 * PATIENCE)

    def _handle(self, message: bytearray, source: Neighbour | None) -> None:
        """Take a message of a neighbour, or of this rank: pass it on, and deliver it here."""
        if self.gone:
            return
        kind, origin, ranks, key, value = unpack(message)
        if kind == "said":
            self._gather(key, value)
        elif kind in ("late", "fails"):
            if self._parent is not None:
                self._parent.send(message)
            elif kind == "late":
                if key not in self._answered:
                    self._answer(key, self._saying.pop(key, _Said()).unsent, whole=False)
            elif key[0] not in self._failed:
                self._failed.add(key[0])
                for each in [e for e in self._saying if e[0] == key[0] and e[1] != OUTCOME]:
                    del self._saying[each]
                self._handle(pack(("failed", origin, ALL, key, value)), None)
        else:
            if kind == "answer":
                self._forget(key[0])
            for edge in self._edges:
                if edge is not source and edge.leads & ranks:
                    edge.send(message)
            if kind == "gone":
                self.gone = True
                self._closing.set()
            if ranks >> self._rank & 1 and (deliver := self._deliver()) is not None:
                deliver(kind, origin, key, value)

    def _gather(self, key: Key, statements: Mapping[bytes, int]) -> None:
        """Add what was said in an exchange; once all from here down have said it, pass it on."""
        if key in self._answered or (key[0] in self._failed and key[1] != OUTCOME):
            return
        said = self._saying.setdefault(key, _Said())
        for statement, ranks in statements.items():
            said.unsent[statement] = said.unsent.get(statement, 0) | ranks
            said.ranks |= ranks
        if said.ranks == self._below:
            del self._saying[key]
            if self._parent is None:
                self._answer(key, said.unsent, whole=True)
            else:
                self._pass_on(key, said)

    def _pass_on(self, key: Key, said: _Said) -> None:
        assert self._parent is not None
        self._parent.send(pack(("said", self._rank, 0, key, said.unsent)))
        said.unsent = {}

    def _answer(self, key: Key, statements: dict[bytes, int], whole: bool) -> None:
        self._answered.add(key)
        self._handle(pack(("answer", self._rank, ALL, key, (statements, whole))), None)

    def _forget(self, call: int) -> None:
        """Drop what belongs to earlier calls: all ranks have begun this one."""
        self._saying = {key: said for key, said in self._saying.items() if key[0] >= call}
        self._answered = {key for key in self._answered if key[0] >= call}
        self._failed = {each for each in self._failed if each >= call}

    def _read(self, edge: Neighbour) -> None:
        """Handle what a neighbour tells, until it is gone."""
        try:
            for message in edge.received():
                try:
                    with self._lock:
                        self._handle(message, edge)
                except RefusedError as error:
                    self.part(edge.rank, f"has sent {error}, {REFUSED}")
                if self.gone:
                    edge.send()  # it may wait for a sign that this was read
        except RuntimeError as error:
            edge.over = True
            self.part(edge.rank, _reason(error))
        except Exception as error:
            self.part(self._rank, f"cannot handle what another rank has told ({told(error)})")

    def _beat(self) -> None:
        """Send signs of life and look for those of others; at the end, say goodbye."""
        before = time.monotonic()
        while not self._closing.wait(BEAT):
            now = time.monotonic()
            awake, before = now < before + BEAT + SILENCE / 2, now  # else signs may be unread here
            with self._lock:
                for key, said in self._saying.items():
                    if self._parent is not None and said.unsent and now > said.since + BEAT:
                        self._pass_on(key, said)  # the root can tell who is late
            for edge in self._edges:
                edge.send()
                if awake and now > edge.late:
                    self.part(edge.rank, SILENT.format(SILENCE))
            if awake and self._store is not None and not self._rank:
                if now > self._looked + SILENCE:
                    self.part(STORE, SILENT.format(SILENCE))
        self.part(self._rank, CLOSED)
        deadline = time.monotonic() + FAREWELL
        while any(edge.unread for edge in self._edges) and time.monotonic() < deadline:
            time.sleep(0.01)
        for edge in self._edges:
            edge.poison()
        for thread in self._threads[1 : 1 + len(self._edges)]:
            thread.join(PATIENCE)
        _open.discard(self)

    def _look(self) -> None:
        """Look whether the store is still there."""
        try:
            while not self._closing.wait(BEAT):
                self._store.check(["-"])
                self._looked = time.monotonic()
        except Exception as error:
            self.part(STORE, f"cannot be reached any more ({told(error)})")


REFUSED = "which no rank sends to agree with others; it was not run"

SILENT = "has given no sign of life for {:.0f} s"

_open = set[Tree]()


def _close_all() -> None:
    """Close all trees that are open, at exit."""
    for tree in list(_open):
        if not tree.forked:
            tree.close()


def below(rank: int, size: int) -> int:
    """A rank of the tree and all below it, as bits."""
    found, first, last = 0, rank, rank
    while first < size:
        found |= ((1 << min(last + 1, size)) - 1) & ~((1 << first) - 1)
        first, last = FAN * first + 1, FAN * last + FAN
    return found


def neighbours(rank: int, size: int) -> list[int]:
    """The parent of a rank in the tree, if it has one, and its children."""
    children = range(FAN * rank + 1, min(FAN * rank + FAN + 1, size))
    return [*([(rank - 1) // FAN] if rank else []), *children]


def poison(group: Any) -> None:
    """End all that is pending in a gloo group, here and at the other ends, for good: a wait that
    times out does so, and nothing else does."""
    with suppress(RuntimeError):
        byte, other = torch.empty(1, dtype=torch.uint8), int(group.rank() == 0)
        group.recv([byte], other, _POISON).wait(timedelta(milliseconds=1))


def _reason(error: RuntimeError) -> str:
    """Why a rank is gone, from what gloo says."""
    if any(each in str(error) for each in ("closed", "reset", "Broken pipe")):
        return "has ended, or its connection was closed"
    return f"cannot be reached any more ({told(error)})"

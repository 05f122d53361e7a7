"""How ranks meet: through a store of torch.distributed, looking at who is missing or has died.

A meeting has a number. Each rank comes to the last one, and says what the others need to know. A
rank that has been there before comes anew, as one of them was lost: that meeting is over, the next
one begins, and whoever waits in the old one goes there. The last rank to come gathers what all have
said. Until all are connected, each shows signs of life, and looks at those of the rank before it.

A thread does all that, as a store that is suspended lets nobody go who waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch.distributed as dist

from fxpipe.errors import RankError, told
from fxpipe.extensions.ranks import tree
from fxpipe.extensions.ranks.packing import pack, unpack
from fxpipe.signals import raise_held

LOST = 3.5
"""Seconds without a sign of life after which a rank counts as lost while ranks meet: nothing else
keeps its process busy."""

PAUSE = 0.25
"""Seconds between two looks at the store; the first ones come sooner."""

LOOK = 0.05
"""Seconds between two looks at what happens while threads wait inside of torch."""

ENDING = 0.4
"""Seconds in which such threads end if they can be stopped."""

T = TypeVar("T")

Store: Any = dist.Store  # type: ignore[attr-defined,unused-ignore]

_LEFT = 1 << 40  # a sign of life after which none is expected


class OverError(Exception):
    """Nobody waits for this any more. (torch takes a RuntimeError for a sign to try again.)"""


class Meeting:
    """One rank in a meeting, until ``leave``.

    Attributes:
        number: the number of the meeting.
        store: a connection of its own to the store.
        broken: why not all can be connected that have come; None as long as they can.
        error: what has ended this rank's part in it; None if nothing has.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: Sequence[int],
        own: Any,
        timeout: float,
        absent: str,
        check: Callable[[Any], None] = lambda store: None,
    ) -> None:
        """Come to the last meeting.

        Args:
            store: where these ranks meet and nobody else writes.
            rank: this rank.
            ranks: the numbers of all in the world, in their order in the pipe.
            own: what the others need to know, see ``packing``.
            timeout: seconds that the others may take to come, each time that a meeting begins.
            absent: the message for the name of one that has not.
            check: called with the store whenever this rank looks at it; it may raise.
        """
        self._given, self._rank, self._ranks, self._timeout = store, rank, ranks, timeout
        self._own, self._absent, self._check = bytes(pack(own)), absent, check
        self.store: Any = None
        self.number = ""
        self.broken: RankError | None = None
        self._all: Sequence[bytes] | None = None
        self.error: Exception | None = None
        self._heard = time.monotonic()
        self._leaving, self._changed, self._failed = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="fxpipe-meeting", daemon=True)
        self._thread.start()

    def all(self, *, patient: bool = False) -> list[Any]:
        """Wait until all ranks have come, and return what each has said. With ``patient``, a rank
        that was lost may be replaced meanwhile. Raises like ``look``."""
        while self._all is None:
            self.look(patient=patient)
            self._changed.wait(LOOK)
            self._changed.clear()
        return [unpack(each) for each in self._all]

    def look(self, *, patient: bool = False) -> None:
        """Raise what a signal handler has raised; RankError if a rank has not come in time, or was
        lost, or the store cannot be reached."""
        raise_held()
        if self.error is not None and not self._leaving.is_set():
            if isinstance(self.error, RuntimeError) and not isinstance(self.error, RankError):
                why = f"cannot be reached any more ({told(self.error)})"
                raise RankError(f"the store of torch.distributed {why}", rank=-1)
            raise self.error
        if self.broken is not None and not patient:
            raise self.broken
        if time.monotonic() > self._heard + tree.SILENCE and not self._leaving.is_set():
            why = tree.SILENT.format(tree.SILENCE)
            raise RankError(f"the store of torch.distributed {why}", rank=-1)

    def explain(self, seconds: float = LOST + 3 * PAUSE) -> None:
        """After an error while ranks connect: raise that one is lost, if we hear of it in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.look()
            time.sleep(LOOK)

    def leave(self, *, failed: bool = False) -> None:
        """Show no more signs of life: this rank is connected, or has failed to be."""
        self._failed = failed
        self._leaving.set()
        self._thread.join(ENDING)

    def patient(self, name: str, look: Callable[[], None] | None = None) -> Patient:
        """A part of the store, of this meeting, for whoever is to wait no longer than it lasts."""

        def over() -> None:
            if self.broken is not None or self.error is not None or self._failed:
                raise OverError(str(self.broken or self.error or "this rank has given up"))

        return Patient(within(self.store, f"{self.number}/{name}"), look or over)

    def _run(self) -> None:
        try:
            self.store = self._given.clone()
            self._come()
            pause = 0.005
            while not self._leaving.wait(pause):
                pause = min(1.5 * pause, PAUSE)
                self._live()
                self._heard = time.monotonic()
            key = self._key("alive", self._rank)
            if self._failed:
                self._tell("lost", self._rank)
            self.store.add(key, _LEFT)
        except Exception as error:
            self.error = error
            self._changed.set()

    def _come(self) -> None:
        """Come to the last meeting, or to the next one if this rank has been there."""
        store = self.store
        while True:
            self._check(store)
            self.number = store.compare_set("number", "", "0").decode()
            if store.add(self._key("came", self._rank), 1) == 1:
                break
            store.compare_set("number", self.number, str(int(self.number) + 1))
            self._tell("next", self._rank)
        self._began = self._signed = self._shown = time.monotonic()
        self._news = self._sign = 0
        self.broken = None
        store.set(self._key("own", self._rank), self._own)
        store.add(self._key("alive", self._rank), 1)
        if store.add(self._key("count"), 1) == len(self._ranks):
            keys = [self._key("own", rank) for rank in self._ranks]
            store.set(self._key("all"), bytes(pack([bytes(x) for x in store.multi_get(keys)])))
            store.add(self._key("news"), 1)

    def _live(self) -> None:
        """Show a sign of life, look for that of the rank before, and hear what is new."""
        store, now = self.store, time.monotonic()
        self._check(store)
        if now > self._shown + 2 * PAUSE and len(self._ranks) > 1:
            before, self._shown = self._ranks[self._ranks.index(self._rank) - 1], now
            store.add(self._key("alive", self._rank), 1)
            sign = store.add(self._key("alive", before), 0)
            if sign != self._sign:
                self._sign, self._signed = sign, now
            elif 0 < sign < _LEFT and now > self._signed + LOST:
                self._tell("lost", before)
        if (news := store.add(self._key("news"), 0)) != self._news:
            self._news = news
            self._hear()
        if self._all is None and now > self._began + self._timeout:
            for place, rank in enumerate(self._ranks):
                if not store.check([self._key("own", rank)]):
                    raise RankError(self._absent.format(f"rank {rank}"), rank=place)

    def _hear(self) -> None:
        store = self.store
        if self._all is None and store.check([self._key("all")]):
            self._all = unpack(store.get(self._key("all")))
        if self._all is None and store.check([self._key("next")]):
            self._come()
            return
        for what, why in (
            ("lost", f"has ended, or given no sign of life for {LOST:.0f} s, while the ranks met"),
            ("next", "has begun to meet the others anew"),
        ):
            if self.broken is None and store.check([self._key(what)]):
                rank = int(store.get(self._key(what)))
                again = "start all ranks again, from the last checkpoint"
                place = self._ranks.index(rank)
                self.broken = RankError(f"rank {rank} {why}; {again}", rank=place)
        self._changed.set()

    def _tell(self, what: str, rank: int) -> None:
        self.store.compare_set(self._key(what), "", str(rank))
        self.store.add(self._key("news"), 1)

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self.number, *parts)))


class Patient(Store):  # type: ignore[misc,unused-ignore]
    """A store that waits by looking: it holds no lock meanwhile, and hears if it is in vain.

    torch's own code uses it when it connects ranks; who gives it to that code keeps it.
    """

    def __init__(self, store: Any, look: Callable[[], None]) -> None:
        """``look`` is called at any wait, and may raise."""
        super().__init__()
        self._store, self._look = store, look

    def wait(self, keys: Any, timeout: Any = None) -> None:
        pause = 0.001
        while not self._store.check(keys):
            self._look()
            time.sleep(pause)
            pause = min(1.5 * pause, LOOK)

    def get(self, key: str) -> Any:
        self.wait([key])
        return self._store.get(key)

    def has_extended_api(self) -> bool:
        return False


for _name in ("set", "add", "compare_set", "check", "delete_key", "clone"):
    setattr(Patient, _name, lambda own, *given, _name=_name: getattr(own._store, _name)(*given))


def within(store: Any, name: str) -> Any:
    """Return the part of a torch.distributed store whose keys begin with a name."""
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined,unused-ignore]


def interruptibly(
    works: Sequence[Callable[[], T]],
    look: Callable[[], None],
    stop: Callable[[], None] = lambda: None,
) -> list[T]:
    """Call functions side by side in other threads and return their results: they may block without
    letting Python handle signals. ``look`` is called repeatedly meanwhile; an error that it raises
    ends the wait, and so does that of a function. ``stop`` is called then, if it can end the
    others: a thread that is left inside torch when Python ends would abort the process.
    """
    futures: list[Future[T]] = [Future() for _ in works]

    def run(future: Future[T], work: Callable[[], T]) -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threads = [
        threading.Thread(target=run, args=each, name="fxpipe-meeting", daemon=True)
        for each in zip(futures, works, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        while (found := wait(futures, LOOK, "FIRST_EXCEPTION")).not_done:
            for future in found.done:
                future.result()
            look()
        return [future.result() for future in futures]
    except BaseException:
        stop()
        deadline = time.monotonic() + ENDING
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        raise

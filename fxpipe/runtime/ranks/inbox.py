"""What the other ranks have told: values that they exchange, failures, and that they are gone; and
where their messages about a run go: to its channels, which this rank may open later than others."""

from __future__ import annotations

import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from fxpipe.errors import RankError, told
from fxpipe.runtime.ranks.message import Message
from fxpipe.signals import raise_held

if TYPE_CHECKING:
    from fxpipe.runtime.ranks.channels import RankChannels

POLL = 0.1
"""Seconds after which a thread that waits for another rank looks at signals."""

TOLD = 0.5
"""Seconds for which a rank waits for the failure from which another one recovers already."""

RECOVERY = "recovery"
"""What ranks exchange after a failure, wherever each of them was then."""

_PLACE = ("device", "instruction", "stage", "microbatch", "source")


class Exchange(NamedTuple):
    """One exchange of values; all ranks count alike.

    Attributes:
        call: the number of the call.
        number: how many exchanges of the call were complete before.
        about: what is exchanged.
    """

    call: int
    number: int
    about: str


class _Failure(NamedTuple):
    """A call that has failed on a rank, when so many of its exchanges were complete there."""

    call: int
    number: int
    error: RankError


class Inbox:
    """Keeps what the other ranks tell, and waits for it.

    An exchange that is complete on one rank will be complete on every rank that lives, as all have
    sent their values by then. So a failure that comes later on one rank ends no exchange that was
    complete there: either all ranks return from an exchange, or none does.

    Attributes:
        changed: held to change anything here.
        news: how often something was told.
        gone: rank → why it is gone.
    """

    def __init__(self, names: Sequence[str], rank: int) -> None:
        """Nothing is told yet. ``rank`` is the number of this one, and messages call them
        ``names``."""
        self.changed = threading.RLock()
        self.news = 0
        self.gone: dict[int, str] = {}
        self._names = names
        self._others = [other for other in range(len(names)) if other != rank]
        self._said: list[deque[tuple[Exchange, Any]]] = [deque() for _ in names]
        self._failures: list[_Failure] = []
        self._over = 0  # calls up to this one are over

    def say(self, rank: int, exchange: Exchange, value: Any) -> None:
        """A rank has said its value of an exchange."""
        with self.changed:
            self._said[rank].append((exchange, value))
            self.news += 1

    def fail(self, rank: int, call: int, index: int, value: Mapping[str, Any]) -> RankError:
        """A call has failed on a rank. Returns the error that it is here."""
        error = self.error_of(rank, value)
        with self.changed:
            if call > self._over:
                self._failures.append(_Failure(call, index, error))
                self.news += 1
        return error

    def error_of(self, rank: int, value: Mapping[str, Any]) -> RankError:
        """The error for what a rank has told of its own, see ``failure_of``."""
        name, place = self._names[rank], {key: value[key] for key in _PLACE if key in value}
        if "rank" in value:  # it has found out what holds for all ranks
            error = RankError(value["error"], rank=value["rank"], **place)
        else:
            error = RankError(f"{name} failed: {value['error']}", rank=rank, **place)
        error.add_note(f"On {name}:\n{value['traceback']}")
        return error

    def lose(self, rank: int, why: str) -> RankError:
        """A rank is gone. Returns the error for it."""
        with self.changed:
            self.gone.setdefault(rank, why)
            self.news += 1
        return self.lost(rank)

    def lost(self, rank: int) -> RankError:
        """The error for a rank that is gone."""
        return RankError(
            f"{self._names[rank]} {self.gone[rank]}; start all ranks again, from the last "
            "checkpoint",
            rank=rank,
        )

    def failure(self, call: int, index: int) -> RankError | None:
        """Why a call cannot go on after so many exchanges, as far as other ranks have told."""
        for failure in self._failures:
            if failure.call == call and failure.number <= index:
                return failure.error
        return None

    def knows(self, error: BaseException) -> bool:
        """Whether an error is the failure of another rank, which has told it to all."""
        return any(failure.error is error for failure in self._failures)

    def forget(self, call: int) -> None:
        """A call is over here: its failures, which come from other ranks, do not matter any more.
        One that is told later neither."""
        with self.changed:
            self._over = call
            self._failures = [failure for failure in self._failures if failure.call > call]

    def values(
        self,
        exchange: Exchange,
        seconds: float,
        pump: Callable[[Callable[[], bool], float], None],
        *,
        held: bool,
    ) -> dict[int, Any]:
        """Wait for the values of all other ranks.

        Args:
            exchange: which exchange.
            pump: waits until something is told, see ``Links.pump``.
            seconds: how long another rank may take to come to it.
            held: whether a signal must not end the wait.

        Raises:
            RankError: the call has failed on a rank before this exchange was complete there, or a
                rank is gone without having said its value, or late, or exchanges something else.
        """
        deadline = time.monotonic() + seconds
        untold = float("inf")  # since when a rank recovers from a failure that was not told here
        found: dict[int, Any] = {}
        while True:
            seen = self.news
            with self.changed:
                for rank in self._others:
                    if rank not in found and self._heard(rank, exchange):
                        found[rank] = self._said[rank].popleft()[1]
                missing = [rank for rank in self._others if rank not in found]
                if not missing:
                    return found
                if self._refuse(exchange, missing, untold < time.monotonic() - TOLD):
                    untold = min(untold, time.monotonic())
            if time.monotonic() > deadline:
                raise RankError(
                    f"{self._names[missing[0]]} has not come to where the other ranks are "
                    f"({exchange.about}) for {seconds:.0f} s, the timeout of init_process_group; "
                    "let every rank make the same calls",
                    rank=missing[0],
                )
            pump(lambda: self.news != seen, POLL)  # noqa: B023
            if not held:
                raise_held()

    def _heard(self, rank: int, exchange: Exchange) -> bool:
        """Whether the rank's next value is the one of this exchange; drops older ones."""
        said, after = self._said[rank], exchange.about == RECOVERY
        while said and said[0][0] != exchange:
            other = said[0][0]
            if other.call > exchange.call or (other.call == exchange.call and not after):
                return False
            said.popleft()
        return bool(said)

    def _refuse(self, exchange: Exchange, missing: Sequence[int], long: bool) -> bool:
        """Raise where the values of the missing ranks cannot come. Returns whether one of them
        recovers from a failure that was not told here yet; ``long`` says that it will not be."""
        recovers = False
        after = exchange.about == RECOVERY
        failure = self.failure(exchange.call, exchange.number)
        if failure is not None and not after:
            raise failure
        for rank in missing:
            if rank in self.gone:  # maybe because of one that was lost before
                raise self.lost(next(iter(self.gone)))
            if not self._said[rank]:
                continue
            other = self._said[rank][0][0]
            # a rank that recovers, or is in a later call, has left this exchange because of a
            # failure. The rank that failed tells all of it, so that it comes soon; but not where
            # that is this rank, which tells of it when it raises here
            recovers |= (early := other.about == RECOVERY and not long)
            if after or (other.call == exchange.call and not early):
                raise RankError(
                    f"{self._names[rank]} is at another place of the call ({other.about}) than "
                    f"this rank ({exchange.about}); let every rank make the same calls with the "
                    "same model and options",
                    rank=rank,
                )
        return recovers


Key = tuple[int, int]
"""The number of the call that has opened a run's channels, and how many it had opened before."""


class Delivery:
    """The channels of the runs of a group of ranks, and messages for those not opened yet."""

    def __init__(self, changed: AbstractContextManager[object]) -> None:
        """No channels are open; ``changed`` is held while a message is delivered."""
        self._changed = changed
        self._key: Key = 0, 0
        self._channels = weakref.WeakValueDictionary[Key, "RankChannels"]()
        self._early: dict[Key, list[tuple[int, Message]]] = {}

    def begin(self, call: int) -> None:
        """A call begins; whatever was not delivered in earlier ones never will be."""
        with self._changed:
            self._key = call, 0
            self._early = {key: found for key, found in self._early.items() if key[0] >= call}

    def open(self, channels: RankChannels) -> Key:
        """Deliver messages to these channels from now on. Returns their key, alike on all ranks."""
        with self._changed:
            self._key = key = self._key[0], self._key[1] + 1
            self._channels[key] = channels
            for rank, message in self._early.pop(key, []):
                channels.deliver(rank, message)
        return key

    def deliver(self, rank: int, message: Message) -> None:
        """Deliver a message to the channels with the key that it begins with, or keep it."""
        call, number = message.key[0]
        with self._changed:
            channels = self._channels.get((call, number))
            if channels is not None:
                channels.deliver(rank, message)
            elif (call, number) > self._key:  # else of a run that is over here
                self._early.setdefault((call, number), []).append((rank, message))

    def stop(self, error: RankError) -> None:
        """Stop what runs because of an error."""
        with self._changed:
            running = list(self._channels.values())
        for channels in running:
            channels.fail(error)


def failure_of(error: BaseException) -> dict[str, Any]:
    """What a rank tells the others of its error."""
    text = "".join(traceback.format_exception(error))
    value: dict[str, Any] = {"error": told(error), "traceback": text}
    value |= {name: getattr(error, name) for name in _PLACE if hasattr(error, name)}
    if isinstance(error, RankError):
        value |= {"error": str(error), "rank": error.rank}
    return value


def difference(names: Sequence[str], first: int, rank: int, texts: Sequence[str]) -> str:
    """The first line that differs between two ranks."""
    pairs = zip_longest(texts[first].split("\n"), texts[rank].split("\n"))
    number, pair = next((i, pair) for i, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    mine, theirs = ("missing" if line is None else repr(line.strip()) for line in pair)
    return f"line {number} is {mine} on {names[first]} and {theirs} on {names[rank]}"

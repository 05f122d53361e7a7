"""What the other ranks have sent: the inbox keeps their values, their failures and which ranks are
gone; the delivery passes the messages of a run to its channels, which may be opened later here."""

from __future__ import annotations

import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from fxpipe.errors import RankError, told
from fxpipe.runtime.ranks.message import Message
from fxpipe.signals import raise_held

if TYPE_CHECKING:
    from fxpipe.runtime.ranks.channels import RankChannels

POLL = 0.1
"""Seconds between two checks for signals while a thread waits for another rank."""

TOLD = 0.5
"""Seconds to wait for the news of a failure from which another rank fails already."""

OUTCOME = "outcome"
"""The name of the exchange after a failure, wherever in the call each rank was then."""

_PLACE = ("device", "instruction", "stage", "microbatch", "source")


class Exchange(NamedTuple):
    """One exchange of values, numbered in the same way on all ranks.

    Attributes:
        call: the number of the call.
        number: how many exchanges of the call were complete before.
        about: what is exchanged.
    """

    call: int
    number: int
    about: str


class _Failure(NamedTuple):
    """A failed call of another rank, which had completed ``number`` exchanges of it."""

    call: int
    number: int
    error: RankError


class Inbox:
    """Keeps the values and failures that other ranks send, and waits for them.

    A rank completes an exchange only when all ranks have sent their values. Then every living rank
    can complete it, even if one fails later: either all ranks return from an exchange, or none.

    Attributes:
        changed: the lock to hold for any change here; those that wait for it hear of each.
        gone: rank → why it is gone.
    """

    def __init__(self, names: Sequence[str], rank: int) -> None:
        """Make the empty inbox of a rank. ``names`` are what messages call the ranks."""
        self.changed = threading.Condition(threading.RLock())
        self.gone: dict[int, str] = {}
        self._names = names
        self._others = [other for other in range(len(names)) if other != rank]
        self._said: list[deque[tuple[Exchange, Any]]] = [deque() for _ in names]
        self._failures: list[_Failure] = []
        self._over = 0  # calls up to this one are over

    def say(self, rank: int, exchange: Exchange, value: Any) -> None:
        """Keep the value that a rank has sent for an exchange."""
        with self.changed:
            self._said[rank].append((exchange, value))
            self.changed.notify_all()

    def fail(self, rank: int, call: int, index: int, value: Mapping[str, Any]) -> RankError:
        """Note that a rank failed in a call after ``index`` exchanges. Returns the error for it."""
        error = self.error_of(rank, value)
        with self.changed:
            if call > self._over:
                self._failures.append(_Failure(call, index, error))
                self.changed.notify_all()
        return error

    def error_of(self, rank: int, value: Mapping[str, Any]) -> RankError:
        """Return the error to raise here for an error that a rank has sent with ``failure_of``."""
        name, place = self._names[rank], {key: value[key] for key in _PLACE if key in value}
        if "rank" in value:  # a RankError there: its message holds on every rank
            error = RankError(value["error"], rank=value["rank"], **place)
        else:
            error = RankError(f"{name} failed: {value['error']}", rank=rank, **place)
        error.add_note(f"On {name}:\n{value['traceback']}")
        return error

    def lose(self, rank: int, why: str) -> RankError:
        """Note that a rank is gone. Returns the error for it."""
        with self.changed:
            self.gone.setdefault(rank, why)
            self.changed.notify_all()
        return self.lost(rank)

    def lost(self, rank: int) -> RankError:
        """Return the error for a rank that is gone."""
        return RankError(
            f"{self._names[rank]} {self.gone[rank]}; start all ranks again, from the last "
            "checkpoint",
            rank=rank,
        )

    def failure(self, call: int, index: int) -> RankError | None:
        """Return another rank's error that ends a call after ``index`` exchanges, if any."""
        for failure in self._failures:
            if failure.call == call and failure.number <= index:
                return failure.error
        return None

    def knows(self, error: BaseException) -> bool:
        """Whether an error is another rank's failure, which that rank has sent to all."""
        return any(failure.error is error for failure in self._failures)

    def forget(self, call: int) -> None:
        """Drop the failures of a call that is over here, also those that arrive later."""
        with self.changed:
            self._over = call
            self._failures = [failure for failure in self._failures if failure.call > call]

    def values(self, exchange: Exchange, seconds: float, *, held: bool) -> dict[int, Any]:
        """Wait for the values of all other ranks.

        Args:
            exchange: the exchange to complete.
            seconds: how long another rank may take to reach it.
            held: whether signals are held during the wait.

        Raises:
            RankError: the call has failed on a rank before this exchange was complete there, or a
                rank is gone without having sent its value, or late, or exchanges something else.
        """
        deadline = time.monotonic() + seconds
        untold = float("inf")  # since when a rank fails from a failure unknown here
        values: dict[int, Any] = {}
        while True:
            with self.changed:
                for rank in self._others:
                    if rank not in values and self._heard(rank, exchange):
                        values[rank] = self._said[rank].popleft()[1]
                missing = [rank for rank in self._others if rank not in values]
                if not missing:
                    return values
                if self._refuse(exchange, missing, untold < time.monotonic() - TOLD):
                    untold = min(untold, time.monotonic())
                self.changed.wait(POLL)
            if time.monotonic() > deadline:
                raise RankError(
                    f"{self._names[missing[0]]} has not reached the point where this rank waits "
                    f"({exchange.about}) in {seconds:.0f} s, the timeout of init_process_group; "
                    "let every rank make the same calls",
                    rank=missing[0],
                )
            if not held:
                raise_held()

    def _heard(self, rank: int, exchange: Exchange) -> bool:
        """Whether the rank's next value belongs to this exchange; drops values of earlier ones."""
        said, failed = self._said[rank], exchange.about == OUTCOME
        while said and said[0][0] != exchange:
            theirs = said[0][0]
            if theirs.call > exchange.call or (theirs.call == exchange.call and not failed):
                return False
            said.popleft()
        return bool(said)

    def _refuse(self, exchange: Exchange, missing: Sequence[int], waited: bool) -> bool:
        """Raise if the values of the missing ranks cannot come.

        Returns whether one of these ranks fails from a failure whose news has not arrived here.
        ``waited``: whether this rank has waited for that news long enough.
        """
        fails = False
        failed = exchange.about == OUTCOME
        failure = self.failure(exchange.call, exchange.number)
        if failure is not None and not failed:
            raise failure
        for rank in missing:
            if rank in self.gone:  # maybe because of the rank that was lost first
                raise self.lost(next(iter(self.gone)))
            if not self._said[rank]:
                continue
            theirs = self._said[rank][0][0]
            # A rank that fails, or is in a later call, has left this exchange because of a
            # failure. The news of it comes soon from the rank that failed; unless that is this
            # rank, which sends it when it raises here.
            fails |= (early := theirs.about == OUTCOME and not waited)
            if failed or (theirs.call == exchange.call and not early):
                raise RankError(
                    f"{self._names[rank]} is at another place of the call ({theirs.about}) than "
                    f"this rank ({exchange.about}); let every rank make the same calls with the "
                    "same model and options",
                    rank=rank,
                )
        return fails


Key = tuple[int, int]
"""Identifies a run's channels: the number of the call that opens them, and the number of channels
opened in that call, these included."""


class Delivery:
    """Passes messages to the channels of their run; keeps those whose channels are not open yet."""

    def __init__(self, changed: AbstractContextManager[object]) -> None:
        """Start without channels. The lock ``changed`` is held while a message is delivered."""
        self._changed = changed
        self._key: Key = 0, 0
        self._channels = weakref.WeakValueDictionary[Key, "RankChannels"]()
        self._early: dict[Key, list[tuple[int, Message]]] = {}

    def begin(self, call: int) -> None:
        """Begin a call: drop the undelivered messages of earlier calls."""
        with self._changed:
            self._key = call, 0
            self._early = {key: kept for key, kept in self._early.items() if key[0] >= call}

    def open(self, channels: RankChannels) -> Key:
        """Deliver messages to these channels from now on. Returns their key, alike on all ranks."""
        with self._changed:
            self._key = key = self._key[0], self._key[1] + 1
            self._channels[key] = channels
            for rank, message in self._early.pop(key, []):
                channels.deliver(rank, message)
        return key

    def deliver(self, rank: int, message: Message) -> None:
        """Deliver a message to its channels, whose key it begins with, or keep it for them."""
        call, number = message.key[0]
        with self._changed:
            channels = self._channels.get((call, number))
            if channels is not None:
                channels.deliver(rank, message)
            elif (call, number) > self._key:  # else its run is over here
                self._early.setdefault((call, number), []).append((rank, message))

    def stop(self, error: RankError) -> None:
        """Stop all runs because of an error."""
        with self._changed:
            running = list(self._channels.values())
        for channels in running:
            channels.fail(error)


def failure_of(error: BaseException) -> dict[str, Any]:
    """Return what a rank sends the others about its error."""
    text = "".join(traceback.format_exception(error))
    value: dict[str, Any] = {"error": told(error), "traceback": text}
    value |= {name: getattr(error, name) for name in _PLACE if hasattr(error, name)}
    if isinstance(error, RankError):
        value |= {"error": str(error), "rank": error.rank}
    return value


def difference(names: Sequence[str], first: int, rank: int, texts: Sequence[str]) -> str:
    """Say which line of two ranks' texts is the first that differs."""
    pairs = zip_longest(texts[first].split("\n"), texts[rank].split("\n"))
    number, pair = next((i, pair) for i, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    mine, theirs = ("missing" if line is None else repr(line.strip()) for line in pair)
    return f"line {number} is {mine} on {names[first]} and {theirs} on {names[rank]}"

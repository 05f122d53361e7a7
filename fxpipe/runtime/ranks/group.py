"""The ranks of a pipe as a group: they make the same calls in the same order, and agree on them.

A pipe in one process is a group of one rank: it agrees with itself, and waits for nobody.
"""

from __future__ import annotations

import hashlib
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from fxpipe.errors import ExecutionError, InputError, RankError, told
from fxpipe.runtime.ranks.links import Links
from fxpipe.runtime.ranks.message import Message
from fxpipe.signals import raise_held

if TYPE_CHECKING:
    from fxpipe.runtime.ranks.channels import RankChannels
    from fxpipe.runtime.ranks.meeting import Met

POLL = 0.1
"""Seconds after which a thread that waits for another rank looks at signals."""

_PLACE = ("device", "instruction", "stage", "microbatch", "source")


class _Said(NamedTuple):
    """What another rank has said: in which call, about what, and what."""

    call: int
    about: str
    value: Any


class RankGroup:
    """The ranks of a pipe.

    Attributes:
        rank: the number of this one.
        size: how many there are.
        names: rank → what messages call it.
        places: rank → its number and host, for a table; empty for a group of one.
        threads: intra-op threads of this one's device; 0 for a group of one.
        call: how many calls were begun; all ranks count alike, so that the number tells which of
            their calls belong together.
    """

    def __init__(self, met: Met | None = None) -> None:
        """Connect the ranks that have met; without them, this process is the only rank."""
        self.rank = 0 if met is None else met.rank
        self.names = ("this process",) if met is None else met.names
        self.places = () if met is None else met.places
        self.size = len(self.names)
        self.call = 0
        self.threads = 0 if met is None else met.threads
        self._timeout = 0.0 if met is None else met.timeout
        self._what = ""  # the call that runs; empty between calls
        self._told = False  # whether this rank has told that the call failed
        self._roll_back: Callable[[], None] = lambda: None
        self._opened = 0  # channels of this call
        self._changed = threading.RLock()
        self._news = 0  # how often something was delivered that ``exchange`` may wait for
        self._said: list[deque[_Said]] = [deque() for _ in self.names]
        self._failed: dict[int, RankError] = {}
        self._gone: dict[int, str] = {}
        self._channels = weakref.WeakValueDictionary[tuple[int, int], "RankChannels"]()
        self._early: dict[tuple[int, int], list[tuple[int, Message]]] = {}
        self.links = (
            Links({} if met is None else met.sockets, self._deliver, self._lost) if met else None
        )

    @property
    def others(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in range(self.size) if rank != self.rank]

    # calls

    @contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """A call that every rank makes. An error inside is raised on all ranks.

        Calls inside of this one belong to it.

        Args:
            what: its name, ``step``.

        Raises:
            RankError: another rank failed in this call, or makes another one.
        """
        if self.size == 1 or self._what:
            yield
            return
        self.check()
        with self._changed:
            self.call += 1
            self._opened, self._what, self._told = 0, what, False
            self._failed = {call: e for call, e in self._failed.items() if call >= self.call}
            for run in [run for run in self._early if run[0] < self.call]:
                del self._early[run]
        try:
            self.exchange("call", what)
            yield
        except BaseException as error:
            self.announce(error)
            self._roll_back()
            if self.call == 1:  # there will be no pipe
                self.close()
            raise
        finally:
            self._what = ""

    def when_failed(self, roll_back: Callable[[], None]) -> None:
        """Call a function at the end of each call that failed, on every rank."""
        self._roll_back = roll_back

    @property
    def called(self) -> bool:
        """Whether a call runs."""
        return bool(self._what)

    def check(self) -> None:
        """Raises RankError where a rank is gone, so that nothing can run any more."""
        for rank, why in sorted(self._gone.items()):
            raise self._gone_error(rank, why)

    def exchange(
        self, about: str, value: Any = None, *, held: bool = False, failed: bool = False
    ) -> list[Any]:
        """Tell all ranks a value, and wait for theirs.

        Args:
            about: what it is; all ranks must exchange the same things in the same order.
            value: tensors, numbers, strings, None, and lists, tuples and dicts of them.
            held: whether a signal must not end the wait.
            failed: whether this comes after the failure of the call.

        Returns:
            Rank → its value.

        Raises:
            RankError: a rank failed, is gone or late, or exchanges something else.
        """
        if self.size == 1:
            return [value]
        assert self.links is not None
        self.links.send_all(Message("said", (self.call, about), value))
        deadline = time.monotonic() + self._timeout
        return [
            value if rank == self.rank else self._hear(rank, about, deadline, held, failed)
            for rank in range(self.size)
        ]

    def share(self, about: str, make: Callable[[], Any]) -> Any:
        """What rank 0 makes, on all ranks; the others wait for it."""
        return self.exchange(about, make() if self.rank == 0 else None)[0]

    def recovered(self, version: int) -> int:
        """After a failure, the newest version that all ranks can roll back to.

        Args:
            version: the newest that this one can roll back to.
        """
        if not self._what:
            return version  # the pipe will be closed
        try:
            found: int = min(self.exchange("recovery", version, held=True, failed=True))
            return found
        except RankError:
            return version  # a rank is gone, and nothing can go on

    def agree(self, about: str, text: str) -> None:
        """Check that all ranks have the same text.

        Raises:
            RankError: they have not; it shows the first line that differs.
        """
        if self.size == 1:
            return
        digests = self.exchange(about, hashlib.sha256(text.encode()).hexdigest())
        if len(set(digests)) == 1:
            return
        texts = self.exchange(f"{about} in full", text)
        rank = next(rank for rank, other in enumerate(texts) if other != texts[0])
        raise RankError(
            f"{about} differs between ranks: {_difference(self.names, rank, texts)}; give all "
            "ranks the same model, options and inputs",
            rank=rank,
        )

    # what the others do

    def open(self, channels: RankChannels) -> tuple[int, int]:
        """Deliver values to these channels from now on. Returns their key, alike on all ranks."""
        with self._changed:
            self._opened += 1
            key = self.call, self._opened
            early = self._early.pop(key, [])
            self._channels[key] = channels
            for rank, message in early:
                channels.deliver(rank, message)
        return key

    @property
    def failure(self) -> RankError | None:
        """Why this call cannot go on, as far as the other ranks have told."""
        if self.call in self._failed:
            return self._failed[self.call]
        for rank, why in sorted(self._gone.items()):
            return self._gone_error(rank, why)
        return None

    def close(self) -> None:
        """Say goodbye."""
        if self.links is not None:
            self.links.send_all(Message("bye"))
            self.links.close()

    def _hear(self, rank: int, about: str, deadline: float, held: bool, failed: bool) -> Any:
        assert self.links is not None
        while True:
            seen = self._news
            with self._changed:
                said = self._said[rank]
                while said and (
                    said[0].call < self.call
                    or (failed and said[0].call == self.call and said[0].about != about)
                ):
                    said.popleft()
                if said and said[0].call == self.call and said[0].about == about:
                    if about != "call" or said[0].value == self._what:
                        return said.popleft().value
                if not failed and self.call in self._failed:
                    raise self._failed[self.call]
                if rank in self._gone:  # one that is gone may have said all that this needs
                    raise self._gone_error(rank, self._gone[rank])
                if said:
                    raise self._astray(rank, about, said[0])
            if time.monotonic() > deadline:
                raise RankError(
                    f"{self.names[rank]} has not come to this {self._what} for "
                    f"{self._timeout:.0f} s, the timeout of init_process_group; let every rank "
                    "make the same calls",
                    rank=rank,
                )
            self.links.pump(lambda: self._news != seen, POLL)  # noqa: B023
            if not held:
                raise_held()

    def _astray(self, rank: int, about: str, said: _Said) -> RankError:
        if "call" in (about, said.about):
            theirs = f"calls {said.value}" if said.about == "call" else f"is at its {said.about}"
            mine = f"calls {self._what}" if about == "call" else f"is at its {about}"
        else:
            theirs, mine = f"is at its {said.about}", f"is at its {about}"
        return RankError(
            f"{self.names[rank]} {theirs} while {self.names[self.rank]} {mine}; let every rank "
            "make the same calls with the same model and options",
            rank=rank,
        )

    def _gone_error(self, rank: int, why: str) -> RankError:
        return RankError(
            f"{self.names[rank]} {why}; start all ranks again, from the last checkpoint", rank=rank
        )

    def announce(self, error: BaseException) -> None:
        """Tell all other ranks that this call has failed here, unless they know."""
        if not self._what or self._told or error is self._failed.get(self.call):
            return
        self._told = True
        assert self.links is not None
        place = {name: getattr(error, name, None) for name in _PLACE}
        text = "".join(traceback.format_exception(error))
        value = {"error": told(error), "place": place, "traceback": text}
        if not isinstance(error, ExecutionError):
            value["place"] = {}
        self.links.send_all(Message("failed", (self.call,), value))

    def _deliver(self, rank: int, message: Message) -> None:
        """Called by the thread of the links."""
        match message.kind:
            case "said":
                with self._changed:
                    call, about = message.key
                    self._said[rank].append(_Said(call, about, message.value))
                    self._news += 1
            case "failed":
                self._note(message.key[0], self._remote(rank, message.value))
            case "bye":
                self._lost(rank, "has closed its pipe or ended")
            case _:
                run = message.key[0]
                with self._changed:
                    channels = self._channels.get(run)
                    if channels is None:
                        if run[0] >= self.call:
                            self._early.setdefault(run, []).append((rank, message))
                        return
                    channels.deliver(rank, message)

    def _remote(self, rank: int, value: dict[str, Any]) -> RankError:
        place = {key: each for key, each in value["place"].items() if key in _PLACE}
        error = RankError(f"{self.names[rank]} failed: {value['error']}", rank=rank, **place)
        error.add_note(f"On {self.names[rank]}:\n{value['traceback']}")
        return error

    def _note(self, call: int, error: RankError) -> None:
        with self._changed:
            if call < self.call:
                return
            self._failed.setdefault(call, error)
            self._news += 1
            running = list(self._channels.values()) if call == self.call else []
        for channels in running:
            channels.fail(error)

    def _lost(self, rank: int, why: str) -> None:
        with self._changed:
            self._gone.setdefault(rank, why)
            self._news += 1
            running = list(self._channels.values())
        for channels in running:
            channels.fail(self._gone_error(rank, why))


def _difference(names: Sequence[str], rank: int, texts: Sequence[str]) -> str:
    """The first line that differs between rank 0 and another rank."""
    mine, theirs = texts[0].splitlines(), texts[rank].splitlines()
    for number, (line, other) in enumerate(zip(mine, theirs, strict=False), 1):
        if line != other:
            shown = f"{line.strip()!r} on {names[0]} and {other.strip()!r} on {names[rank]}"
            return f"line {number} is {shown}"
    return f"{len(mine)} lines on {names[0]} and {len(theirs)} on {names[rank]}"


def refuse_on_ranks(group: RankGroup, what: str, cure: str) -> None:
    """Raises InputError where a pipe runs over several ranks, which cannot do something."""
    if group.size > 1:
        raise InputError(f"{what} is not possible over several ranks; {cure}")

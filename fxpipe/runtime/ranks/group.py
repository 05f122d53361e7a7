"""The ranks of a pipe as a group: they make the same calls in the same order, and agree on them.

A pipe in one process is a group of one rank: it agrees with itself, and waits for nobody.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fxpipe.errors import InputError, RankError
from fxpipe.runtime.ranks.handshake import Membership
from fxpipe.runtime.ranks.inbox import (
    RECOVERY,
    Delivery,
    Exchange,
    Inbox,
    difference,
    failure_of,
)
from fxpipe.runtime.ranks.links import CLOSED, Links
from fxpipe.runtime.ranks.message import Message
from fxpipe.signals import signals_at_operations

ALONE = Membership()
"""A process that is the only rank."""


class RankGroup:
    """The ranks of a pipe.

    Attributes:
        rank: the number of this one.
        size: how many there are.
        replicas: how many replicas of the pipeline there are. All ranks of the first one come
            before those of the second.
        replica: the number of the one that this rank belongs to.
        device: which of its devices this rank is.
        met: what they know of each other.
        call: how many calls were begun; all ranks count alike, so that the number tells which of
            their calls belong together.
        kept: how many runs have changed the model since the last checkpoint that was loaded; all
            ranks count alike, unless one failed when the others had begun to keep the results.
        summed: how many bytes of gradients this rank has sent to be summed over the replicas, and
            of their sums.
        closed: whether ``close`` was called.
        inbox: what the other ranks have told.
        delivery: the channels of runs, to which their messages go.
    """

    def __init__(self, members: Membership = ALONE) -> None:
        """Connect the ranks that have met; by default this process is the only one."""
        self.members = members
        self.rank, self.size, self.replicas = members.rank, len(members.names), members.replicas
        self._devices = self.size // self.replicas
        self.replica, self.device = divmod(self.rank, self._devices)
        self.call = self.kept = 0
        self.summed = 0
        self.closed = False
        self.inbox = Inbox(members.names, members.rank)
        self.delivery = Delivery(self.inbox.changed)
        self._given_up = ""  # why no rank can make a call any more
        self._what = ""  # the call that runs; empty between calls
        self._exchanges = 0  # of this call that are complete
        self._settled = False  # whether the call is done on all ranks, and only returns
        self._told = False  # whether this rank has told that the call failed
        self._recovered = False  # whether it has told, in this call, what it can roll back to
        self._roll_back: Callable[[], str] = lambda: ""
        self.links = _links(self) if self.size > 1 else None

    @property
    def others(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def pipeline(self) -> range:
        """Device → its rank in this rank's replica."""
        first = self.replica * self._devices
        return range(first, first + self._devices)

    @property
    def twins(self) -> range:
        """Replica → its rank with the same device as this one."""
        return range(self.device, self.size, self._devices)

    def replica_of(self, rank: int) -> int:
        """The replica that a rank belongs to."""
        return rank // self._devices

    # calls

    @contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """A call that every rank makes. An error inside is raised on all ranks.

        Calls inside of this one belong to it. Signals are held where they would end it half done.

        Args:
            what: its name, ``step``.

        Raises:
            InputError: the pipe is closed, or this is a forked process.
            RankError: another rank failed in this call, or makes another one.
        """
        if self.size == 1:
            yield
            return
        if self._what:
            try:
                yield
            finally:
                self._settled = False  # the outer call goes on
            return
        self._check_open()
        with signals_at_operations():
            self.call, self._exchanges = self.call + 1, 0
            self._what, self._told, self._settled, self._recovered = what, False, False, False
            self.delivery.begin(self.call)
            try:
                self.check()  # others may wait in this call, and are told
                self._begin(what)
                yield
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                self._what = ""
                self.inbox.forget(self.call)

    def when_failed(self, roll_back: Callable[[], str]) -> None:
        """Call a function at the end of each call that failed, on every rank. The error gets what
        it returns as a note."""
        self._roll_back = roll_back

    @property
    def called(self) -> bool:
        """Whether all ranks are in the same call, so that a failure can be rolled back."""
        return self.size == 1 or bool(self._what)

    def give_up(self, why: str) -> None:
        """Let all later calls fail, on every rank; ``why`` is told after this one's name."""
        self._given_up = why

    def check(self) -> None:
        """Check that calls can be made.

        Raises:
            InputError: the pipe is closed, or this is a forked process.
            RankError: a rank is gone.
        """
        self._check_open()
        for rank in [*self.inbox.gone]:  # the first that was lost
            raise self.inbox.lost(rank)

    def _check_open(self) -> None:
        if self.links is not None and self.links.forked:
            raise InputError(
                "this process was forked from the one that compiled the pipe, and the other ranks "
                "know that one alone; use the pipe there"
            )
        if self.closed:
            raise InputError("the pipe is closed; compile the model again")

    def exchange(self, about: str, value: Any = None, *, held: bool = False) -> list[Any]:
        """Tell all ranks a value, and wait for theirs.

        Args:
            about: what it is; all ranks must exchange the same things in the same order.
            value: tensors, numbers, strings, None, and lists, tuples and dicts of them.
            held: whether a signal must not end the wait.

        Returns:
            Rank → its value.

        Raises:
            RankError: a rank failed, is gone or late, or exchanges something else.
        """
        if self.size == 1:
            return [value]
        assert self.links is not None
        index = -1 if about == RECOVERY else self._exchanges  # ranks fail at different places
        exchange = Exchange(self.call, index, about)
        self._settled = False
        self.links.send_all(Message("said", tuple(exchange), value))
        found = self.inbox.values(exchange, self.members.timeout, self.links.pump, held=held)
        self._exchanges += 1
        return [value if rank == self.rank else found[rank] for rank in range(self.size)]

    def share(self, about: str, make: Callable[[], Any]) -> Any:
        """What rank 0 makes, on all ranks; the others wait for it."""
        return self.exchange(about, make() if self.rank == 0 else None)[0]

    def settle(self, value: Any) -> list[Any]:
        """``exchange`` at the end of a call's work: when it returns, all ranks have done theirs. It
        cannot be interrupted, as other ranks may have returned. What this rank raises from then on
        is no failure of the call. Returns the values of the other ranks of its replica."""
        found = self.exchange("end", value, held=True)
        self._settled = True
        return [found[rank] for rank in self.pipeline if rank != self.rank]

    def recovered(self, version: int, value: Any = None) -> tuple[int, list[Any]]:
        """After a failure, the newest version that all ranks can roll back to.

        Args:
            version: the newest that this one can roll back to.
            value: what to tell the ranks with the same device in the other replicas.

        Returns:
            The version, and what these ranks have told, in the order of replicas.
        """
        if not self._what:
            return version, [value]  # the pipe will be closed
        self._recovered = True
        try:
            known = self.exchange(RECOVERY, (version, value), held=True)
        except RankError:
            if not self.inbox.gone:
                self.close()  # the ranks may have gone back to different versions
            return version, [value]
        twins = [known[rank][1] for rank in self.twins if known[rank] is not None]
        return min(each[0] for each in known if each is not None), twins

    def agree(
        self, about: str, text: str, *, own: str = "", twins: str = "", value: Any = None
    ) -> list[Any]:
        """Check that all ranks have the same text.

        Args:
            about: what the texts describe.
            text: has to be the same on all ranks.
            own: has to be the same on the ranks of a replica.
            twins: has to be the same on the ranks with the same device in all replicas.
            value: what to tell the other ranks, whatever it is.

        Returns:
            Rank → its value.

        Raises:
            RankError: they have not; it shows the first line that differs.
        """
        if self.size == 1:
            return [value]
        texts = [text, own, twins]
        digests = [hashlib.sha256(each.encode()).hexdigest() for each in texts]
        told = self.exchange(about, [*digests, value])
        names = self.members.names
        for rank in range(self.size):
            device = rank % self._devices
            for kind, first in enumerate((0, rank - device, device)):
                if told[rank][kind] == told[first][kind]:
                    continue
                found = self.exchange(f"{about} in full", texts[kind])
                raise RankError(
                    f"{about} differs between ranks: {difference(names, first, rank, found)}; "
                    "give all ranks the same model, options, settings and inputs",
                    rank=rank,
                )
        return [each[-1] for each in told]

    def announce(self, error: BaseException) -> None:
        """Tell all other ranks that this call has failed here, unless they know."""
        if not self._what or self._told or self._settled or self.inbox.knows(error):
            return
        self._told = True
        assert self.links is not None
        self.links.send_all(Message("failed", (self.call, self._exchanges), failure_of(error)))

    # what the others do

    @property
    def failure(self) -> RankError | None:
        """Why this call cannot go on, as far as the other ranks have told."""
        failure = self.inbox.failure(self.call, self._exchanges)
        gone = [*self.inbox.gone]
        return self.inbox.lost(gone[0]) if failure is None and gone else failure

    def close(self) -> None:
        """Say goodbye; what still runs here ends."""
        if self.links is None or self.links.forked:
            return
        self.closed = True
        self.delivery.stop(RankError("the pipe was closed", rank=self.rank))
        self.links.close()

    def _begin(self, what: str) -> None:
        """Check that all ranks make the same call, with the results of the same calls before."""
        calls = self.exchange("the begin of a call", [what, self.kept, self._given_up])
        names = self.members.names
        for rank, (other, kept, given_up) in enumerate(calls):
            if given_up:
                raise RankError(f"{names[rank]} {given_up}", rank=rank)
            if other != calls[0][0]:
                raise RankError(
                    f"{names[rank]} calls {other} while {names[0]} calls {calls[0][0]}; "
                    "let every rank make the same calls in the same order",
                    rank=rank,
                )
            if kept != calls[0][1]:
                raise RankError(
                    f"{names[rank]} has kept the results of {kept} runs and {names[0]} "
                    f"those of {calls[0][1]}: one failed when the others kept theirs, so that the "
                    "stages belong to different batches; go back to a checkpoint on every rank",
                    rank=rank,
                )

    def _fail(self, error: BaseException) -> None:
        """A call ends with an error."""
        if not self._settled:
            self.announce(error)
            if note := self._roll_back():
                error.add_note(note)
            if not self._recovered and self.links is not None:  # others may wait for it
                self.links.send_all(Message("said", (self.call, -1, RECOVERY)))
        if self.call == 1:  # there will be no pipe
            self.close()

    def _deliver(self, rank: int, message: Message) -> None:
        """Take a message; called by the thread of the links. It may raise for a damaged one."""
        if message.kind == "said":
            call, index, about = message.key
            self.inbox.say(rank, Exchange(call, index, about), message.value)
        elif message.kind == "failed":
            call, index = message.key
            error = self.inbox.fail(rank, call, index, message.value)
            if call == self.call:
                self.delivery.stop(error)
        elif message.kind == "gone":
            (other,) = message.key
            if other != self.rank and self.links is not None:
                self.links.doubt(other, str(message.value))
        else:
            self.delivery.deliver(rank, message)

    def _lost(self, rank: int, why: str) -> None:
        """Called by the thread of the links."""
        if why != CLOSED and self.links is not None:  # the others may not have noticed
            self.links.send_all(Message("gone", (rank,), why))
        self.delivery.stop(self.inbox.lose(rank, why))


def _links(group: RankGroup) -> Links:
    """The connections of a group. They end when nothing refers to the group any more."""
    reference = weakref.ref(group)

    def deliver(rank: int, message: Message) -> None:
        if (here := reference()) is not None:
            here._deliver(rank, message)

    def lost(rank: int, why: str) -> None:
        if (here := reference()) is not None:
            here._lost(rank, why)

    members = group.members
    here = members.hosts.count(members.hosts[members.rank])
    spins = here <= (os.cpu_count() or 1)  # else another rank may need the core
    links = Links(members.sockets, deliver, lost, members.shared, spins=spins)
    weakref.finalize(group, links.end).atexit = False
    if not _groups:
        atexit.register(_close_all)
    _groups.add(group)
    return links


_groups = weakref.WeakSet[RankGroup]()


def _close_all() -> None:
    """Before the workers are waited for: one that waits for another rank has to be woken."""
    for group in list(_groups):
        group.close()


def refuse_on_ranks(group: RankGroup, what: str, cure: str) -> None:
    """Raises InputError where a pipe runs over several ranks, which cannot do something."""
    if group.size > 1:
        raise InputError(f"{what} is not possible over several ranks; {cure}")

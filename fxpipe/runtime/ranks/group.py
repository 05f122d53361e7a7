"""The ranks of a pipe as a group: they make the same calls in the same order, and agree on each.

A pipe in one process is a group of one rank, which never waits.
"""

from __future__ import annotations

import atexit
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from fxpipe.errors import InputError, RankError
from fxpipe.runtime.ranks.inbox import (
    OUTCOME,
    Delivery,
    Exchange,
    Inbox,
    difference,
    failure_of,
)
from fxpipe.runtime.ranks.links import CLOSED, Links, close_all
from fxpipe.runtime.ranks.message import Message
from fxpipe.signals import held_once


class Membership(NamedTuple):
    """What a rank knows about the ranks of its pipe; by default there is only this process.

    Attributes:
        rank: this rank's number in the pipe. The first replica's ranks come first, and within a
            replica they are in the order of its devices.
        names: rank → what messages call it, ``rank 1 (host, process 4711)``.
        places: device → what tables call its ranks, ``rank 1, host``, or with two replicas
            ``ranks 1 and 3, host``.
        hosts: rank → the name of its host.
        groups: other rank → a gloo process group of that rank and this one, the lower one first;
            none once there are links, which own them.
        threads: intra-op threads of this rank's device: its share of the host's threads, or
            OMP_NUM_THREADS. 0 for the only rank of a pipe.
        timeout: seconds that a rank may be late.
        store: a store of torch.distributed that belongs to this pipe.
        devices: rank → the index of its CUDA device on its host; None in a mesh of CPUs.
        replicas: the number of replicas of the pipeline.
    """

    rank: int = 0
    names: tuple[str, ...] = ("this process",)
    places: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    groups: Mapping[int, Any] = MappingProxyType({})
    threads: int = 0
    timeout: float = 0.0
    store: Any = None
    devices: tuple[int | None, ...] = ()
    replicas: int = 1


ALONE = Membership()
"""The membership of a process that is the only rank."""


class RankGroup:
    """The ranks of a pipe, as one of them sees them.

    Attributes:
        members: names, places and process groups of the ranks.
        rank: the number of this rank.
        size: the number of ranks.
        replicas: the number of replicas of the pipeline. All ranks of a replica come before those
            of the next.
        replica: the replica that this rank belongs to.
        device: the device of the replica that this rank runs.
        call: how many calls have begun. The count is the same on all ranks, so it identifies a
            call.
        kept: how many runs have changed the model since the last checkpoint was loaded. The count
            is the same on all ranks, unless one failed while the others committed a run.
        failures: how many calls have failed; alike on all ranks, whatever each had done before.
        epoch: how often the process groups of devices were given up after a failure: those of this
            number are used, once a call has begun on all ranks.
        summed: the bytes that this rank has sent to sum gradients over the replicas.
        closed: whether ``close`` was called.
        inbox: the values and failures that other ranks have sent.
        delivery: passes the messages of runs to their channels.
    """

    def __init__(self, members: Membership = ALONE) -> None:
        """Start the links to the other ranks; by default there are none."""
        self.members = members
        self.rank, self.size, self.replicas = members.rank, len(members.names), members.replicas
        self._devices = self.size // self.replicas
        self.replica, self.device = divmod(self.rank, self._devices)
        self.call = self.kept = self.failures = 0
        self.summed = self.epoch = 0
        self.closed = False
        self.inbox = Inbox(members.names, members.rank)
        self.delivery = Delivery(self.inbox.changed)
        self._what = ""  # the name of the running call; empty between calls
        self._exchanges = 0  # completed exchanges of this call
        self._settled = False  # whether all ranks have done the call's work, and only return
        self._told = False  # whether this rank has announced that the call failed
        self._outcome_told = False  # whether it has sent, in this call, how far it has come
        self._failed: Callable[[], str] = lambda: ""
        self.links = _links(self) if self.size > 1 else None
        self.members = members._replace(groups=MappingProxyType({}))  # the links end them

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
        """Run the block as a call that every rank makes: an error inside is raised on all ranks.

        Calls inside the block count as part of it. Signals are held where they would end the call
        half done.

        Args:
            what: the name of the call, such as ``step``.

        Raises:
            InputError: the pipe is closed, or this process was forked.
            RankError: another rank failed in this call, or makes a different call.
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
        with held_once():
            self.call, self._exchanges = self.call + 1, 0
            self._what, self._told, self._settled, self._outcome_told = what, False, False, False
            self.delivery.begin(self.call)
            try:
                self.check()  # inside the try: the others may wait in this call for the failure
                self._begin(what)
                yield
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                self._what = ""
                self.inbox.forget(self.call)

    def when_failed(self, failed: Callable[[], str]) -> None:
        """Call a function on every rank after a failed call, and add its text to the error."""
        self._failed = failed

    @property
    def called(self) -> bool:
        """Whether all ranks are in the same call, so that all of them hear of a failure."""
        return self.size == 1 or bool(self._what)

    def check(self) -> None:
        """Check that calls can be made.

        Raises:
            InputError: the pipe is closed, or this process was forked.
            RankError: a rank is gone.
        """
        self._check_open()
        for rank in [*self.inbox.gone]:  # raise for the rank that was lost first
            raise self.inbox.lost(rank)

    def _check_open(self) -> None:
        if self.links is not None and self.links.forked:
            raise InputError(
                "this process was forked from the one that compiled the pipe, and the other ranks "
                "are connected only to that one; use the pipe there"
            )
        if self.closed:
            raise InputError("the pipe is closed; compile the model again")

    def exchange(self, about: str, value: Any = None, *, held: bool = False) -> list[Any]:
        """Send a value to all ranks, and wait for theirs.

        Args:
            about: what the value is; all ranks must exchange the same things in the same order.
            value: tensors, numbers, strings, None, and lists, tuples and dicts of them.
            held: whether signals are held during the wait.

        Returns:
            Rank → its value.

        Raises:
            RankError: a rank failed, is gone or late, or exchanges something else.
        """
        if self.size == 1:
            return [value]
        assert self.links is not None
        index = -1 if about == OUTCOME else self._exchanges  # ranks fail at different places
        exchange = Exchange(self.call, index, about)
        self._settled = False
        self.links.send_all(Message("said", tuple(exchange), value))
        values = self.inbox.values(exchange, self.members.timeout, held=held)
        self._exchanges += 1
        return [value if rank == self.rank else values[rank] for rank in range(self.size)]

    def share(self, about: str, make: Callable[[], Any]) -> Any:
        """Call ``make`` on rank 0, and return its result on all ranks."""
        return self.exchange(about, make() if self.rank == 0 else None)[0]

    def settle(self, value: Any) -> list[Any]:
        """``exchange`` at the end of a call: when it returns, all ranks have done their work.

        It cannot be interrupted, as other ranks may have returned already. An error that this rank
        raises afterwards is no failure of the call. Returns the values of the other ranks of this
        replica.
        """
        values = self.exchange("end", value, held=True)
        self._settled = True
        return [values[rank] for rank in self.pipeline if rank != self.rank]

    def outcomes(self, value: Any) -> list[Any]:
        """After a failure, tell the other ranks how far this one has come.

        Returns:
            What the ranks have told, this one included. Those that failed elsewhere tell nothing.
        """
        if not self._what or self._settled:
            return [value]  # the others have ended the call
        self._outcome_told = True
        try:
            answers = self.exchange(OUTCOME, value, held=True)
        except RankError:
            if not self.inbox.gone:
                self.close()  # it is not known how far the others have come
            return [value]
        return [answer for answer in answers if answer is not None]

    def agree(
        self, about: str, text: str, *, own: str = "", twins: str = "", value: Any = None
    ) -> list[Any]:
        """Check that all ranks have the same texts.

        Args:
            about: what the texts describe.
            text: must be the same on all ranks.
            own: must be the same on all ranks of a replica.
            twins: must be the same on the ranks with the same device in all replicas.
            value: any value to send to the other ranks along with the texts.

        Returns:
            Rank → its value.

        Raises:
            RankError: a text differs; the message shows the first line that differs.
        """
        if self.size == 1:
            return [value]
        texts = [text, own, twins]
        digests = [hashlib.sha256(each.encode()).hexdigest() for each in texts]
        answers = self.exchange(about, [*digests, value])
        names = self.members.names
        for rank in range(self.size):
            device = rank % self._devices
            for kind, first in enumerate((0, rank - device, device)):
                if answers[rank][kind] == answers[first][kind]:
                    continue
                full = self.exchange(f"{about} in full", texts[kind])
                raise RankError(
                    f"{about} differs between ranks: {difference(names, first, rank, full)}; "
                    "give all ranks the same model, options, settings and inputs",
                    rank=rank,
                )
        return [answer[-1] for answer in answers]

    def announce(self, error: BaseException) -> None:
        """Tell all other ranks that this call has failed here, unless they know already."""
        if not self._what or self._told or self._settled or self.inbox.knows(error):
            return
        self._told = True
        assert self.links is not None
        self.links.send_all(Message("failed", (self.call, self._exchanges), failure_of(error)))

    # messages from the other ranks

    @property
    def failure(self) -> RankError | None:
        """The reason why this call cannot go on, if another rank has failed or is gone."""
        failure = self.inbox.failure(self.call, self._exchanges)
        gone = [*self.inbox.gone]
        return self.inbox.lost(gone[0]) if failure is None and gone else failure

    def close(self) -> None:
        """Stop what still runs here, say goodbye to the other ranks, and end the links."""
        if self.links is None or self.links.forked:
            return
        self.closed = True
        self.delivery.stop(RankError("the pipe was closed", rank=self.rank))
        self.links.close()

    def _begin(self, what: str) -> None:
        """Check that all ranks make the same call, and have kept the results of as many runs."""
        calls = self.exchange("the beginning of a call", [what, self.kept, self.epoch])
        names = self.members.names
        self.epoch = max(epoch for _, _, epoch in calls)
        for rank, (call, kept, _) in enumerate(calls):
            if call != calls[0][0]:
                raise RankError(
                    f"{names[rank]} calls {call} while {names[0]} calls {calls[0][0]}; "
                    "let every rank make the same calls in the same order",
                    rank=rank,
                )
            if kept != calls[0][1]:
                raise RankError(
                    f"{names[rank]} has kept the results of {kept} runs and {names[0]} "
                    f"those of {calls[0][1]}: a rank failed after others had kept the results of "
                    "the same run, so their stages do not match; load a checkpoint on every rank",
                    rank=rank,
                )

    def _fail(self, error: BaseException) -> None:
        """Announce that the call has failed with an error, and clean up."""
        if not self._settled:
            self.announce(error)
            self.failures += 1
            if note := self._failed():
                error.add_note(note)
            if not self._outcome_told and self.links is not None:  # others may wait for it
                self.links.send_all(Message("said", (self.call, -1, OUTCOME)))
        if self.call == 1:  # the first call is compile: there will be no pipe
            self.close()

    def _deliver(self, rank: int, message: Message) -> None:
        """Handle a message; called by a thread that reads. May raise for a damaged message."""
        if message.kind == "said":
            call, index, about = message.key
            self.inbox.say(rank, Exchange(call, index, about), message.value)
        elif message.kind == "failed":
            call, index = message.key
            error = self.inbox.fail(rank, call, index, message.value)
            if call == self.call:
                self.delivery.stop(error)
        elif message.kind == "gone":
            (lost,) = message.key
            if lost != self.rank and self.links is not None:
                self.links.doubt(lost, str(message.value))
        else:
            self.delivery.deliver(rank, message)

    def _lost(self, rank: int, why: str) -> None:
        if why != CLOSED and self.links is not None:  # the others may not have noticed
            self.links.send_all(Message("gone", (rank,), why))
        self.delivery.stop(self.inbox.lose(rank, why))


def _links(group: RankGroup) -> Links:
    """Start the links of a group. They end when the group is garbage-collected."""
    reference = weakref.ref(group)

    def deliver(rank: int, message: Message) -> None:
        if (alive := reference()) is not None:
            alive._deliver(rank, message)

    def lost(rank: int, why: str) -> None:
        if (alive := reference()) is not None:
            alive._lost(rank, why)

    links = Links(group.rank, group.members.groups, deliver, lost)
    weakref.finalize(group, links.end).atexit = False
    if not _groups:
        atexit.register(_close_all)
    _groups.add(group)
    return links


_groups = weakref.WeakSet[RankGroup]()


def _close_all() -> None:
    """Close all groups at exit, before workers are joined: wakes those that wait for a rank."""
    for group in list(_groups):
        group.close()
    close_all()  # those of groups that are no more


def refuse_on_ranks(group: RankGroup, what: str, cure: str) -> None:
    """Raise InputError if a pipe runs over several ranks, for a feature that needs one process."""
    if group.size > 1:
        raise InputError(f"{what} is not possible over several ranks; {cure}")

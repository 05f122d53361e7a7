"""A process group for each direction in which a program sends tensors, and one for replicas.

NCCL ignores tags, and runs the operations of a communicator in the order of the calls. So each
direction has a group of its own, used on both sides in the order of the program's lists. gloo keeps
both directions apart by itself, but while a thread sends, its own thread cannot read what comes,
and spins: many small tensors take half as long in two groups. Groups have two members, as gloo ends
a pending receive only together with all that is pending in its group.

A communicator takes a stream of torch's pool. If it got one that we compute on, computations behind
a pending receive would wait for it, and its sender perhaps for them. So communicators use streams
of high priority, which torch keeps apart from those that we use.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.errors import RankError, told
from fxpipe.extensions.ranks.group import RankGroup
from fxpipe.extensions.ranks.meeting import OverError, Patient, interruptibly, within
from fxpipe.extensions.ranks.program import OwnProgram
from fxpipe.extensions.ranks.transport import Direction, MakeTransport, Pending, Transport
from fxpipe.extensions.ranks.tree import poison
from fxpipe.parts import Parts
from fxpipe.signals import raise_held

ABORTING = 30.0
"""Seconds that aborting the process groups may take."""

EXPLAINED = 2.0
"""Seconds to wait, after a failed connection, for the other rank's own error, which says more."""

AHEAD = 4 << 20
"""Bytes of receives that are posted ahead where gloo transfers. To post one, a thread writes to the
connection that gloo's thread reads from; while a value comes, each waits for the other. Small
values take half the time if their receives are posted before the first of them is sent, and a step
of a U-Net whose micro-batches send 2 MiB each takes 7 % less than with 1 MiB posted ahead."""

BLOCKS = 8
"""Multiprocessors that a communicator may occupy, of an H100's 132. A receive that is posted early
holds them until its value has come; the communicator's other receives are queued behind it."""

Members = tuple[int, ...]
"""The ranks of a group: the twins, or the sending rank and the receiving one."""


class GroupTransport:
    """One end of a process group that has two members, the first of which sends."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def send(self, value: Tensor) -> Pending:
        work: Pending = self.group.send([_bytes(value)], 1, 0)
        return work

    def receive(self, room: Tensor) -> Pending:
        work: Pending = self.group.recv([_bytes(room)], 0, 0)
        return work

    def abort(self) -> None:
        if isinstance(self.group, dist.ProcessGroupGloo):
            poison(self.group)
        else:
            self.group.abort()


class PairGroups:
    """The transports of one rank, for as long as no transfer has failed: process groups, unless an
    extension makes others for the pairs.

    A transfer that only one side has started cannot be taken back. So a failure ends all groups,
    and the ranks agree, when their next call begins, on the number of the groups that follow.

    Attributes:
        device: where this rank's tensors are.
        number: how often this pipe's groups were made anew.
        ahead: bytes of the receives from a device that are posted beyond the program's window.
    """

    def __init__(
        self, group: RankGroup, device: torch.device, transport: MakeTransport | None = None
    ) -> None:
        """Start without any."""
        self.device = device
        self._transport = transport
        self.number = group.epoch
        self._ranks = group
        self._on_cpu = device.type == "cpu"
        # whether all groups are gloo's, which can wait for a Python store
        self._patient = self._on_cpu and not group.own_backend and transport is None
        self.ahead = AHEAD if self._on_cpu else 0
        self._groups: dict[Members, Transport] = {}
        self._aborting = threading.Lock()  # taken once, by the first abort
        self._aborted = threading.Event()

    def connect(self, program: OwnProgram | None = None) -> None:
        """Make the groups that a program needs, or every program, and that do not exist yet.

        All ranks call this for the same program. Groups of gloo are made side by side, others in
        one common order, so that ranks cannot wait for each other in a cycle.

        Raises:
            RankError: another rank has failed meanwhile, or cannot be reached.
        """
        needed = [self._pair(*link) for link in program.links] if program else []
        if program and self._ranks.replicas > 1:
            needed.append(tuple(self._ranks.twins))
        needed += self._ranks.columns.values()
        new = [members for members in needed if members not in self._groups]
        parts = [[members] for members in new] if self._patient else [new]
        try:
            works = [partial(lambda part: [*map(self._open, part)], part) for part in parts]
            made = interruptibly(works, self._look, self.abort)
            self._groups |= dict(zip(new, chain(*made), strict=True))
            for dim, members in self._ranks.columns.items():
                group = cast(GroupTransport, self._groups[members]).group
                bind = Parts.bind.find(f"a mesh with the dimension {dim!r}")
                bind(dim, group, members.index(self._ranks.rank), len(members))
        except BaseException:
            self.abort()
            raise

    @property
    def twins(self) -> Any:
        """The group of the ranks with the same device in all replicas."""
        return cast(GroupTransport, self._groups[tuple(self._ranks.twins)]).group

    def send(self, target: int, value: Tensor) -> Pending:
        """Send a dense tensor, see ``Transport``."""
        return self._groups[self._pair(self._ranks.device, target)].send(value)

    def receive(self, source: int, room: Tensor) -> Pending:
        """Receive into a dense tensor, in the order of the calls."""
        return self._groups[self._pair(source, self._ranks.device)].receive(room)

    def abort(self) -> None:
        """End all pending transfers, here and at the other ends, for good; later calls of the pipe
        use other groups. NCCL's take time, so that another thread ends them."""
        if not self._aborting.acquire(blocking=False):
            return
        self._ranks.epoch = max(self._ranks.epoch, self.number + 1)
        if self._on_cpu:
            self._abort()
        else:
            threading.Thread(target=self._abort, name="fxpipe-abort", daemon=True).start()

    def drained(self) -> None:
        """Wait for the end of the abort, if one was started: then no stream waits for another rank.
        Raises RankError if it takes too long."""
        if self._aborting.locked() and not self._aborted.wait(ABORTING):
            raise RankError(
                f"the transfers between devices did not end in {ABORTING:.0f} s after a failure, "
                "so that this rank's device may wait for ever; end this process",
                rank=self._ranks.rank,
            )

    def make(self, store: Any, member: int, size: int = 2) -> Any:
        """Make a process group, in which this process has the number ``member``."""
        timeout = timedelta(seconds=self._ranks.timeout)
        if self._ranks.own_backend:
            plugin = dist.Backend._plugins[self._ranks.own_backend]
            if not plugin.extended_api:
                return plugin.creator_fn(store, member, size, timeout)
            c10d: Any = dist.distributed_c10d
            options = c10d._DistributedBackendOptions()
            options.store, options.timeout = store, timeout
            options.group_rank, options.group_size = member, size
            return plugin.creator_fn(options, None)
        if self._on_cpu:
            with in_the_background():
                return dist.ProcessGroupGloo(store, member, size, timeout)
        nccl: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined,unused-ignore]
        name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
        before = os.environ.get(name)
        os.environ[name] = "0"  # else torch ends this process when another rank has died
        try:
            options = nccl.Options(is_high_priority_stream=True)
            options._timeout = timeout
            options.config.max_ctas = BLOCKS
            return nccl(store, member, size, options)
        finally:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before

    def _pair(self, source: int, target: int) -> Members:
        return self._ranks.pipeline[source], self._ranks.pipeline[target]

    def _collective(self, members: Members) -> bool:
        """Whether all of these ranks exchange something, else one sends to the other."""
        return members in (tuple(self._ranks.twins), *self._ranks.columns.values())

    def _open(self, members: Members) -> Transport:
        """Make the transport of a pair, or the group of the twins."""
        own = members.index(self._ranks.rank)
        # the current device is set for each thread
        with torch.accelerator.device_index(self.device.index):
            try:
                name = f"{self.number}/{'>'.join(map(str, members))}"
                store = within(self._ranks.store, name)
                patient = Patient(store, partial(self._wait, time.monotonic()))
                if self._patient:
                    return self._standard(patient, members, own)
                # others wait in the store itself, where nothing ends it: only once all are here
                store.set(f"here {own}", "")
                patient.wait([f"here {each}" for each in range(len(members))])
                standard = partial(self._standard, store, members, own)
                if self._transport is None or self._collective(members):
                    return standard()
                source, target = map(self._ranks.pipeline.index, members)
                timeout = timedelta(seconds=self._ranks.timeout)
                return self._transport(
                    Direction(source, target, not own, self.device, store, timeout, standard)
                )
            except BaseException as error:
                self._aborted.wait(EXPLAINED)  # until ``_look`` hears of another rank's error
                others = [rank for rank in members if rank != self._ranks.rank]
                names = " and ".join(self._ranks.names[rank] for rank in others)
                raise RankError(
                    f"the devices of this rank and of {names} cannot be connected ({told(error)})",
                    rank=others[0],
                ) from error

    def _standard(self, store: Any, members: Members, own: int) -> GroupTransport:
        """Make a process group. On accelerators, let it move a byte: the set-up, for which a rank
        waits for the others, must not be left to the first transfer."""
        group = self.make(store, own, len(members))
        if not self._on_cpu:
            byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
            if self._collective(members):
                work = group.allreduce([byte])
            else:
                work = group.recv([byte], 0, 0) if own else group.send([byte], 1, 0)
            work.wait()
            byte.item()
        return GroupTransport(group)

    def _wait(self, since: float) -> None:
        if self._aborting.locked() or time.monotonic() > since + self._ranks.timeout:
            raise OverError("they have not come")

    def _look(self) -> None:
        raise_held()
        if self._ranks.failure is not None:
            raise self._ranks.failure

    def _abort(self) -> None:
        groups = [each.group for each in self._groups.values() if hasattr(each, "group")]
        with ExitStack() as each:
            each.callback(self._aborted.set)
            # several communicators that end one by one may wait for each other for ever
            if groups and hasattr(groups[0], "_group_start"):
                groups[0]._group_start()
                each.callback(groups[0]._group_end)
            for transport in self._groups.values():
                each.callback(transport.abort)


@contextmanager
def in_the_background() -> Iterator[None]:
    """Threads that are started inside do not interrupt one that computes, where Linux is told so.
    Otherwise gloo's thread stops the one that is sending, and tries to get its connection until it
    has used up its own time: 5 % of a U-Net's step where all cores compute."""
    ordinary = hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER
    if ordinary:
        _schedule(os.SCHED_BATCH)
    try:
        yield
    finally:
        if ordinary:
            _schedule(os.SCHED_OTHER)


def _schedule(policy: int) -> None:
    with suppress(OSError):  # a container may forbid it
        os.sched_setscheduler(0, policy, os.sched_param(0))


def _bytes(dense: Tensor) -> Tensor:
    """Return the memory of a dense tensor as bytes, whatever its dtype and order of dimensions."""
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)

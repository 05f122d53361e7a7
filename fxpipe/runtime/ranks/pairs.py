"""A process group for each directed pair of ranks whose devices exchange tensors, and for replicas.

NCCL ignores tags, and runs the operations of a communicator in the order of the calls. So each
direction has a communicator of its own, used on both sides in the order of the program's lists.

A communicator takes a stream of torch's pool. If it got one that we compute on, computations behind
a pending receive would wait for it, and its sender perhaps for them. So communicators use streams
of high priority, which torch keeps apart from those that we use.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.errors import RankError, told
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.runtime.ranks.group import RankGroup
from fxpipe.runtime.ranks.rendezvous import interruptibly, within
from fxpipe.signals import raise_held

ABORTING = 30.0
"""Seconds that aborting the process groups may take."""

BLOCKS = 8
"""Multiprocessors that a communicator may occupy, of an H100's 132. A receive that is posted early
holds them until its value has come; the communicator's other receives are queued behind it."""

Pair = tuple[int, int]
"""The sending and the receiving device of a replica."""


def pairs_of(program: Program, device: int) -> Sequence[Pair]:
    """Return the directed pairs of a device in a program, in an order that all ranks share."""
    pairs: set[Pair] = set()
    for x in program.lists[device]:
        if isinstance(x, ins.Sending) and x.buffer.kind != "norm":
            pairs.add((device, program.destination(x)))
        elif isinstance(x, ins.Receiving) and x.buffer.kind != "norm":
            pairs.add((program.origin(x), device))
    return sorted(pairs)


class PairGroups:
    """The process groups of one rank. Those of pairs have two members: 0 sends and 1 receives.

    Attributes:
        device: where this rank's tensors are.
        twins: the group of the ranks with the same device in all replicas, once it is made.
    """

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        """Start without process groups. This rank's tensors are on ``device``."""
        self.device = device
        self.twins: Any = None
        self._ranks = group
        self._groups: dict[Pair, Any] = {}
        self._aborted: threading.Event | None = None

    def connect(self, program: Program) -> None:
        """Make the groups that a program needs and that do not exist yet.

        All ranks call this for the same program, and make their groups in one common order, so that
        they cannot wait for each other in a cycle.

        Raises:
            RankError: another rank has failed meanwhile, or cannot be reached.
        """
        pairs = pairs_of(program, self._ranks.device)
        new = [pair for pair in pairs if pair not in self._groups]
        joined = self._ranks.replicas == 1 or self.twins is not None
        if not new and joined:
            return
        try:
            self._groups |= interruptibly(lambda: dict(map(self._open, new)), self._look)
            if not joined:
                self.twins = interruptibly(self._open_twins, self._look)
        except BaseException:
            self.give_up()
            raise

    def send(self, target: int, value: Tensor) -> Any:
        """Send a dense tensor, which must not change until the returned work is done."""
        return self._groups[self._ranks.device, target].send([_bytes(value)], 1, 0)

    def receive(self, source: int, room: Tensor) -> Any:
        """Receive into a dense tensor, in the order of the calls. Returns the work."""
        return self._groups[source, self._ranks.device].recv([_bytes(room)], 0, 0)

    def give_up(self) -> None:
        """``close``, and make every later call of the pipe fail on all ranks: a transfer that only
        one side has started cannot be taken back."""
        if self._aborted is None:
            self._ranks.give_up(
                "has given up its transfers between devices after a failure: those that were "
                "pending cannot be taken back; start all ranks again, from the last checkpoint"
            )
            self.close()

    def close(self) -> None:
        """Abort all pending transfers, in another thread."""
        if self._aborted is None:
            self._aborted = threading.Event()
            threading.Thread(target=self._abort, name="fxpipe-abort", daemon=True).start()

    def drained(self) -> None:
        """Wait for the end of the abort, if one was started: then no stream waits for another rank.
        Raises RankError if it takes too long."""
        if self._aborted is not None and not self._aborted.wait(ABORTING):
            raise RankError(
                f"the transfers between devices did not end in {ABORTING:.0f} s after a failure, "
                "so that this rank's device may wait for ever; end this process",
                rank=self._ranks.rank,
            )

    def make(self, store: Any, member: int, size: int = 2) -> Any:
        """Make a process group, in which this process has the number ``member``."""
        nccl: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined,unused-ignore]
        name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
        before = os.environ.get(name)
        os.environ[name] = "0"  # else torch ends this process when another rank has died
        try:
            options = nccl.Options(is_high_priority_stream=True)
            options._timeout = timedelta(seconds=self._ranks.members.timeout)
            options.config.max_ctas = BLOCKS
            return nccl(store, member, size, options)
        finally:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before

    def abort(self, group: Any) -> None:
        """End the pending transfers of a process group."""
        group.abort()

    def _open(self, pair: Pair) -> tuple[Pair, Any]:
        """Make the group of a pair, and send a byte over it: the set-up, for which a rank waits for
        the other, must not be left to the first transfer."""
        member, ranks = pair.index(self._ranks.device), self._ranks.pipeline

        def first(group: Any, byte: Tensor) -> Any:
            return group.recv([byte], 0, 0) if member else group.send([byte], 1, 0)

        name = f"{ranks[pair[0]]}>{ranks[pair[1]]}"
        return pair, self._opened(name, member, [ranks[device] for device in pair], first)

    def _open_twins(self) -> Any:
        """Make the group of the same device in all replicas, and add up a byte."""
        name, here = f"twins {self._ranks.device}", self._ranks.replica
        return self._opened(name, here, self._ranks.twins, lambda g, byte: g.allreduce([byte]))

    def _opened(
        self, name: str, member: int, ranks: Sequence[int], first: Callable[[Any, Tensor], Any]
    ) -> Any:
        """Make a group of some ranks with a first operation, which this rank waits for."""
        store = within(self._ranks.members.store, name)
        # the current device is set for each thread
        with torch.accelerator.device_index(self.device.index):
            try:
                group = self.make(store, member, len(ranks))
                byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
                first(group, byte).wait()
                byte.item()
            except BaseException as error:
                others = [rank for rank in ranks if rank != self._ranks.rank]
                names = " and ".join(self._ranks.members.names[rank] for rank in others)
                raise RankError(
                    f"the devices of this rank and of {names} cannot be connected ({told(error)})",
                    rank=others[0],
                ) from error
        return group

    def _look(self) -> None:
        raise_held()
        if self._ranks.failure is not None:
            raise self._ranks.failure

    def _abort(self) -> None:
        assert self._aborted is not None
        try:
            twins = [] if self.twins is None else [self.twins]
            for group in [*self._groups.values(), *twins]:
                self.abort(group)
        finally:
            self._aborted.set()


def _bytes(dense: Tensor) -> Tensor:
    """Return the memory of a dense tensor as bytes, whatever its dtype and order of dimensions."""
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)

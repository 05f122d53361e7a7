"""A process group for each directed pair of ranks whose devices exchange tensors.

NCCL ignores tags, and does what a communicator is given in that order. So each direction has one of
its own, whose order on both sides is that of the program's lists.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import nullcontext
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
"""Seconds that giving the process groups up may take."""

Pair = tuple[int, int]
"""The rank that sends, and the one that receives."""


def pairs_of(program: Program, device: int) -> Sequence[Pair]:
    """The directed pairs of a device in a program, in an order that all ranks share."""
    found: set[Pair] = set()
    for x in program.lists[device]:
        if isinstance(x, ins.Sending) and x.buffer.kind != "norm":
            found.add((device, program.destination(x)))
        elif isinstance(x, ins.Receiving) and x.buffer.kind != "norm":
            found.add((program.origin(x), device))
    return sorted(found)


class PairGroups:
    """The process groups of one rank. Each has two members: 0 sends and 1 receives."""

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        """There are none yet; this rank's tensors are on ``device``."""
        self.device = device
        self._ranks = group
        self._groups: dict[Pair, Any] = {}
        self._aborted: threading.Event | None = None

    def connect(self, program: Program) -> None:
        """Make the groups that a program needs and that are not there yet.

        All ranks call this for the same program, and each makes its own in an order of all pairs:
        so the first that is not made yet waits for nobody.

        Raises:
            RankError: another rank has failed meanwhile, or cannot be reached.
        """
        wanted = pairs_of(program, self._ranks.rank)
        new = [pair for pair in wanted if pair not in self._groups]
        if not new:
            return
        try:
            self._groups |= interruptibly(lambda: dict(map(self._made, new)), self._look)
        except BaseException:
            self.give_up()
            raise

    def send(self, target: int, value: Tensor) -> Any:
        """Send a dense tensor, which is not to be changed until the work that this returns is
        done."""
        return self._groups[self._ranks.rank, target].send([_bytes(value)], 1, 0)

    def receive(self, source: int, room: Tensor) -> Any:
        """Receive into a dense tensor. Returns the work; tensors come in the order of the calls."""
        return self._groups[source, self._ranks.rank].recv([_bytes(room)], 0, 0)

    def give_up(self) -> None:
        """Let all that is pending end, in another thread, and let every later call of the pipe fail
        on all ranks: what one side has sent and the other not received cannot be taken back."""
        if self._aborted is None:
            self._ranks.give_up(
                "has given up its transfers between devices after a failure: those that were "
                "pending cannot be taken back; start all ranks again, from the last checkpoint"
            )
            self.close()

    def close(self) -> None:
        """Let all that is pending end, in another thread."""
        if self._aborted is None:
            self._aborted = threading.Event()
            threading.Thread(target=self._abort, name="fxpipe-abort", daemon=True).start()

    def drained(self) -> None:
        """If the groups were given up, wait until they are, so that no stream waits for another
        rank any more. Raises RankError where that takes too long."""
        if self._aborted is not None and not self._aborted.wait(ABORTING):
            raise RankError(
                f"the transfers between devices did not end in {ABORTING:.0f} s after a failure, "
                "so that this rank's device may wait for ever; end this process",
                rank=self._ranks.rank,
            )

    def make(self, store: Any, member: int) -> Any:
        """A process group of two, of which this process is that member."""
        nccl: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined,unused-ignore]
        name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
        before = os.environ.get(name)
        os.environ[name] = "0"  # else torch ends this process when another rank has died
        try:
            return nccl(store, member, 2, timedelta(seconds=self._ranks.members.timeout))
        finally:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before

    def abort(self, made: Any) -> None:
        """Let what is pending in a process group end."""
        made.abort()

    def _made(self, pair: Pair) -> tuple[Pair, Any]:
        """A pair and its group, over which a byte has gone: nothing is left to be set up later,
        where a rank would wait for the other."""
        member = pair.index(self._ranks.rank)
        store = within(self._ranks.members.store, f"{pair[0]}>{pair[1]}")
        # a thread has a current device of its own
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            try:
                made = self.make(store, member)
                byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
                (made.recv([byte], 0, 0) if member else made.send([byte], 1, 0)).wait()
                byte.item()
            except BaseException as error:
                other = self._ranks.members.names[pair[1 - member]]
                raise RankError(
                    f"the devices of this rank and of {other} cannot be connected ({told(error)})",
                    rank=pair[1 - member],
                ) from error
        return pair, made

    def _look(self) -> None:
        raise_held()
        if self._ranks.failure is not None:
            raise self._ranks.failure

    def _abort(self) -> None:
        assert self._aborted is not None
        try:
            for made in self._groups.values():
                self.abort(made)
        finally:
            self._aborted.set()


def _bytes(dense: Tensor) -> Tensor:
    """The memory of a dense tensor: every dtype and every order of dimensions is sent alike."""
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)

"""Ranks whose devices compute on streams: their tensors go from device to device.

An instruction list, its streams and its events are those of one process. What differs is what the
events of another device stand for. That a value is there, or was copied, is not told by its event
but by the transfer: the stream that receives a value waits for it, and the stream that frees a sent
value waits until it is gone. All else (values that are no tensors, norms, losses, failures) goes
over the connections of ``RankChannels``.

Receives are posted ahead: from each other rank as many as ``Program.window`` says, in the order of
this rank's list. So a program is proven to come to its end even if a send holds its device up until
its receive is posted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import arrivals
from fxpipe.ir.plan import ValueSpec
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer
from fxpipe.runtime.devices.backend import Backend
from fxpipe.runtime.devices.cuda import CudaBackend, CudaPlace
from fxpipe.runtime.devices.launching import (
    Events,
    Lanes,
    LaunchingChannels,
    LaunchingMachine,
    room,
)
from fxpipe.runtime.failure import DeviceMemory
from fxpipe.runtime.host import Job
from fxpipe.runtime.interpreter import Stopped
from fxpipe.runtime.ranks.channels import RankBackend, RankChannels
from fxpipe.runtime.ranks.group import RankGroup
from fxpipe.runtime.ranks.pairs import PairGroups

LOOK = 5e-5
"""Seconds after which a thread looks again whether its device is done."""

PATIENCE = 2.0
"""Seconds in which a failed transfer is explained by the connection to the other rank, which knows
more of it."""


class _Posted(NamedTuple):
    """A receive that is posted: the value, its memory, and the work that fills it."""

    buffer: Buffer
    room: Tensor
    work: Any


@dataclass
class _Receives:
    """What this rank receives from another one.

    Attributes:
        step: the step of the receive that is to be posted next.
        index: its index.
        receives: position and buffer of each receive in this rank's list.
        posted: those that are posted and not come to yet.
    """

    step: int
    index: int = 0
    receives: list[tuple[int, Buffer]] = field(default_factory=list)
    posted: deque[_Posted] = field(default_factory=deque)


class DeviceChannels(RankChannels, LaunchingChannels):
    """Channels from this rank's device to those of the other ranks, in one run. See Channels."""

    def __init__(
        self,
        program: Program,
        group: RankGroup,
        jobs: Mapping[int, Job],
        pairs: PairGroups,
    ) -> None:
        """Connect the devices that exchange something. See RankChannels; ``pairs`` connects them.

        Raises:
            RankError: see PairGroups.connect.
        """
        self._stopped = threading.Event()
        self._pairs = pairs
        self._sent: dict[Buffer, tuple[Tensor, Any]] = {}
        self._awaited: dict[int, _Receives] = {}
        self._pauses: list[int] = []
        self._until: int | None = None  # the pause that comes next
        super().__init__(program, group, jobs)
        self._followed = frozenset()  # what follows may be a tensor, and travel otherwise
        self.events = Events(program, (group.rank,))
        pairs.connect(program)

    def prepare(self, machine: LaunchingMachine) -> None:
        """See LaunchingChannels.prepare: post the first receives."""
        if not self._awaited:
            for at, x in enumerate(self._program.lists[machine.device]):
                if isinstance(x, ins.Pause):
                    self._pauses.append(at)
                elif isinstance(x, ins.Receiving):
                    origin = self._program.origin(x)
                    awaited = self._awaited.setdefault(origin, _Receives(machine.first))
                    awaited.receives.append((at, x.buffer))
        self._until = next((at for at in self._pauses if at >= machine.position), None)
        for source, awaited in self._awaited.items():
            with machine.lanes.on(arrivals(source), "post receives"):
                self._post(machine, source, awaited, self._program.window)

    def put(self, device: int, buffer: Buffer, value: Any) -> None:
        spec = self._spec(buffer)
        if spec is None:
            super().put(device, buffer, value)
            return
        if tuple(value.shape) != spec.shape or value.dtype != spec.dtype:
            raise InputError(
                f"{buffer.value} has the shape {tuple(value.shape)} and {value.dtype}, and the "
                f"device that receives it expects {spec.shape} and {spec.dtype}, as it was traced; "
                "keep what makes a value of changing size and what uses it on one stage"
            )
        dense = room(spec, torch.device("meta"))
        sent = value.detach().resolve_conj().resolve_neg()
        if sent.stride() != dense.stride():
            sent = torch.empty_like(dense, device=value.device).copy_(sent)
        with self._explained():
            self._sent[buffer] = sent, self._pairs.send(device, sent)

    def arrive(self, machine: LaunchingMachine, stream: str, buffer: Buffer) -> Any:
        if self._spec(buffer) is None:
            return super().arrive(machine, stream, buffer)
        source = self._program.placement[buffer.source]
        awaited = self._awaited[source]
        self._post(machine, source, awaited, self._program.window + 1)
        first = awaited.posted.popleft()
        assert first.buffer == buffer, "values are received in the order of the list"
        with self._explained():
            first.work.wait()
        return first.room

    def leave(self, buffer: Buffer) -> None:
        if buffer in self._sent:
            with self._explained():
                self._sent[buffer][1].wait()
            del self._sent[buffer]

    def finish(self, lanes: Lanes, marks: Sequence[Any]) -> None:
        """See LaunchingChannels.finish: wait for the device. All ranks commit a step, or none: each
        has to know that it has come to the end, and nothing may be left pending."""
        while not all(map(lanes.reached, marks)):
            if self.stopping:
                raise Stopped
            time.sleep(LOOK)

    def stop(self) -> None:
        super().stop()
        self._stopped.set()
        self._pairs.give_up()

    def _spec(self, buffer: Buffer) -> ValueSpec | None:
        """What a value looks like that goes from device to device; None for any other."""
        if buffer.kind == "norm":
            return None
        spec = self._jobs[buffer.batch].specs[buffer.microbatch].get(buffer.value)
        if spec is None or spec.strides is None or spec.device != self._pairs.device.type:
            return None
        return spec if spec.bytes else None

    def _post(self, machine: LaunchingMachine, source: int, awaited: _Receives, most: int) -> None:
        """Post receives on the current stream until there are so many, or no more are known."""
        while len(awaited.posted) < most:
            buffer = self._upcoming(machine, awaited)
            if buffer is None:
                return
            spec = self._spec(buffer)
            if spec is not None:
                made = machine.lanes.room(spec)
                with self._explained():
                    work = self._pairs.receive(source, made)
                awaited.posted.append(_Posted(buffer, made, work))

    def _upcoming(self, machine: LaunchingMachine, awaited: _Receives) -> Buffer | None:
        """What is received next, or None as long as that is not known: where the caller decides
        whether there is another batch, or whether it goes on after a pause."""
        while True:
            if awaited.index == len(awaited.receives):
                if not self._overlaps:
                    return None
                awaited.step, awaited.index = awaited.step + 1, 0
            position, relative = awaited.receives[awaited.index]
            if self._until is not None and position > self._until:
                return None
            buffer = relative._replace(batch=awaited.step + relative.batch)
            if awaited.step > machine.step and buffer.batch >= machine.batches.stop:
                return None
            awaited.index += 1
            if buffer.batch in machine.batches:
                return buffer

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """An error of a transfer while the run is being stopped only follows from that."""
        try:
            yield
        except RuntimeError:
            if self._stopped.wait(PATIENCE):
                raise Stopped from None
            raise


class CudaRanks(RankBackend, CudaBackend):
    """Runs the list of this rank's CUDA device. See Backend."""

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        """Make the streams of this rank's device."""
        CudaBackend.__init__(self, [device], group)
        self._pairs = PairGroups(group, device)

    def channels(self, program: Program, threads: int, jobs: Mapping[int, Job]) -> DeviceChannels:
        return DeviceChannels(program, self.group, jobs, self._pairs)

    def end(self) -> None:
        """See Backend.end. After a failure no stream waits for other ranks any more."""
        self._pairs.drained()
        super().end()

    def close(self) -> None:
        self._pairs.close()

    def nanoseconds(self, device: int, times: Sequence[Any]) -> list[int]:
        """See Backend.nanoseconds; none for the devices of other ranks."""
        return self.lanes[0].nanoseconds(times) if times else []

    def memory(self, device: int) -> DeviceMemory:
        """See Backend.memory; what other ranks' devices hold is not known here."""
        if device == self.group.rank:
            return self.lanes[0].memory()
        return DeviceMemory(self.group.members.places[device], None, None)


def backend_of(
    group: RankGroup, here: torch.device, devices: Sequence[CudaPlace], ordered_sums: bool
) -> Backend:
    """What runs a pipe's devices, on several ranks of which this one has the device ``here``, or on
    one, which has all ``devices``."""
    cuda = here.type == "cuda"
    if group.size > 1:
        return CudaRanks(group, here) if cuda else RankBackend(group, ordered_sums)
    return CudaBackend(devices) if cuda else Backend()

"""Ranks whose devices compute on streams: tensors go directly from device to device.

Instruction lists, streams and events are the same as in one process, except for the events of other
devices, which are not visible here. Transfers replace them: the stream that receives a value waits
for the transfer, and so does the stream that frees a sent value. Everything else (norms, losses,
failures and values that are no tensors) goes over the links of ``RankChannels``.

Receives are posted ahead of time: from each other rank up to ``Program.window`` of them, in the
order of this rank's list. The verifier proves that a program with this window comes to its end even
if each send blocks its device until the matching receive is posted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
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
from fxpipe.runtime.devices.lanes import Lanes, Place, room
from fxpipe.runtime.devices.launching import (
    Events,
    LaunchingChannels,
    LaunchingMachine,
    StreamBackend,
)
from fxpipe.runtime.failure import DeviceMemory
from fxpipe.runtime.host import Job
from fxpipe.runtime.interpreter import Stopped
from fxpipe.runtime.ranks.channels import RankBackend
from fxpipe.runtime.ranks.collectives import CollectiveChannels
from fxpipe.runtime.ranks.group import RankGroup
from fxpipe.runtime.ranks.pairs import PairGroups

LOOK = 5e-5
"""Seconds between two checks of whether the device is done."""


class _Posted(NamedTuple):
    """A posted receive: the value, its memory, and the work that fills it."""

    buffer: Buffer
    room: Tensor
    work: Any


@dataclass
class _Receives:
    """The receives from one other rank.

    Attributes:
        step: the step of the receive to be posted next.
        index: its index in ``receives``.
        receives: position and buffer of each receive in this rank's list.
        posted: the receives that are posted, and whose instructions have not run yet.
    """

    step: int
    index: int = 0
    receives: list[tuple[int, Buffer]] = field(default_factory=list)
    posted: deque[_Posted] = field(default_factory=deque)


class DeviceChannels(CollectiveChannels, LaunchingChannels):
    """Channels from this rank's device to the devices of the other ranks, in one run."""

    def __init__(
        self,
        program: Program,
        group: RankGroup,
        jobs: Mapping[int, Job],
        pairs: PairGroups,
        in_order: bool,
    ) -> None:
        """Connect the devices that exchange values by ``pairs``. Raises like PairGroups.connect."""
        self._sent: dict[Buffer, tuple[Tensor, Any]] = {}
        self._awaited: dict[int, _Receives] = {}
        self._pauses: list[int] = []
        self._until: int | None = None  # the position of the next pause
        super().__init__(program, group, jobs, pairs=pairs, in_order=in_order)
        self._followed = frozenset()  # never collect values: the next may be a tensor, sent alone
        self.events = Events(program, (group.device,))
        pairs.connect(program)

    def prepare(self, machine: LaunchingMachine) -> None:
        """Post the first receives."""
        super().prepare(machine)
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
                f"{buffer.value} has the shape {tuple(value.shape)} and {value.dtype}, but the "
                f"device that receives it expects {spec.shape} and {spec.dtype}, as in the trace; "
                "if the size of a value changes, make and use it on the same stage"
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
        """Wait until the device is done. All ranks commit a step or none does, so each must know
        that it has reached the end, with no transfer pending."""
        while not all(map(lanes.reached, marks)):
            if self.stopping:
                raise Stopped
            time.sleep(LOOK)

    def _spec(self, buffer: Buffer) -> ValueSpec | None:
        """The shape and dtype of a value that goes from device to device; None for other values."""
        if buffer.kind == "norm":
            return None
        spec = self._jobs[buffer.batch].specs[buffer.microbatch].get(buffer.value)
        if spec is None or spec.strides is None or spec.device != self._pairs.device.type:
            return None
        return spec if spec.bytes else None

    def _post(self, machine: LaunchingMachine, source: int, awaited: _Receives, most: int) -> None:
        """Post receives on the current stream until ``most`` are posted or no more are known."""
        while len(awaited.posted) < most:
            buffer = self._upcoming(machine, awaited)
            if buffer is None:
                return
            spec = self._spec(buffer)
            if spec is not None:
                memory = machine.lanes.room(spec)
                with self._explained():
                    work = self._pairs.receive(source, memory)
                awaited.posted.append(_Posted(buffer, memory, work))

    def _upcoming(self, machine: LaunchingMachine, awaited: _Receives) -> Buffer | None:
        """Return the next buffer to receive; None if the caller has not decided yet whether there
        is another batch, or whether the run goes on after a pause."""
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


class CudaRanks(RankBackend, StreamBackend):
    """Runs the list of this rank's CUDA device."""

    def __init__(self, group: RankGroup, device: torch.device, in_order: bool) -> None:
        """Make the streams of this rank's device. ``in_order`` is as in CollectiveChannels."""
        StreamBackend.__init__(self, [Lanes(device)], group)
        self._pairs, self._in_order = PairGroups(group, device), in_order

    def channels(self, program: Program, threads: int, jobs: Mapping[int, Job]) -> DeviceChannels:
        return DeviceChannels(program, self.group, jobs, self._pairs, self._in_order)

    def end(self) -> None:
        self._pairs.drained()  # after a failure, until no stream waits for other ranks
        super().end()

    def close(self) -> None:
        self._pairs.close()
        super().close()

    def nanoseconds(self, device: int, times: Sequence[Any]) -> list[int]:
        return self.lanes[0].nanoseconds(times) if times else []  # none of another rank's device

    def memory(self, device: int) -> DeviceMemory:
        """The memory of a device; unknown where it belongs to another rank."""
        if device == self.group.device:
            return self.lanes[0].memory()
        return DeviceMemory(self.group.members.places[device], None, None)


def backend_of(
    group: RankGroup, here: torch.device, devices: Sequence[Place], *, in_order: bool = False
) -> Backend:
    """Return a pipe's backend: of the device ``here`` of several ranks, or of all ``devices``.
    ``in_order`` adds up gradients in the order of the replicas, as CPU devices always do."""
    cpu = here.type == "cpu"
    if group.size > 1:
        return RankBackend(group) if cpu else CudaRanks(group, here, in_order)
    return Backend() if cpu else StreamBackend([*map(Lanes, devices)])

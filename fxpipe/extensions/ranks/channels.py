"""What runs the list of a rank's device on a CPU, and its channels to the other ranks' devices.

Tensors whose shapes the plan says go from device to device over ``PairGroups``, in the order of the
lists. Receives are posted ahead, into the memory in which the values stay. Everything else (losses,
outputs, norms, values that are no tensors) goes over the tree.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from fxpipe.compiler.options import Options
from fxpipe.errors import InputError, RankError
from fxpipe.extensions.ranks.group import RankGroup, failure_of
from fxpipe.extensions.ranks.packing import enclosed, opened
from fxpipe.extensions.ranks.pairs import PairGroups
from fxpipe.extensions.ranks.program import CROSSING, OwnProgram
from fxpipe.extensions.ranks.tree import Key
from fxpipe.ir.plan import ValueSpec
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer
from fxpipe.parts import Parts
from fxpipe.runtime.backend import Backend, Channels
from fxpipe.runtime.host import Job, in_own_storage
from fxpipe.runtime.interpreter import Machine, Stopped

SMALL = 4096
"""Published tensors of fewer bytes are collected and sent together."""

PATIENCE = 5.0
"""Seconds to wait, after a failed transfer, for the other rank's own error, which says more."""


@dataclass
class _Receives:
    """The receives from one other device.

    Attributes:
        first: the step that the first of them belongs to.
        begun: how many were posted or belong to no batch, list after list.
        posted: those whose instructions have not run yet: the value, its memory, and the work that
            fills it.
        bytes: the memory of those.
    """

    first: int
    begun: int = 0
    posted: deque[tuple[Buffer, Tensor, Any]] = field(default_factory=deque)
    bytes: int = 0


class RankChannels(Channels):
    """Channels from this rank's device to the devices of the other ranks, in one run.

    Attributes:
        failure: why another rank has stopped the run; None if none has.
        running: whether the run has started and is not paused.
    """

    running = False

    def __init__(
        self,
        program: OwnProgram,
        group: RankGroup,
        jobs: Mapping[int, Job],
        pairs: PairGroups,
        in_order: bool,
    ) -> None:
        """Make empty channels over the groups of ``pairs``, which are connected. ``in_order`` asks
        for sums over replicas in their order."""
        super().__init__(program, 1)
        self._group, self._jobs, self._pairs = group, jobs, pairs
        self._program, self._overlaps = program, program.depth > 0
        self._stopped = threading.Event()
        self.failure: RankError | None = None
        if group.replicas > 1:
            collectives = Parts.collectives.find("training several replicas")
            self.replicas = collectives(group, pairs, self._stopped, in_order=in_order)
        # device → what was sent to it and may not be there yet
        self._sent: dict[int, deque[tuple[Buffer, Tensor, Any]]] = {}
        self._awaited: dict[int, _Receives] = {}  # device → what comes from it
        self._until: int | None = None  # the position of the next pause
        self._unsent: list[tuple[Buffer, Any]] = []  # published here
        self._outputs: dict[int, list[tuple[Buffer, Any, int]]] = {}  # of batches not fed yet
        self._met: SimpleQueue[int | None] = SimpleQueue()
        self._failed: Callable[[RankError], None] = lambda error: None
        self._run = group.open(self)

    def divided(self, names: Sequence[str]) -> Sequence[Sequence[str]]:
        """For each parameter of these names the dimensions of the mesh over which it is sharded."""
        return [self._group.sharded(name) for name in names]

    def when_failed(self, failed: Callable[[RankError], None]) -> None:
        self._failed = failed
        if self.failure is not None:
            failed(self.failure)

    def prepare(self, machine: Machine) -> None:
        """Post the first receives."""
        program = self._program
        self._until = next((at for at in program.pauses if at >= machine.position), None)
        for source in program.receives:
            awaited = self._awaited.setdefault(source, _Receives(machine.step))
            with machine.posting(source):
                self._post(machine, source, awaited, program.window)

    def put(self, device: int, buffer: Buffer, value: Any) -> None:
        spec = self._spec(buffer)
        if spec is None:
            to = [self._group.pipeline[device]]
            self._group.tell("value", (self._run, buffer), enclosed(value), to)
            return
        if tuple(value.shape) != spec.shape or value.dtype != spec.dtype:
            raise InputError(
                f"{buffer.value} has the shape {tuple(value.shape)} and {value.dtype}, but the "
                f"device that receives it expects {spec.shape} and {spec.dtype}, as in the trace; "
                "if the size of a value changes, make and use it on the same stage"
            )
        sent = value.detach().resolve_conj().resolve_neg()
        if sent.stride() != spec.dense:
            sent = spec.room(sent.device).copy_(sent)
        with explained(self._stopped):
            work = self._pairs.send(device, sent)
            self.keep(device, buffer, sent, work)

    def keep(self, device: int, buffer: Buffer, sent: Tensor, work: Any) -> None:
        """Keep what was sent until it is known to have arrived. Nobody waits for that: gloo's wait
        for a send may last for ever where the other process ends at the wrong moment."""
        kept = self._sent.setdefault(device, deque())
        # what a caller has the loss of has arrived, apart from gradients
        while kept and kept[0][0].batch < buffer.batch - 1 and kept[0][0].kind != "grad":
            kept.popleft()
        kept.append((buffer, sent, work))

    def arrive(self, machine: Machine, buffer: Buffer) -> Any:
        if self._spec(buffer) is None:
            return self.get(machine.device, buffer)
        source = self._program.ends_of(buffer)[0]
        awaited = self._awaited[source]
        self._post(machine, source, awaited, self._program.window + 1)
        first, room, work = awaited.posted.popleft()
        awaited.bytes -= room.nbytes
        assert first == buffer, "values are received in the order of the list"
        with explained(self._stopped):
            work.wait()
        self.arrived(machine, source)
        return room

    def arrived(self, machine: Machine, source: int) -> None:
        """Let go of what the sender of a value had received before it sent that."""
        confirmed = self._program.confirmed.get(machine.position)
        kept = self._sent.get(source)
        if confirmed is None or kept is None:
            return
        last = machine.named(confirmed)
        if any(buffer == last for buffer, _, _ in kept):
            while kept.popleft()[0] != last:
                pass

    def _spec(self, buffer: Buffer) -> ValueSpec | None:
        """The shape and dtype of a value that goes from device to device; None for other values."""
        if buffer.kind not in CROSSING:
            return None
        spec = self._jobs[buffer.batch].specs[buffer.microbatch].get(buffer.value)
        if spec is None or spec.strides is None or spec.device != self._pairs.device.type:
            return None
        return spec if spec.bytes else None

    def _post(self, machine: Machine, source: int, awaited: _Receives, most: int) -> None:
        """Post receives until ``most`` are posted, and small ones beyond, or no more are known."""
        while len(awaited.posted) < most or awaited.bytes < self._pairs.ahead:
            buffer = self._upcoming(machine, awaited, self._program.receives[source])
            if buffer is None:
                return
            if (spec := self._spec(buffer)) is not None:
                memory = machine.room(spec)
                with explained(self._stopped):
                    work = self._pairs.receive(source, memory)
                awaited.posted.append((buffer, memory, work))
                awaited.bytes += spec.bytes

    def _upcoming(
        self, machine: Machine, awaited: _Receives, receives: Sequence[tuple[int, Buffer]]
    ) -> Buffer | None:
        """Return the next buffer to receive; None if there is none, or the caller has not decided
        yet whether there is another batch, or whether the run goes on after a pause."""
        while self._overlaps or awaited.begun < len(receives):
            later, index = divmod(awaited.begun, len(receives))
            step, (position, relative) = awaited.first + later, receives[index]
            if self._until is not None and position > self._until:
                return None
            buffer = relative._replace(batch=step + relative.batch)
            if step > machine.step and buffer.batch >= machine.batches.stop:
                return None
            awaited.begun += 1
            if buffer.batch in machine.batches:
                return buffer
        return None

    def start(self) -> None:
        with self._group.changed:  # a failure that is told meanwhile must not be lost
            self.running = True
            if (failure := self.failure or self._group.failure) is not None:
                self.fail(failure)

    def pause(self) -> None:
        self.running = False

    def publish(self, buffer: Buffer, value: Any) -> None:
        """Send a value to the ranks of this replica; losses go to all replicas.

        Small values such as losses are collected into one message, unless batches overlap: then a
        caller may need them before the run ends.
        """
        value = in_own_storage(value)  # it may stay here until the end of the step
        self._unsent.append((buffer, value))
        if self._overlaps or not isinstance(value, Tensor) or value.nbytes >= SMALL:
            self.flush()

    def flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        losses = [(b, value) for b, value in unsent if b.value == self._jobs[b.batch].host.shared]
        group = self._group
        own = [rank for rank in group.pipeline if rank != group.rank]
        elsewhere = [rank for rank in group.own_column if rank not in group.pipeline]
        for values, ranks in ((unsent, own), (losses, elsewhere)):
            if values and ranks:
                group.tell("outputs", (self._run,), _together(values), ranks)

    def fed(self, batch: int) -> None:
        with self._group.changed:
            for buffer, value, replica in self._outputs.pop(batch, []):
                self._jobs[batch].host.take(buffer, value, replica)

    def meet(self) -> None:
        """Wait until all ranks have called this. Raises Stopped if the run ends."""
        self._group.meet(self._run)
        self._next(self._met)

    def left(self, explain: Callable[[], BaseException]) -> None:
        if self._overlaps:  # else the call that is running tells the other ranks
            self._group.tell("left", (self._run,), failure_of(explain()))

    def stop(self) -> None:
        super().stop()
        self._met.put(None)
        self._stopped.set()
        self._pairs.abort()

    def deliver(self, kind: str, rank: int, key: Key, value: Any) -> None:
        """Handle what a rank has told of this run; called by a thread of the tree."""
        replica = self._group.replica_of(rank)
        if kind == "answer":
            self._met.put(rank)
        elif rank == self._group.rank:
            return  # it is known here
        elif kind == "left":
            error = self._group.error_of(rank, value)
            if self.running:
                self.fail(error)
            else:
                self.failure = error  # the run will not start
        elif kind == "value":
            super().put(self._group.device, key[1], opened(value))
        else:
            for buffer, opens in _apart(value):
                if buffer.batch in self._jobs:
                    self._jobs[buffer.batch].host.take(buffer, opens, replica)
                else:
                    self._outputs.setdefault(buffer.batch, []).append((buffer, opens, replica))

    def fail(self, error: RankError) -> None:
        """Stop the run, as another rank has left it; called by a thread of the tree."""
        if self.running and not self.stopping:
            self.failure = error
            self._failed(error)  # before the devices report that they have been stopped
            self.stop()


def _together(values: Sequence[tuple[Buffer, Any]]) -> list[tuple[Buffer, list[int], Any]]:
    """What is told of published values: each with its buffer. Scalars of several micro-batches,
    such as their losses, are one tensor with the buffer of the first."""
    scalars: dict[Buffer, list[tuple[int, Tensor]]] = {}
    told: list[tuple[Buffer, list[int], Any]] = []
    for buffer, value in values:
        if isinstance(value, Tensor) and not value.dim():
            alike = scalars.setdefault(buffer._replace(microbatch=0), [])
            alike.append((buffer.microbatch, value))
        else:
            told.append((buffer, [], enclosed(value)))
    for buffer, alike in scalars.items():
        told.append((buffer, [at for at, _ in alike], torch.stack([value for _, value in alike])))
    return told


def _apart(told: Sequence[tuple[Buffer, list[int], Any]]) -> Iterator[tuple[Buffer, Any]]:
    """What ``_together`` was given."""
    for buffer, microbatches, sent in told:
        value = opened(sent)
        if microbatches:
            for at, scalar in zip(microbatches, value, strict=True):
                yield buffer._replace(microbatch=at), scalar
        else:
            yield buffer, value


class RankBackend(Backend):
    """Runs the list of this rank's device, on a CPU."""

    group: RankGroup
    between: type[RankChannels] = RankChannels

    def __init__(self, group: RankGroup, options: Options) -> None:
        """Make no process groups yet."""
        super().__init__(group)
        self._connect(options)

    def _connect(self, options: Options) -> None:
        self._in_order = options.in_order
        self._new_pairs = partial(PairGroups, self.group, options.here, options.transport)
        self.pairs = self._new_pairs()

    def devices(self, program: Program) -> Sequence[int]:
        return (self.group.device,)

    def channels(self, program: Program, threads: int, jobs: Mapping[int, Job]) -> Any:
        """Also makes the process groups that the program needs. Raises like PairGroups.connect."""
        assert isinstance(program, OwnProgram)
        pairs = self.connected(program)
        return self.between(program, self.group, jobs, pairs, self._in_order)

    def connected(self, program: OwnProgram | None = None) -> PairGroups:
        """The process groups that a program needs, or every program: those that do not exist yet
        are made, all anew after a failure. Raises like PairGroups.connect."""
        if self.pairs.number != self.group.epoch:
            self.pairs.abort()
            self.pairs.drained()
            self.pairs = self._new_pairs()
        self.pairs.connect(program)
        return self.pairs

    def end(self) -> None:
        self.pairs.drained()  # after a failure, until no stream waits for other ranks
        super().end()

    def close(self) -> None:
        self.pairs.abort()
        super().close()


@contextmanager
def explained(stopped: threading.Event) -> Iterator[None]:
    """Raise Stopped instead of an error of a transfer that the stop of the run has caused."""
    try:
        yield
    except RuntimeError:
        if stopped.wait(PATIENCE):
            raise Stopped from None
        raise

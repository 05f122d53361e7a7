"""Streams and events on the CPU, where every wrong order shows as wrong numbers.

Each stream works off its own queue; see ``stream_queues``. As with a caching allocator, memory is
allocated and freed when an instruction is launched, and freed memory is reused at once. An
instruction fills the memory that it allocates with NaN when it starts, and the memory that it frees
when it is done. A computation uses all memory that is free at its launch as scratch space.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import Event
from fxpipe.ir.plan import Stage
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer
from fxpipe.runtime.interpreter import Machine, Store
from tests.oracles.stream_memory import Held, Layout, Memory, layout_of, poison
from tests.oracles.stream_queues import Drawn, Queues, Threads, Work, WrongOrder

if TYPE_CHECKING:
    from fxpipe.runtime.host import Job
    from fxpipe.runtime.weights.live import Weights


@dataclass
class Ran:
    """The results of a run.

    Attributes:
        gradients: stage and batch → sums that no update has used up.
        state: name of a buffer in the model → what the last micro-batch wrote to it.
    """

    gradients: dict[tuple[int, int], list[Tensor | None]] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)


def dispatch_order(program: Program) -> tuple[int, ...]:
    """The device of each instruction, if one thread launches all, in the order of turns."""
    at = [0] * program.devices
    order: list[int] = []
    for device, stop in program.turns:
        order += [device] * (stop - at[device])
        at[device] = stop
    return tuple(order)


class StreamMachine:
    """All devices of one run.

    Attributes:
        layouts: device and buffer in its batch → the memory layout of its value.
    """

    def __init__(
        self,
        program: Program,
        stages: Sequence[Stage],
        jobs: Mapping[int, Job],
        weights: Weights,
        layouts: dict[tuple[int, Buffer], Layout],
        seed: int | None,
        in_turn: bool = False,
        threads: bool = True,
    ) -> None:
        """Create the machine.

        Args:
            program: the program, with launches.
            stages: the plan's stages.
            jobs: batch → its inputs and targets.
            weights: parameters and buffers.
            layouts: the layouts of all values; a run without a seed fills them.
            seed: the seed of all random choices; None runs each instruction when it is launched.
            in_turn: whether one host thread launches, in the order of ``Program.turns``.
            threads: whether each stream has a thread; otherwise the order of their work is drawn,
                and the results depend on the seed alone.
        """
        self.program, self.jobs, self.layouts = program, jobs, layouts
        self.random = random.Random(seed)
        self.eager = seed is None
        self.in_turn = in_turn
        self.memories = [Memory() for _ in program.lists]
        self.held: list[dict[Buffer, Held]] = [{} for _ in program.lists]
        self.machines = [
            Machine(program, device, stages, jobs, cast(Any, _NoChannels()), weights)
            for device in range(program.devices)
        ]
        self.values: list[dict[Buffer, Any]] = [{} for _ in program.lists]
        self.sent: dict[Buffer, Held | None] = {}
        self.events: dict[Event, threading.Event] = {}
        self.queues: Queues = (Threads if threads else Drawn)(self.random)
        self.errors: list[BaseException] = []

    def run(self) -> Ran:
        """Launch all windows in a random order that a host may take, and wait for the streams."""
        steps = len(self.jobs) + self.program.depth
        try:
            with torch.no_grad():
                if self.in_turn:
                    self._launch_in_turn(steps)
                else:
                    self._launch_all(steps)
        finally:
            with torch.no_grad():
                self.queues.finish()
        if self.errors:
            raise WrongOrder(repr(self.errors[0])) from self.errors[0]
        ran = Ran()
        for machine in self.machines:
            ran.gradients |= machine.store.gradients
            ran.state |= machine.store.state
        return ran

    def _launch_in_turn(self, steps: int) -> None:
        order = dispatch_order(self.program)
        for step in range(steps):
            at = [0] * self.program.devices
            for device in order:
                x = self.program.lists[device][at[device]]
                if not isinstance(x, ins.Barrier | ins.Pause) and not self._launch(
                    device, step, at[device]
                ):
                    raise WrongOrder(f"device {device} has to wait at position {at[device]}")
                at[device] += 1

    def _launch_all(self, steps: int) -> None:
        lists = self.program.lists
        done = [0] * len(lists)
        left = [steps * len(own) for own in lists]
        while any(d < n for d, n in zip(done, left, strict=True)):
            order = list(range(len(lists)))
            self.random.shuffle(order)
            moved, meeting = False, 0
            for device in order:
                for _ in range(self.random.randint(1, 9)):
                    if done[device] == left[device]:
                        break
                    step, position = divmod(done[device], len(lists[device]))
                    x = lists[device][position]
                    if isinstance(x, ins.Barrier | ins.Pause):
                        meeting += 1
                        break
                    if not self._launch(device, step, position):
                        break
                    done[device] += 1
                    moved = True
            if meeting == len(lists) and not moved:
                done = [each + 1 for each in done]
            elif not moved:
                meeting = sum(
                    done[d] < left[d]
                    and isinstance(lists[d][done[d] % len(lists[d])], ins.Barrier | ins.Pause)
                    for d in range(len(lists))
                )
                if meeting < len(lists):
                    raise WrongOrder("nothing can be launched")

    def _launch(self, device: int, step: int, position: int) -> bool:
        """Launch an instruction; returns False if the host has to wait."""
        x = self.program.lists[device][position]
        launch = self.program.launches[device][position]
        waits = [event._replace(batch=event.batch + step) for event in launch.waits]
        waits = [event for event in waits if event.batch >= 0]
        if any(event not in self.events for event in waits):
            return False
        exists = step + x.batch in self.jobs
        if exists and isinstance(x, ins.Receive) and _named(x.buffer, step) not in self.sent:
            return False
        work = self._work(device, step, x) if exists else None
        done = [self.events[event] for event in waits]
        record = None
        if launch.record is not None:
            record = threading.Event()
            self.events[launch.record._replace(batch=launch.record.batch + step)] = record
        if self.eager:
            if work is not None:
                work()
            if record is not None:
                record.set()
            return True
        self.queues.give((device, launch.stream), done, lambda: self._do(work, record))
        return True

    def _do(self, work: Work | None, record: threading.Event | None) -> None:
        """Run an instruction's work on its stream, then record its event."""
        try:
            if work is not None and not self.errors:
                work()
        except BaseException as error:
            self.errors.append(error)
        finally:
            if record is not None:
                record.set()

    def _work(self, device: int, step: int, x: ins.Instruction) -> Work | None:
        """The work of an instruction, with memory that is allocated and freed now."""
        held, memory = self.held[device], self.memories[device]
        if isinstance(x, ins.Send):
            self.sent[_named(x.buffer, step)] = held.get(_named(x.buffer, step))
            return None
        if self.eager:
            return lambda: self._eager(device, step, x)
        reads = {b: held[_named(b, step)] for b in x.uses(self.program)}
        if isinstance(x, ins.Output):
            return lambda: self._output(device, step, x, reads[x.buffer])
        made = {
            b: Held.take(self.layouts[device, _named(b, step)], memory)
            for b in x.makes(self.program)
        }
        held |= {_named(b, step): each for b, each in made.items()}
        ended = [held.pop(_named(b, step)) for b in x.ends(self.program)]
        bench = (
            [] if isinstance(x, ins.Move) else [b for kept in memory.free.values() for b in kept]
        )
        for each in ended:
            each.let_go(memory)
        if isinstance(x, ins.Free):
            return ended[0].poison
        if isinstance(x, ins.Load):
            value = self.jobs[step + x.buffer.batch].host.give(x.buffer)
            return lambda: self._copy(made[x.buffer], value)
        if isinstance(x, ins.Receive):
            source = self.sent[_named(x.buffer, step)]
            return lambda: self._copy(made[x.buffer], source)
        return lambda: self._compute(device, step, x, reads, made, ended, bench)

    def _copy(self, into: Held, value: Any) -> None:
        into.poison()
        if self.random.random() < 0.5:
            self.queues.linger(0.0002)
        into.write(value.read() if isinstance(value, Held) else value)

    def _output(self, device: int, step: int, x: ins.Output, held: Held) -> None:
        value = pytree.tree_map_only(Tensor, torch.clone, held.read())
        self.jobs[step + x.buffer.batch].host.take(x.buffer, value)

    def _compute(
        self,
        device: int,
        step: int,
        x: ins.Instruction,
        reads: dict[Buffer, Held],
        made: dict[Buffer, Held],
        ended: list[Held],
        bench: list[Tensor],
    ) -> None:
        for block in bench:
            poison(block)
        for each in made.values():
            each.poison()
        machine = self._scratch(device, step)
        machine.store.values = {b: each.read() for b, each in reads.items()}
        x.run(machine)
        if self.random.random() < 0.2:
            self.queues.linger(0.0003)
        for b, each in made.items():
            each.write(machine.store.values[b])
        self._keep(device, ended)
        for block in bench:
            poison(block)
        for each in ended:
            each.poison()

    def _keep(self, device: int, ended: list[Held]) -> None:
        """Copy sums of gradients out of memory that is freed: nothing else would keep it."""
        blocks = [block for each in ended for block in each.blocks if block is not None]
        going = {block.untyped_storage().data_ptr() for block in blocks}
        for sums in self.machines[device].store.gradients.values():
            for index, total in enumerate(sums):
                if total is not None and total.untyped_storage().data_ptr() in going:
                    sums[index] = total.clone()

    def _scratch(self, device: int, step: int) -> Machine:
        """The device's machine as an instruction sees it: its own values, all devices' sums."""
        own = self.machines[device]
        machine = Machine(self.program, device, own.stages, self.jobs, own.channels, own.weights)
        machine.step, machine.batches = step, range(len(self.jobs))
        machine.store = Store()
        machine.store.state = own.store.state
        machine.store.gradients = _Sums(own.store.gradients, step)
        return machine

    def _eager(self, device: int, step: int, x: ins.Instruction) -> None:
        """Run an instruction on plain values, and note the memory layout of its results."""
        values = self.values[device]
        machine = self._scratch(device, step)
        machine.store.values = {b: values[_named(b, step)] for b in x.uses(self.program)}
        if isinstance(x, ins.Receive):
            source = self.values[self.program.origin(x)]
            machine.store.values[x.buffer] = source[_named(x.buffer, step)]
        elif not isinstance(x, ins.Free):
            x.run(machine)
        for b in x.makes(self.program):
            values[_named(b, step)] = machine.store.values[b]
            self.layouts[device, _named(b, step)] = layout_of(machine.store.values[b])
        for b in x.ends(self.program):
            del values[_named(b, step)]


class _Sums(dict[tuple[int, int], list[Tensor | None]]):
    """Sums of gradients by batch of a step, stored by batch since the first step."""

    def __init__(self, kept: dict[tuple[int, int], list[Tensor | None]], step: int) -> None:
        self._kept, self._step = kept, step

    def _key(self, key: tuple[int, int]) -> tuple[int, int]:
        return key[0], key[1] + self._step

    def __setitem__(self, key: tuple[int, int], value: list[Tensor | None]) -> None:
        self._kept[self._key(key)] = value

    def __getitem__(self, key: tuple[int, int]) -> list[Tensor | None]:
        return self._kept[self._key(key)]

    def get(self, key: tuple[int, int], default: Any = None) -> Any:
        return self._kept.get(self._key(key), default)

    def pop(self, key: tuple[int, int], *default: Any) -> Any:
        return self._kept.pop(self._key(key), *default)


class _NoChannels:
    """No channels: values move between devices as blocks of memory."""

    stopping = False

    def put(self, device: int, buffer: Buffer, value: Any) -> None:
        raise AssertionError

    def get(self, device: int, buffer: Buffer) -> Any:
        raise AssertionError

    def meet(self) -> None:
        raise AssertionError

    def publish(self, buffer: Buffer, value: Any) -> None:
        """Do nothing: no other process needs the value."""


def _named(buffer: Buffer, step: int) -> Buffer:
    return buffer._replace(batch=buffer.batch + step)

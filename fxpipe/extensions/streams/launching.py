"""Asynchronous devices: their instructions are launched on streams, ordered by events.

Launching runs ahead of the devices and waits only for other launches: for a value to be sent, and
for an event to be recorded.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fxpipe.compiler.options import Options
from fxpipe.errors import DeviceError, told
from fxpipe.extensions.streams.kinds import kind_of
from fxpipe.extensions.streams.lanes import ALONE, Lanes
from fxpipe.extensions.streams.launch_order import arrivals
from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import COMPUTE, Event, Launch
from fxpipe.ir.plan import ValueSpec
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer
from fxpipe.runtime.backend import Backend, Channels
from fxpipe.runtime.group import Group
from fxpipe.runtime.host import BatchHost, Job
from fxpipe.runtime.interpreter import HANDLERS, Machine, Stopped, run_own
from fxpipe.text.program import print_instruction


class RunEvents:
    """The events of one run: a wait is launched only after the event's record was launched."""

    def __init__(self, program: Program) -> None:
        """Count the waits for each event."""
        launches = [*chain.from_iterable(program.launches)]
        self._here = {x.record.number for x in launches if x.record}  # not on another rank
        self._waits = Counter(event.number for launch in launches for event in launch.waits)
        self._marks: dict[Event, tuple[Any, int]] = {}
        self._changed = threading.Condition()
        self._stopped = False

    def record(self, event: Event, mark: Any) -> None:
        """Note the mark of an event. It is dropped after the event's last wait."""
        if self._waits[event.number]:
            with self._changed:
                self._marks[event] = mark, self._waits[event.number]
                self._changed.notify_all()

    def find(self, event: Event) -> Any:
        """Wait until an event is recorded and return its mark; None for another process's event.

        Raises:
            Stopped: the run is stopped.
        """
        if event.number not in self._here:
            return None
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or event in self._marks)
            if self._stopped:
                raise Stopped
            mark, left = self._marks.pop(event)
            if left > 1:
                self._marks[event] = mark, left - 1
            return mark

    def stop(self) -> None:
        """Wake every thread that waits."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


class LaunchingChannels(Channels):
    """Channels between devices with streams. Values are passed by reference; the receiver copies.

    Attributes:
        events: the events of all devices.
    """

    def __init__(self, program: Program, threads: int) -> None:
        super().__init__(program, threads)
        self.events = RunEvents(program)

    def arrive(self, machine: Machine, buffer: Buffer) -> Any:
        """Receive a value for a device, and copy it to its memory on the stream of the running
        instruction."""
        assert isinstance(machine, LaunchingMachine)
        stream = machine.program.launches[machine.device][machine.position].stream
        return machine.lanes.bring(stream, self.get(machine.device, buffer))

    def leave(self, buffer: Buffer) -> None:
        """Note that the current stream is about to free a value. If the value was sent, the stream
        has waited for the event at the end of the copy."""

    def finish(self, lanes: Lanes, marks: Sequence[Any]) -> None:
        """Note that a device's list is launched, up to its end or a pause, which these marks
        follow."""

    def stop(self) -> None:
        self.events.stop()
        super().stop()


@dataclass(kw_only=True)
class LaunchingMachine(Machine):
    """One device with streams in one run. ``times`` gets timed marks, see ``Lanes.moment``.

    Attributes:
        lanes: the device's streams.
        first: the first step of the run. Events of earlier steps are past and are not waited for.
    """

    lanes: Lanes
    channels: LaunchingChannels
    first: int = 0

    def run(self, end: int | None = None) -> bool:
        """See Machine.run. It returns when everything is launched, not when it is done."""
        self.channels.prepare(self)
        end = len(self.program.lists[self.device]) if end is None else end
        while self.position < end:
            if type(self._launch_next()) is ins.Pause:
                return False
        return True

    def room(self, spec: ValueSpec) -> Tensor:
        return self.lanes.room(spec)

    def posting(self, source: int) -> AbstractContextManager[None]:
        return self.lanes.on(arrivals(source), "post receives")

    def _launch_next(self) -> ins.Instruction:
        """Launch the instruction at ``position``, move on and return it."""
        instruction = self.program.lists[self.device][self.position]
        launch = self.program.launches[self.device][self.position]
        if self.channels.stopping:
            raise Stopped
        for event in launch.waits:
            at = event._replace(batch=self.step + event.batch)
            if at.batch >= self.first and (mark := self.channels.events.find(at)) is not None:
                self.lanes.wait(launch.stream, mark)
        if not self.program.depth or self.step + instruction.batch in self.batches:
            if self.times is not None:
                self.times.append(self.lanes.moment(launch.stream))
            self._launch(instruction, launch)
            if self.times is not None:
                self.times.append(self.lanes.moment(launch.stream))
        if launch.record is not None:
            event = launch.record._replace(batch=self.step + launch.record.batch)
            self.channels.events.record(event, self.lanes.mark(launch.stream))
        last = self.position + 1 == len(self.program.lists[self.device])
        if last or type(instruction) is ins.Pause:
            streams = sorted({launch.stream for launch in self.program.launches[self.device]})
            self.channels.finish(self.lanes, [self.lanes.mark(stream) for stream in streams])
        self.position += 1
        return instruction

    def _launch(self, instruction: ins.Instruction, launch: Launch) -> None:
        with self.lanes.on(launch.stream, print_instruction(instruction)):
            if isinstance(instruction, ins.Load):
                buffer = instruction.buffer
                value = self.jobs[self.step + buffer.batch].host.give(buffer)
                self.store.values[buffer] = self.lanes.bring(launch.stream, value)
            else:
                if isinstance(instruction, ins.Free):
                    self.channels.leave(self.named(instruction.buffer))
                HANDLERS.get(type(instruction), run_own)(self, instruction)


class StreamBackend(Backend):
    """Devices with streams, such as CUDA devices. See Backend."""

    def __init__(self, lanes: Sequence[Lanes], group: Group | None = None) -> None:
        """``lanes`` are the streams of each device that this process runs, which are kept from run
        to run. Several devices of a program may be on one of torch's."""
        super().__init__(group)
        self.lanes = lanes
        self._first = self.group.device  # of those that this process runs
        self._callers: Sequence[torch.Stream] = ()

    def close(self) -> None:
        for lanes in self.lanes:
            lanes.close()

    def channels(
        self, program: Program, threads: int, jobs: Mapping[int, Job]
    ) -> LaunchingChannels:
        return LaunchingChannels(program, threads)

    def machine(self, device: int, first: int) -> Callable[..., Machine]:
        own = device - self._first
        return partial(
            LaunchingMachine,
            lanes=self.lanes[own],
            first=first,
            device=device,
            step=first,
        )

    @contextmanager
    def computing(self, device: int) -> Iterator[None]:
        lanes = self.lanes[device - self._first]
        with lanes.on(COMPUTE, "statistics"):
            yield
        # no event of the program follows, and the next value may arrive in memory freed here
        lanes.follow(COMPUTE)

    def begin(self, host: BatchHost) -> None:
        with ALONE:
            devices = {stream.device for lanes in self.lanes for stream in lanes.every()}
            before = {}
            for device in devices | host.sources:
                last = torch.accelerator.current_stream(device)
                for caller in self._callers:
                    if caller.device == device and caller != last:
                        last.wait_event(caller.record_event())
                before[device] = last.record_event()
            for lanes in self.lanes:
                lanes.begin(before)

    def end(self) -> None:
        for lanes in self.lanes:
            lanes.end(self._callers)

    def caller(self) -> Callable[[], AbstractContextManager[None]]:
        devices = {stream.device for lanes in self.lanes for stream in lanes.every()}
        streams = [torch.accelerator.current_stream(device) for device in devices]

        @contextmanager
        def calling() -> Iterator[None]:
            before, self._callers = self._callers, streams
            try:
                yield
            finally:
                self._callers = before

        return calling

    def nanoseconds(self, device: int, times: Sequence[Any]) -> list[int]:
        return self.lanes[device - self._first].nanoseconds(times)

    def generators(self) -> Mapping[str, torch.Generator]:
        devices = dict.fromkeys(lanes.device for lanes in self.lanes)
        return {str(device): kind_of(device).generator(device) for device in devices}

    def late(self, error: BaseException, when: str) -> DeviceError | None:
        if not self.lanes[0].kind.is_late(error):
            return None
        return DeviceError(
            f"when {when}, a device reported that an instruction launched earlier had failed "
            f"({told(error)}), and does not say which. Run it again with launches that wait, on "
            "CUDA with the environment variable CUDA_LAUNCH_BLOCKING=1: then the error names the "
            "instruction. All that this process had on the device is lost: start it again, from "
            "the last checkpoint",
            device=-1,
            instruction="",
            stage=None,
            microbatch=None,
            source="",
        )


def backend(options: Options) -> StreamBackend:
    """What runs all devices of a pipe, which have streams, in this process."""
    return StreamBackend([*map(Lanes, options.devices)], options.group)

"""Faults to plant in the order of what devices run: each is a text in a file, and what stands there
instead."""

from __future__ import annotations

from typing import NamedTuple

STREAMS = "fxpipe.extensions.streams.events"
ORDER = "fxpipe.extensions.streams.launch_order"
FREE = "fxpipe.passes.lowering.free"
LANES = "fxpipe.extensions.streams.lanes"
LAUNCHING = "fxpipe.extensions.streams.launching"
CAPTURED = "fxpipe.extensions.cuda_graphs.captured"
SLOTS = "fxpipe.extensions.cuda_graphs.slot_graphs"


class Fault(NamedTuple):
    """A text in a module's functions, and what stands there instead.

    Attributes:
        module: the module's name.
        before: the text, which occurs there once.
        after: what stands there instead.
        scenes: the names of the pipes that notice it (see ``mutants.SCENES``).
        equivalent: why nothing can go wrong by it; empty if something does.
    """

    module: str
    before: str
    after: str
    scenes: tuple[str, ...] = ("1f1b",)
    equivalent: str = ""


FAULTS = {
    # the pass that chooses streams and events
    "a computation does not wait for its inputs": Fault(
        STREAMS,
        "for buffer in self._uses[device][at]:\n            if (spot",
        "for buffer in ():\n            if (spot",
    ),
    "an arrival does not wait for memory": Fault(STREAMS, "needs.add(memory)", "pass"),
    "a receive does not wait for its sender": Fault(
        STREAMS, "needs.add(_before(spot, x.buffer))", "pass"
    ),
    "a free does not wait for the uses": Fault(
        STREAMS, "for spot in self._used[device].get(value, ()):", "for spot in ():"
    ),
    "a free does not wait for copies to other devices": Fault(
        STREAMS, "self._used[program.origin(x)][x.buffer[:5]].append(spot)", "pass"
    ),
    "a free does not wait for its value to be made": Fault(
        STREAMS,
        "if (spot := made.get(value)) is not None:",
        "if False:",
        ("1f1b", "offload", "2bw"),
        "each value is read on its device, and whatever reads it waits until it is made",
    ),
    "memory of the window before is not waited for": Fault(
        STREAMS, "memory = self._window_before(device)", "memory = None", ("2bw",)
    ),
    "nobody waits for the own device": Fault(
        STREAMS, "if source == stream and spot.device == device:", "if spot.device == device:"
    ),
    "a stream that has waited once waits no more": Fault(
        STREAMS, "if spot.batch or spot.position > seen.get(key, -1):", "if key not in seen:"
    ),
    "waits reach into the window of their launch alone": Fault(
        STREAMS, "batch=buffer.batch - spot.batch", "batch=0", ("2bw",)
    ),
    "arrivals wait for the memory of the first computation": Fault(
        STREAMS, "if stream == COMPUTE:", "if stream == COMPUTE and memory is None:"
    ),
    "an event is recorded one instruction early": Fault(
        STREAMS,
        "Event(numbers[device][at]) if at in numbers[device] else None",
        "Event(numbers[device][at + 1]) if at + 1 in numbers[device] else None",
    ),
    "only the latest event is waited for": Fault(
        STREAMS,
        "                    waits.append(spot)\n",
        "                    waits[:] = [spot]\n",
    ),
    "frees go behind any barrier": Fault(
        STREAMS,
        "stop = min(stop, meetings[meeting])",
        "pass",
        ("barriers",),
        "a free that comes later only keeps memory longer",
    ),
    "a late free is of the batch of the launch": Fault(
        STREAMS, "ins.Free(x.buffer._replace(batch=use.batch))", "ins.Free(x.buffer)", ("2bw",)
    ),
    "a free does not look at the receiver of its value": Fault(
        STREAMS,
        "stop = max(first, bisect_left(starts, use.start))",
        "stop = 0",
        equivalent="it stays behind the send and waits for the copy by an event: it overlaps less",
    ),
    "arrivals are on the compute stream": Fault(
        STREAMS,
        "return arrivals(source_of(program, instruction))",
        "return COMPUTE",
        equivalent="one stream orders more than two: copies overlap nothing",
    ),
    "offloads are on the compute stream": Fault(
        STREAMS,
        "return instruction.stream",
        "return COMPUTE",
        ("offload",),
        "one stream orders more than two: copies overlap nothing",
    ),
    "fetched values are on the stream of offloads": Fault(
        STREAMS,
        "return instruction.stream",
        'return instruction.stream.replace("prefetch", "offload")',
        ("offload",),
        "one stream orders more than two: the copies to the host and back overlap less",
    ),
    # the order of launches
    "arrivals move up across barriers": Fault(
        ORDER,
        "since = stop",
        "since = 0",
        ("barriers",),
        "one that waits for a send behind the barrier is put off until that is launched",
    ),
    "one arrival is put off, and not those behind it": Fault(
        ORDER,
        "and source_of(program, pending.instruction) == source\n",
        "and pending is self.queue[0]\n",
        ("put off",),
    ),
    "a receive is launched before its send": Fault(
        ORDER,
        "case ins.Receive(buffer) if buffer in self._unsent:",
        "case ins.Receive(buffer) if not self._launched:",
    ),
    "arrivals are launched before the frees beside them": Fault(
        ORDER,
        "            self.queue.extend(self._rest[self.segment])\n"
        "            self.queue.extend(self._arrivals[self.segment])\n",
        "            self.queue.extend(self._arrivals[self.segment])\n"
        "            self.queue.extend(self._rest[self.segment])\n",
    ),
    # frees
    "a value is freed before its last use": Fault(
        FREE,
        "        yield x\n        yield from map(ins.Free, ends.get(position, ()))\n",
        "        yield from map(ins.Free, ends.get(position, ()))\n        yield x\n",
    ),
    "what is stored is freed beside its copy": Fault(
        FREE,
        "ends[_overlapped(program, instructions, position)] += used",
        "ends[position] += used",
        ("offload",),
        "the free waits for the copy by an event: only the overlap is lost",
    ),
    # launching
    "a wait does nothing": Fault(LANES, "self.stream(stream).wait_event(mark)", "pass"),
    "only the first event is waited for at a launch": Fault(
        LAUNCHING, "for event in launch.waits:", "for event in launch.waits[:1]:"
    ),
    "events of earlier steps are not waited for": Fault(
        LAUNCHING, "if at.batch >= self.first and", "if at.batch >= self.step and", ("2bw",)
    ),
    "the compute stream waits in place of the own one": Fault(
        LAUNCHING, "self.lanes.wait(launch.stream, mark)", 'self.lanes.wait("compute", mark)'
    ),
    "events are recorded on the compute stream": Fault(
        LAUNCHING,
        "self.channels.events.record(event, self.lanes.mark(launch.stream))",
        'self.channels.events.record(event, self.lanes.mark("compute"))',
    ),
    "events are recorded before their instruction": Fault(
        LAUNCHING,
        "            self._launch(instruction, launch)",
        "            early = self.lanes.mark(launch.stream)\n"
        "            self.channels.events.record = lambda event, mark: Events.record(\n"
        "                self.channels.events, event, early\n"
        "            )\n"
        "            self._launch(instruction, launch)",
    ),
    "all is launched on the compute stream, and events on others": Fault(
        LAUNCHING,
        "with self.lanes.on(launch.stream, print_instruction(instruction)):",
        'with self.lanes.on("compute", print_instruction(instruction)):',
        ("pinned",),
    ),
    "instructions run on the caller's stream": Fault(
        LANES, "with current(self.stream(stream)), self.kind.span", "with self.kind.span"
    ),
    "statistics are computed on the caller's stream": Fault(
        LAUNCHING,
        '        with lanes.on(COMPUTE, "statistics"):',
        "        if True:",
        ("deferred", "deferred 2bw"),
    ),
    "nothing follows the statistics": Fault(
        LAUNCHING, "        lanes.follow(COMPUTE)\n", "", ("deferred", "deferred 2bw")
    ),
    "streams that exist do not follow the statistics": Fault(
        LANES,
        "for other in list(self._streams.values()):",
        "for other in ():",
        ("deferred", "deferred 2bw"),
    ),
    "new streams do not follow the statistics": Fault(
        LANES,
        "if self._followed is not None:",
        "if False:",
        ("deferred", "deferred 2bw"),
        equivalent="it follows the caller, who follows the step before with its statistics",
    ),
    # the beginning and the end of a step
    "the pipe does not follow the caller": Fault(
        LANES,
        "            stream.wait_event(self._before[stream.device])\n",
        "            pass\n",
        ("computed inputs",),
    ),
    "new streams do not follow the caller": Fault(
        LANES,
        "made = self._after_caller(_stream(self.device))",
        "made = _stream(self.device)",
        ("computed inputs",),
    ),
    "a device that only an earlier batch was on is forgotten": Fault(
        LANES, "{**self._before, **before}", "before", ("inputs here and there",)
    ),
    "streams of a copy's source do not follow the caller": Fault(
        LANES,
        "self._after_caller(_stream(source))",
        "_stream(source)",
        ("computed inputs",),
    ),
    "a device that is new to the pipe does not follow the caller": Fault(
        LAUNCHING, "devices | host.sources", "devices", ("inputs elsewhere",)
    ),
    "only the first device follows the caller": Fault(
        LAUNCHING,
        "            for lanes in self.lanes:\n                lanes.begin(before)",
        "            for lanes in self.lanes[:1]:\n                lanes.begin(before)",
        ("computed inputs",),
    ),
    "a backward does not follow the streams of its call": Fault(
        LAUNCHING, "last.wait_event(caller.record_event())", "pass", ("call",)
    ),
    "the caller does not follow the pipe": Fault(
        LANES, "torch.accelerator.current_stream(stream.device).wait_event(done)", "pass"
    ),
    "the caller follows the first device alone": Fault(
        LAUNCHING,
        "        for lanes in self.lanes:\n            lanes.end(",
        "        for lanes in self.lanes[:1]:\n            lanes.end(",
    ),
    "the caller follows the compute stream alone": Fault(
        LANES,
        "            for stream in self.every():\n                done",
        '            for stream in [self.stream("compute")]:\n                done',
        ("computed inputs", "computed 2bw"),
        equivalent="the compute stream waits for each copy of a step before the step ends",
    ),
    "the streams of a call do not follow its backward": Fault(
        LANES,
        "                        other.wait_event(done)\n",
        "                        pass\n",
        ("call",),
    ),
    "pinned inputs are not waited for": Fault(
        LANES, "self._reading.synchronize()", "pass", ("pinned",)
    ),
    "the end of a copy of pinned inputs is not kept": Fault(
        LANES, "self._reading = self.mark(stream)", "pass", ("pinned",)
    ),
    "any input of the host is waited for": Fault(LANES, "if pinned is value:", "if True:"),
    # memory, and copies
    "memory belongs to the stream that receives": Fault(
        LANES,
        "target = self._like(value)",
        "with current(self.stream(stream)):\n"
        "            target = torch.empty_like(value, device=self.device)",
        equivalent="an arrival waits for all that was launched on the compute stream, so each "
        "stream may use its own memory again: only more is kept back",
    ),
    "stored values go to memory that is not pinned": Fault(
        LANES,
        "return _pinned_like(value).copy_(value, non_blocking=True)",
        "return torch.empty_like(value, device='cpu').copy_(value, non_blocking=True)",
        ("offload",),
    ),
    "storing waits": Fault(
        LANES,
        "return _pinned_like(value).copy_(value, non_blocking=True)",
        "return _pinned_like(value).copy_(value)",
        ("offload",),
    ),
    "inputs of the host are copied while the host waits": Fault(
        LANES, "target.copy_(pinned, non_blocking=True)", "target.copy_(pinned)"
    ),
    "seeds go to the device": Fault(
        LANES,
        "if value.is_cpu and value.dim() == 0 and not value.is_floating_point():",
        "if False:",
        ("tied",),
    ),
    "copies leave on the source's default stream": Fault(
        LANES,
        "        with current(leaving), current(self.stream(stream)):",
        "        with current(self.stream(stream)):",
        equivalent="torch orders both devices' streams around a copy: it overlaps less",
    ),
    "a block leaves its stream current": Fault(
        LANES, "torch.accelerator.set_stream(self._before)", "pass", ("pinned", "call")
    ),
    # captured graphs
    "outputs of a capture stay in its slot": Fault(
        CAPTURED,
        "return [value.clone() if isinstance(value, Tensor) else value for value in values]",
        "return [*values]",
        ("captured",),
    ),
    "inputs are not copied into a slot": Fault(
        CAPTURED, "slot.inputs.fill(values)", "pass", ("captured",)
    ),
    "gradients of outputs are not copied into a slot": Fault(
        CAPTURED, "slot.gradients.fill(gradients)", "pass", ("captured",)
    ),
    "a slot is taken again while it is in use": Fault(
        CAPTURED,
        "        lease = SlotLease(slot, self._free)\n",
        "        lease = SlotLease(slot, [])\n        self._free.append(slot)\n",
        ("captured",),
    ),
    "slots share a pool": Fault(
        SLOTS,
        "self._pool = torch.cuda.graph_pool_handle()",
        "self._pool = 0, 1 + stream.device_index",
        ("captured",),
    ),
    "parameters at other addresses have no captures of their own": Fault(
        CAPTURED, "return tensor.data_ptr(), tensor.stride()", "return ()", ("captured 2bw",)
    ),
    # what compiles
    "statistics stay where they are": Fault(
        "fxpipe.ir.traced", "if norm.moments in names:", "if False:", ("deferred", "deferred 2bw")
    ),
    "ignored targets are counted on the host": Fault(
        "fxpipe.compiler.loss_weight.weighing",
        "    if not means or len(counts) != len(terms):\n        return None\n",
        "    return None\n",
        ("ignored targets",),
    ),
}

"""Rules against races of streams: conflicting accesses are ordered, however long they take.

An instruction starts after all earlier ones of its stream and after the events that it waits for.
Vector clocks hold this order: for each stream, how many instructions of every stream are done when
its next one starts. Three kinds of accesses conflict:

- A read comes after the write, on any device. Gradients, weights and the model's buffers are read
  and written in the order of the list.
- The end of a buffer comes after all that read or write it, including copies by other devices.
- Freed memory may be reused by whatever is launched later on its device. So an instruction that
  takes memory comes after all that freed some before it. A computation does both.

A repeating window is run as many times as its instructions reach back, and two more: from then on
every step is like the last. Instructions of batches that do not exist count, for they wait and
record.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from fxpipe.errors import Fault
from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import Event
from fxpipe.ir.value import HOST
from fxpipe.ir.walk import waits_of, walk
from fxpipe.text.program import print_instruction
from fxpipe.verify.facts import Facts


class Access(NamedTuple):
    """An instruction that accesses something: its stream, its number there, and its place."""

    stream: int
    number: int
    device: int
    position: int


def races(facts: Facts) -> Iterator[Fault]:
    """Report each two conflicting accesses that nothing orders, with the missing wait.

    The time is proportional to the number of instructions times the number of streams.
    """
    yield from _Race(facts).run()


def recorded(facts: Facts) -> Iterator[Fault]:
    """Check that each event is recorded once, and before the instructions that wait for it."""
    program = facts.program
    records: dict[int, tuple[int, int]] = {}
    for device, launches in enumerate(program.launches):
        for position, launch in enumerate(launches):
            if launch.record is None:
                continue
            event = launch.record
            if event.batch:
                yield facts.fault(device, position, f"it records {event}", "record it in this step")
            elif event.number in records:
                what = f"{event} is recorded already"
                yield facts.fault(device, position, what, "give each event a number of its own")
            records.setdefault(event.number, (device, position))
    for device, launches in enumerate(program.launches):
        for position, launch in enumerate(launches):
            for event in launch.waits:
                wrong = _wrong_wait(event, (device, position), records, program.depth)
                if wrong is not None:
                    yield facts.fault(device, position, *wrong)


def _wrong_wait(
    event: Event, at: tuple[int, int], records: dict[int, tuple[int, int]], depth: int
) -> tuple[str, str] | None:
    record = records.get(event.number)
    if record is None:
        return f"it waits for {event}, which nothing records", "record it, or do not wait"
    if event.batch > 0 or (event.batch == 0 and record[0] == at[0] and record[1] >= at[1]):
        return f"it waits for {event}, which is recorded later", "wait for it behind that"
    if event.batch and not depth:
        return f"it waits for {event} of another step", "let each step have its own events"
    return None


class _Race:
    """A run of all lists on paper, with a vector clock for each stream.

    Attributes:
        clocks: stream → how many instructions of each stream are done when its next one starts.
        events: event, counted from the first step → the clock when it is recorded.
        left: event → how many instructions will still wait for it.
        writes: what was written → the last write.
        reads: what was read → stream → the last read since that write.
        ended: a freed buffer that another device has still to copy → the free.
        let_go: device → stream → the last instruction that freed memory.
        told: the pairs of places that are reported.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        program = self.program = facts.program
        self.streams: dict[tuple[int, str], int] = {}
        for device, row in enumerate(program.launches):
            for launch in row:
                self.streams.setdefault((device, launch.stream), len(self.streams))
        self.clocks = [[0] * len(self.streams) for _ in self.streams]
        self.events: dict[Event, list[int]] = {}
        awaited = [event.number for row in program.launches for x in row for event in x.waits]
        self.awaited = Counter(awaited)
        self.left: dict[Event, int] = {}
        self.writes: dict[Hashable, Access] = {}
        self.reads: defaultdict[Hashable, dict[int, Access]] = defaultdict(dict)
        self.ended: dict[Hashable, Access] = {}
        self.let_go: list[dict[int, Access]] = [{} for _ in self.program.lists]
        self.told: set[tuple[int, int, int, int]] = set()

    def run(self) -> Iterator[Fault]:
        """Run all lists, step after step, as far as they go; ``recorded`` reports what is stuck."""
        program = self.program
        walked = walk([len(row) for row in program.lists], waits_of(program))
        for step in range(program.depth + 2 if program.depth and not walked.stuck else 1):
            done = [0] * program.devices
            for device, stop in walked.turns:
                for position in range(done[device], stop):
                    yield from self._do(step, device, position)
                done[device] = stop

    def _do(self, step: int, device: int, position: int) -> Iterator[Fault]:
        """Check an instruction and advance its stream."""
        launch = self.program.launches[device][position]
        x = self.program.lists[device][position]
        stream = self.streams[device, launch.stream]
        clock = self.clocks[stream]
        for event in launch.waits:
            if event.batch + step >= 0:
                at = _event(event, step)
                self.left[at] -= 1  # when all that wait for it have done so, it is forgotten
                clock[:] = map(
                    max, clock, self.events[at] if self.left[at] else self.events.pop(at)
                )
        here = Access(stream, clock[stream] + 1, device, position)
        if not isinstance(x, ins.Send | ins.Output | ins.Meeting):
            yield from self._touch(x.later(step) if step else x, clock, here)
        clock[stream] += 1
        if launch.record is not None and self.awaited[launch.record.number]:
            event = _event(launch.record, step)
            self.events[event] = clock.copy()
            self.left[event] = self.awaited[event.number]

    def _touch(self, x: ins.Instruction, clock: list[int], here: Access) -> Iterator[Fault]:
        """Check all accesses of an instruction, and remember them."""
        program, device = self.program, here.device
        more_read, more_written = _lasting(x, device)
        read: list[Hashable] = [*((device, b) for b in x.uses(program)), *more_read]
        if isinstance(x, ins.Receive):
            read.append((program.origin(x), x.buffer))
        ended: list[Hashable] = [(device, b) for b in x.ends(program)]
        late: list[tuple[Access, str, str]] = []  # those that may not be done when this one starts
        if x.takes:
            for by in self.let_go[device].values():
                if clock[by.stream] < by.number:
                    late.append((by, "takes memory that", "may still use"))
        for what in read:
            if (wrote := self.writes.get(what)) and clock[wrote.stream] < wrote.number:
                late.append((wrote, "reads what", "writes"))
        for what in (*ended, *more_written):
            for by in self.reads[what].values():
                if clock[by.stream] < by.number:
                    late.append((by, "ends or changes what", "reads"))
            if (wrote := self.writes.get(what)) and clock[wrote.stream] < wrote.number:
                late.append((wrote, "ends or changes what", "writes"))
        for by, does, did in late:
            yield from self._told(by, here, does, did)
        for what in read:
            if what in self.ended:  # freed by an instruction that was launched before this copy
                yield from self._told(here, self.ended.pop(what), "ends what", "reads")
            self.reads[what][here.stream] = here
        for what in (*((device, b) for b in x.makes(program)), *more_written):
            self.writes[what] = here
            self.reads[what] = {}
        for what in ended:
            self.writes.pop(what, None)
            readers = {access.device for access in self.reads.pop(what, {}).values()}
            if isinstance(x, ins.Free) and readers <= {device}:
                _, target = program.ends_of(x.buffer)
                if target not in (HOST, device):
                    self.ended[what] = here  # before another device has copied it
        if x.lets_go:
            self.let_go[device][here.stream] = here

    def _told(self, before: Access, here: Access, does: str, did: str) -> Iterator[Fault]:
        """Report, once, that an instruction does not wait for another."""
        key = before.device, before.position, here.device, here.position
        if key in self.told:
            return
        self.told.add(key)
        program = self.program
        text = print_instruction(program.lists[before.device][before.position])
        launch = program.launches[before.device][before.position]
        event = "the event at its end" if launch.record is None else f"e{launch.record.number}"
        stream = program.launches[here.device][here.position].stream
        yield self.facts.fault(
            here.device,
            here.position,
            f"on stream {stream} it {does} {text} {did}, device {before.device}, position "
            f"{before.position}, stream {launch.stream}, and may do so before that is done",
            f"let it wait for {event} there",
        )


def _lasting(x: ins.Instruction, device: int) -> tuple[Sequence[Hashable], Sequence[Hashable]]:
    """The weights, gradients and model buffers that an instruction reads, and those it writes."""

    def named(words: str) -> list[Hashable]:
        batch = {"gradients": x.batch}
        stage = getattr(x, "stage", None)
        return [(word, stage, batch.get(word), device) for word in words.split()]

    reads, writes = x.lasting()
    return named(reads), named(writes)


def _event(event: Event, step: int) -> Event:
    return event._replace(batch=event.batch + step) if step else event

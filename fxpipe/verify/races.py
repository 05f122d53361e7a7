"""Whether streams can race: every two accesses that conflict are ordered, whatever takes how long.

An instruction is done after all that its stream was given before, and after the events that it
waits for. That order is held by vector clocks: for each stream how many of its instructions are
done when the next one starts. Three kinds of accesses conflict:

- what is read must be written before, on whichever device; gradients, weights and the model's
  buffers are read and written in the order of the list;
- what ends a buffer comes after all that reads or writes it, copies by other devices too;
- memory that is let go may be taken again by what is launched later on its device. So whatever
  takes memory comes after all that let some go before it. A computation does both.

A window that repeats is run as often as its instructions reach back, and twice more: from then on
every step is like the last. Instructions of batches that do not exist count, as they wait and
record.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from typing import NamedTuple

from fxpipe.errors import Fault
from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import Event
from fxpipe.ir.task import KINDS
from fxpipe.ir.unroll import shifted
from fxpipe.ir.value import HOST
from fxpipe.ir.walk import waits_of, walk
from fxpipe.text.program import print_instruction
from fxpipe.verify.facts import Facts


class Access(NamedTuple):
    """An instruction that touches something: the number that its stream has given it, and where."""

    stream: int
    number: int
    device: int
    position: int


def races(facts: Facts) -> Iterator[Fault]:
    """Every two accesses that conflict and that no event orders; the wait that is missing.

    It takes time in proportion to the number of instructions times that of streams.
    """
    yield from _Race(facts).run()


def recorded(facts: Facts) -> Iterator[Fault]:
    """An event is recorded by one instruction, before who waits for it."""
    program = facts.program
    records: dict[int, tuple[int, int]] = {}
    for device, own in enumerate(program.launches):
        for position, launch in enumerate(own):
            if launch.record is None:
                continue
            event = launch.record
            if event.batch:
                yield facts.fault(device, position, f"it records {event}", "record it in this step")
            elif event.number in records:
                yield facts.fault(
                    device, position, f"{event} is recorded before", "give each event its number"
                )
            records.setdefault(event.number, (device, position))
    for device, own in enumerate(program.launches):
        for position, launch in enumerate(own):
            for event in launch.waits:
                what = _wrong_wait(event, (device, position), records, program.depth)
                if what is not None:
                    yield facts.fault(device, position, *what)


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
    """One run of all lists on paper, with the clock of each stream.

    Attributes:
        clocks: stream → for each stream how many of its instructions are done before the next.
        events: event, in its step → the clock at it.
        left: event → how many will still wait for it.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        program = self.program = facts.program
        self.streams: dict[tuple[int, str], int] = {}
        for device, own in enumerate(program.launches):
            for launch in own:
                self.streams.setdefault((device, launch.stream), len(self.streams))
        self.clocks = [[0] * len(self.streams) for _ in self.streams]
        self.events: dict[Event, list[int]] = {}
        awaited = [event.number for own in program.launches for x in own for event in x.waits]
        self.awaited = Counter(awaited)
        self.left: dict[Event, int] = {}
        self.writes: dict[Hashable, Access] = {}
        self.reads: defaultdict[Hashable, dict[int, Access]] = defaultdict(dict)
        self.ended: dict[Hashable, Access] = {}
        self.let_go: list[dict[int, Access]] = [{} for _ in self.program.lists]
        self.told: set[tuple[int, int, int, int]] = set()

    def run(self) -> Iterator[Fault]:
        """Run all lists, step after step; those that get stuck, for which ``recorded`` tells why,
        up to there."""
        program = self.program
        walked = walk([len(own) for own in program.lists], waits_of(program))
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
                self.left[at] -= 1  # it is forgotten when all who wait for it have seen it
                clock[:] = map(
                    max, clock, self.events[at] if self.left[at] else self.events.pop(at)
                )
        here = Access(stream, clock[stream] + 1, device, position)
        if not isinstance(x, ins.Send | ins.Stash | ins.Output | ins.Meeting):
            yield from self._touch(shifted(x, step), clock, here)
        clock[stream] += 1
        if launch.record is not None and self.awaited[launch.record.number]:
            event = _event(launch.record, step)
            self.events[event] = clock.copy()
            self.left[event] = self.awaited[event.number]

    def _touch(self, x: ins.Instruction, clock: list[int], here: Access) -> Iterator[Fault]:
        """Check all accesses of an instruction, and keep them."""
        program, device = self.program, here.device
        more_read, more_written = _lasting(x, device)
        read: list[Hashable] = [*((device, b) for b in program.reads(x)), *more_read]
        if isinstance(x, ins.Receiving):
            read.append((program.origin(x), x.buffer))
        ended: list[Hashable] = [(device, b) for b in program.ends(x)]
        late: list[tuple[Access, str, str]] = []  # those that need not be done when this one starts
        if not isinstance(x, ins.Free | ins.Offload):
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
            if what in self.ended:  # launched before, so that it waits for no event of this copy
                yield from self._told(here, self.ended.pop(what), "ends what", "reads")
            self.reads[what][here.stream] = here
        for what in (*((device, b) for b in program.writes(x)), *more_written):
            self.writes[what] = here
            self.reads[what] = {}
        for what in ended:
            self.writes.pop(what, None)
            readers = {other.device for other in self.reads.pop(what, {}).values()}
            if isinstance(x, ins.Free) and readers <= {device}:
                _, target = program.ends_of(x.buffer)
                if target not in (HOST, device):
                    self.ended[what] = here  # before the copy that another device makes of it
        if not isinstance(x, ins.Arrival | ins.Offload | ins.Prefetch):
            self.let_go[device][here.stream] = here

    def _told(self, other: Access, here: Access, does: str, did: str) -> Iterator[Fault]:
        """The fault of an instruction that does not wait for another, once."""
        key = other.device, other.position, here.device, here.position
        if key in self.told:
            return
        self.told.add(key)
        program = self.program
        text = print_instruction(program.lists[other.device][other.position])
        launch = program.launches[other.device][other.position]
        event = "the event at its end" if launch.record is None else f"e{launch.record.number}"
        stream = program.launches[here.device][here.position].stream
        yield self.facts.fault(
            here.device,
            here.position,
            f"on stream {stream} it {does} {text} {did}, device {other.device}, position "
            f"{other.position}, stream {launch.stream}, and may do so before that is done",
            f"let it wait for {event} there",
        )


def _lasting(x: ins.Instruction, device: int) -> tuple[tuple[Hashable, ...], tuple[Hashable, ...]]:
    """What an instruction reads and writes that outlives a micro-batch: weights, sums, buffers."""
    if isinstance(x, ins.Move | ins.Meeting):
        return (), ()
    weights: Hashable = ("weights", x.stage, device)
    sums: Hashable = ("gradients", x.stage, x.batch, device)
    match x:
        case ins.Forward(stage):
            return (weights,), (("buffers", stage, device),)
        case ins.PartialBackward() | ins.Backward() | ins.WeightGrad():
            return (weights,), (sums,)
        case ins.Update():
            return (), (weights, sums)
        case ins.Run(kind):
            changes = kind in KINDS and "gradients" in KINDS[kind].writes
            return (weights, sums), ((sums,) if changes else ())
        case ins.Norm():
            return (sums,), ()
        case ins.GatherWeights():
            return (), (weights,)
        case ins.ReduceScatter() | ins.AllGather() | ins.TakePart() | ins.Clip():
            return (), (sums,)
        case ins.Give() | ins.Add():
            return (), (sums,)
    return (weights,), ()


def _event(event: Event, step: int) -> Event:
    return event._replace(batch=event.batch + step) if step else event

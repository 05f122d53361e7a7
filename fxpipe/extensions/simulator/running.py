"""Run a program in simulated time, with the links between devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Any

from fxpipe.errors import InputError
from fxpipe.extensions.exchange import Exchange
from fxpipe.extensions.simulator.costs import Each, Links, Times, check_links, link_between
from fxpipe.extensions.simulator.pairs import Backward, backward
from fxpipe.extensions.simulator.simulation import Events, TransferSpan
from fxpipe.extensions.simulator.sizes import Sizes
from fxpipe.extensions.simulator.sums import begins
from fxpipe.extensions.simulator.sums import beside as awaits
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.value import COPIED, Buffer
from fxpipe.text.program import print_instruction

Saved = Mapping[Backward, tuple[int, int, float]]
"""The second task of each pair → stage and micro-batch of its forward, and the time by which the
pair is shorter than both tasks in turn."""


def begin_run(
    program: Program,
    times: Times,
    each: Each,
    less: Saved,
    *,
    links: Links | None,
    serial: bool,
    sizes: Sizes | None,
) -> tuple[Events, Callable[[int, int], None]]:
    """The times of all instructions, empty at first, and a function that fills them: it runs a
    device's list up to a position, which is to be called in an order in which instructions can run.

    ``less`` has the time that pairs save; all else is as for ``simulate``.
    """
    lists = program.lists
    events = Events(tuple([] for _ in lists), tuple([] for _ in lists))
    transfers = events.transfers
    ways, in_time = _Ways(program, links, sizes), shared(links)
    pending: list[tuple[float, int, int, Exchange]] = []  # sums that have not begun
    met: list[dict[type[ins.Instruction], int]] = [{ins.Barrier: 0, ins.Pause: 0} for _ in lists]
    meetings: dict[tuple[type[ins.Instruction], int], float] = {}
    lanes: dict[tuple[int, type[ins.Instruction]], float] = {}
    last: dict[int, tuple[int, int]] = {}  # device → the forward that it has just run
    now: float = 0
    device = position = 0

    def end_of(awaited: Buffer | Exchange) -> float:
        if awaited not in transfers:
            raise InputError(
                f"program {program.name!r}: device {device}, position {position}, "
                f"{print_instruction(lists[device][position])}: nothing begins what it waits for; "
                "Program.verify() tells what is missing"
            )
        return transfers[awaited].end

    def move(what: Buffer | Exchange, target: int, ready: float, start: float, end: float) -> None:
        transfers[what] = TransferSpan(what, device, target, position, ready, start, end)

    def sum_at(ready: float, sums: Exchange) -> None:
        """Begin to sum, or note it: another device may send before over the same link."""
        if in_time:
            heappush(pending, (ready, device, position, sums))
        else:
            move(sums, device, ready, *ways.carry(sums, device, device, ready))

    def begin(until: float) -> None:
        while pending and pending[0][0] <= until:
            ready, own, at, sums = heappop(pending)
            start, end = ways.carry(sums, own, own, ready)
            transfers[sums] = TransferSpan(sums, own, own, at, ready, start, end)

    def advance(to: int, stop: int) -> None:
        nonlocal now, device, position
        device = to
        starts, ends = events.starts[device], events.ends[device]
        now = now if serial else events.free(device)
        if pending:
            begin(now)
        for position in range(len(ends), stop):
            x = lists[device][position]
            starts.append(now)
            if (letter := x.letter) is not None:
                stage: int = x.stage
                time = each.get((letter, stage, getattr(x, "microbatch", -1)), times[letter, stage])
                if less:
                    *forward, time_saved = less.get(backward(x), (-1, -1, 0))
                    if last.pop(device, None) == tuple(forward):
                        time -= time_saved
                    if isinstance(x, ins.Forward):
                        last[device] = stage, x.microbatch
                parted = x.partial or getattr(x, "rest", False)
                now += time / program.buckets[stage] if parted else time
            elif isinstance(x, ins.Send):
                target = program.destination(x)
                start, end = ways.carry(x.buffer, device, target, now)
                move(x.buffer, target, now, start, end)
                now = ways.sent(device, target, now, start, end)
            elif isinstance(x, ins.Receive):
                now = max(now, transfers[x.buffer].end)
            elif (copy := begins(x)) is not None:
                lane = device, type(x)
                letter, ready = "O", now
                if copy.kind == "fetching":
                    letter = "P"
                    ready = max(now, end_of(copy._replace(kind="offloaded")))
                start = max(ready, lanes.get(lane, ready))
                time = times[letter, copy.source]
                time = each.get((letter, copy.source, copy.microbatch), time)
                lanes[lane] = start + time
                move(copy, device, ready, start, start + time)
            elif (moved := awaits(x)) is not None:
                now = max(now, end_of(moved))
            elif isinstance(x, ins.Meeting):
                meeting = type(x), met[device][type(x)]
                met[device][type(x)] += 1
                if meeting not in meetings:  # no device is past it yet
                    meetings[meeting] = max(map(events.free, range(len(lists))))
                now = max(now, meetings[meeting])
            if (begun := x.begins(program)) is not None:
                sum_at(now, begun)
            if (awaited := x.awaits(program)) is not None:
                now = max(now, end_of(awaited))
            ends.append(now)
            if pending and len(ends) == len(lists[device]):
                begin(inf if all(map(_over, events.ends, lists)) else now)

    return events, advance


def shared(links: Links | None) -> bool:
    """Whether several devices may send over one link."""
    some = links.values() if isinstance(links, Mapping) else [links]
    return any(link is not None and link.of for link in some)


def _over(ends: Sequence[float], row: Sequence[ins.Instruction]) -> bool:
    return len(ends) == len(row)


class _Ways:
    """The links, and until when each is occupied."""

    def __init__(self, program: Program, links: Links | None, sizes: Sizes | None) -> None:
        self._links = links
        self._sizes = sizes or Sizes()
        self._program = program
        self._known: dict[tuple[str, str, int], int] = {}
        self._taken: dict[tuple[int, int] | str, float] = {}
        check_links(links, program.devices)

    def carry(
        self, buffer: Buffer | Exchange, source: int, target: int, now: float
    ) -> tuple[float, float]:
        """When a value that is ready now has the link for itself, and when it has arrived."""
        if self._links is None:
            return now, now
        link = link_between(self._links, source, target)
        way = link.of or (source, target)
        start = max(now, self._taken.get(way, now))
        occupied = 0 if link.bandwidth == inf else self._bytes(buffer) / link.bandwidth
        self._taken[way] = start + occupied
        ways = buffer.ways if isinstance(buffer, Exchange) else 1
        return start, self._taken[way] + ways * link.latency

    def sent(self, source: int, target: int, now: float, start: float, end: float) -> float:
        """When the device goes on that has sent a value."""
        if self._links is None:
            return now
        share = link_between(self._links, source, target).occupies
        return max(now, start + share * (end - start)) if share else now

    def _bytes(self, buffer: Buffer | Exchange) -> int:
        """The bytes that cross; between replicas, those of the replica that sends the most."""
        sizes = self._sizes
        if isinstance(buffer, Buffer):
            of = buffer.kind, buffer.value, buffer.source  # the same for all micro-batches
            if of in self._known:
                return self._known[of]
        known: Mapping[Any, object]
        key: str | int
        carried = ""
        if isinstance(buffer, Exchange):
            key, what = buffer.stage, buffer.of[0]
            known = {stage: 0 for name in buffer.of for stage in getattr(sizes, name)}
            carried = f"the {what} of stage {key}"
        elif buffer.kind == "norm":
            return 0  # a few numbers
        elif buffer.kind in COPIED:
            key, what = buffer.source, "parameters" if buffer.kind == "weights" else "gradients"
            known = getattr(sizes, what)
        else:
            key, what, known = buffer.value, "values", sizes.values
        if key not in known:
            raise InputError(
                f"a link of limited bandwidth carries {carried or buffer}, whose size is not "
                f"known; give sizes=Sizes({what}={{{key!r}: bytes}})"
            )
        if not isinstance(buffer, Exchange):
            self._known[of] = sizes.crossing(buffer)
            return self._known[of]
        return buffer.most(sizes, self._program)

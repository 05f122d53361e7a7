"""When every instruction starts and ends, and every value leaves and arrives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from fxpipe.errors import InputError
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program, Turn
from fxpipe.ir.value import Buffer
from fxpipe.simulator.costs import TASKS, Link, Links, Times
from fxpipe.simulator.sizes import Sizes


class Transfer(NamedTuple):
    """A value on its way from one device to another.

    Attributes:
        buffer: the value.
        source: the device that sends it.
        target: the device that receives it.
        position: of the send or stash in its device's list.
        ready: when it could leave.
        start: when it has the link for itself.
        end: when it has arrived.
    """

    buffer: Buffer
    source: int
    target: int
    position: int
    ready: float
    start: float
    end: float


@dataclass(frozen=True)
class Events:
    """What happened when.

    An instruction that computes nothing starts when the one before it is done, and ends when it has
    stopped waiting; one that computes starts when it has.

    Attributes:
        starts: device → the start of each instruction that ran.
        ends: device → the end of each.
        transfers: value → its way.
    """

    starts: tuple[list[float], ...]
    ends: tuple[list[float], ...]
    transfers: dict[Buffer, Transfer] = field(default_factory=dict)

    def free(self, device: int) -> float:
        """When a device has run all that it ran."""
        return self.ends[device][-1] if self.ends[device] else 0


def run(
    program: Program,
    turns: Iterable[Turn],
    times: Times,
    *,
    links: Links | None = None,
    overlap: bool = True,
    overhead: float = 0,
    sizes: Sizes | None = None,
) -> Events:
    """Give every instruction its time, in an order in which they can run.

    A device runs its list in order, each instruction as soon as the one before it is done and
    what it waits for is there. Integer times stay exact.

    Args:
        program: what runs; an instruction is written once in it.
        turns: an order in which they can run.
        times: letter and stage → time.
        links: what transfers take; None for no time at all.
        overlap: whether a device computes while it sends. Without, it waits until the value has
            arrived.
        overhead: the time of an instruction that computes nothing, after it has waited.
        sizes: the bytes that links carry.

    Raises:
        InputError: two devices that talk have no link, or one of limited bandwidth carries a
            value whose size is unknown.
    """
    lists = program.lists
    events = Events(tuple([] for _ in lists), tuple([] for _ in lists))
    transfers = events.transfers
    ways = _Ways(program, links, sizes)
    met: list[dict[type[ins.Instruction], int]] = [{ins.Barrier: 0, ins.Pause: 0} for _ in lists]
    meetings: dict[tuple[type[ins.Instruction], int], float] = {}
    for device, stop in turns:
        starts, ends = events.starts[device], events.ends[device]
        now = events.free(device)
        for position in range(len(ends), stop):
            instruction = lists[device][position]
            starts.append(now)
            if isinstance(instruction, TASKS):
                now += times[ins.LETTERS[type(instruction)], instruction.stage]
            else:
                match instruction:
                    case ins.Send(buffer) | ins.Stash(buffer):
                        now += overhead
                        target = program.destination(instruction)
                        start, end = ways.carry(buffer, device, target, now)
                        transfers[buffer] = Transfer(
                            buffer, device, target, position, now, start, end
                        )
                        if not overlap:
                            now = end
                    case ins.Receive(buffer) | ins.Pop(buffer):
                        now = max(now, transfers[buffer].end) + overhead
                    case ins.Run(letter, stage):
                        now += times[letter, stage]
                    case ins.Barrier() | ins.Pause():
                        kind = type(instruction)
                        meeting = kind, met[device][kind]
                        met[device][kind] += 1
                        if meeting not in meetings:
                            # nobody is past it yet
                            meetings[meeting] = max(map(events.free, range(len(lists))))
                        now = max(now, meetings[meeting]) + overhead
                    case _:
                        now += overhead
            ends.append(now)
    return events


class _Ways:
    """The links, and until when each is taken."""

    def __init__(self, program: Program, links: Links | None, sizes: Sizes | None) -> None:
        self._links = links
        self._sizes = sizes
        self._taken: dict[tuple[int, int], float] = {}
        if links is not None and not isinstance(links, Link | Mapping):
            raise InputError(
                f"links is {links!r}; give one Link(latency, bandwidth), or one for each pair of "
                "devices"
            )
        if isinstance(links, Mapping):
            for pair, link in links.items():
                if not isinstance(link, Link) or not all(
                    device in range(program.devices) for device in pair
                ):
                    raise InputError(
                        f"links[{pair!r}] is {link!r}; map pairs of the devices 0 to "
                        f"{program.devices - 1} to Link(latency, bandwidth)"
                    )

    def carry(self, buffer: Buffer, source: int, target: int, now: float) -> tuple[float, float]:
        """When a value that is ready now has the link for itself, and when it has arrived."""
        if self._links is None:
            return now, now
        pair = source, target
        if isinstance(self._links, Link):
            link = self._links
        elif pair in self._links:
            link = self._links[pair]
        else:
            raise InputError(
                f"device {source} sends to device {target} and links has no such pair; add "
                f"links[{source}, {target}] = Link(latency, bandwidth)"
            )
        start = max(now, self._taken.get(pair, now))
        self._taken[pair] = start + self._occupied(buffer, link)
        return start, self._taken[pair] + link.latency

    def _occupied(self, buffer: Buffer, link: Link) -> float:
        if link.bandwidth == inf or buffer.kind == "norm":
            return 0  # a few numbers
        if self._sizes is None or buffer.value not in self._sizes.values:
            raise InputError(
                f"a link of limited bandwidth carries {buffer}, whose size is not known; give "
                f"sizes=Sizes(values={{{buffer.value!r}: bytes}})"
            )
        return self._sizes.values[buffer.value] / link.bandwidth

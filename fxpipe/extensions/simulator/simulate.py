"""Simulate a program, or a schedule without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from numbers import Integral
from types import MappingProxyType
from typing import Any

from fxpipe.errors import InputError
from fxpipe.extensions.simulator.chain import Edges, chain_program
from fxpipe.extensions.simulator.costs import (
    Costs,
    Each,
    Links,
    Times,
    each_of,
    seconds_of,
    times_of,
)
from fxpipe.extensions.simulator.pairs import Backward, Pairs, pairs_in
from fxpipe.extensions.simulator.running import Saved, begin_run, shared
from fxpipe.extensions.simulator.simulation import Simulation
from fxpipe.extensions.simulator.sizes import Sizes
from fxpipe.extensions.simulator.unroll import blocking, unroll
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program, Turn
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.value import FURTHEST
from fxpipe.ir.walk import waits_of, walk
from fxpipe.text.program import print_instruction


def simulate(
    program: Program,
    costs: Costs | None = None,
    *,
    links: Links | None = None,
    serial: bool = False,
    sizes: Sizes | None = None,
    steps: int | None = None,
    pairs: Pairs = MappingProxyType({}),
) -> Simulation:
    """Compute when each instruction of a program would run.

    Every device runs its list in order, each instruction as soon as the one before it is done and
    what it waits for is there. Instructions that compute nothing take no time of their own.

    If devices have streams, an arrival holds up only the tasks that use it.

    Args:
        program: a program with its communication in place.
        costs: letter of a kind of task, or (letter, stage), or (letter, stage, micro-batch) → time;
            by default the kind's own cost, in which a forward takes 1. Integers stay exact. A
            ``Time`` for tasks in which devices also exchange values.
        links: the latency and bandwidth of the link from one device to another, one for all or
            (from, to) → Link, in the unit of the costs; None for transfers that take no time.
            Gradients go to the other replicas by the link from a device to itself.
        serial: whether one thread runs the lists of all devices in turns.
        sizes: bytes, for memory and for links of limited bandwidth.
        steps: how many steps in a row, with a flush after the last; by default one, or, if batches
            overlap, enough to show what goes on between them.
        pairs: the tasks that run together; see ``together``.

    Raises:
        InputError: costs, links, sizes or steps are not valid, the program's communication is not
            in place, or the program gets stuck.
    """
    if "communicate" not in program.passes:
        raise InputError(
            f"program {program.name!r} has no communication yet, and nothing would wait for "
            "anything; run it through communicate first"
        )
    usual = default_steps(program)
    count = usual if steps is None else steps
    if not isinstance(count, Integral):
        raise InputError(f"steps is {count!r}; give a whole number of at least 1")
    walked = WalkedProgram.of(program, count, pairs, repeats=count != 1 or usual != 1)
    return walked.run(costs, links=links, serial=serial, sizes=sizes)


@dataclass(frozen=True)
class WalkedProgram:
    """A program with all that its simulations have in common, whatever tasks cost.

    Attributes:
        given: the program of one step.
        window: the same without streams.
        flat: all steps in a row.
        steps: how many.
        turns: an order in which the instructions can run.
        pairs: the tasks that run together.
    """

    given: Program
    window: Program
    flat: Program
    steps: int
    turns: Sequence[Turn]
    pairs: Pairs

    @staticmethod
    def of(program: Program, steps: int, pairs: Pairs, *, repeats: bool) -> WalkedProgram:
        """Walk through some steps of a program, which are unrolled if it ``repeats``.

        Raises:
            InputError: it gets stuck.
        """
        window = blocking(program)
        flat = unroll(window, steps) if repeats else window
        walked = walk([len(list_) for list_ in flat.lists], waits_of(flat))
        for device, (at, *_) in sorted(walked.stuck.items()):
            raise InputError(
                f"program {program.name!r} gets stuck: device {device} waits for ever at position "
                f"{at}, {print_instruction(flat.lists[device][at])}; Program.verify() tells why"
            )
        return WalkedProgram(program, window, flat, steps, walked.turns, pairs)

    def run(
        self,
        costs: Costs | None,
        *,
        links: Links | None,
        serial: bool = False,
        sizes: Sizes | None = None,
    ) -> Simulation:
        """Simulate it; the arguments are those of ``simulate``."""
        given, window, flat, pairs = self.given, self.window, self.flat, self.pairs
        times = times_of(window.stages, self.letters, costs)
        each = each_of(costs, window.microbatches)
        unpaired = [key for key in costs or {} if "&" in str(key)] if not pairs else []
        if unpaired:
            raise InputError(
                f"costs[{unpaired[0]!r}] is for pairs, and program {given.name!r} has none; leave "
                "it out, or simulate a schedule with pairs, such as F1&B0"
            )
        less = _saved(pairs, times, each, costs)
        settings: dict[str, Any] = {"links": links, "serial": serial, "sizes": sizes}
        events, advance = begin_run(flat, times, each, less, **settings)
        if shared(links):  # what is ready first takes the link first
            lengths = [len(list_) for list_ in flat.lists]

            def clock(device: int, position: int) -> float:
                advance(device, position + 1)
                return events.ends[device][position]

            walk(lengths, waits_of(flat), clock)
        else:
            for device, stop in self.turns:
                advance(device, stop)
        same = partial(simulate, given, costs, pairs=pairs, **settings)

        def with_costs(
            costs: Costs | None, links: Links | None = links, sizes: Sizes | None = sizes
        ) -> Simulation:
            return self.run(costs, links=links, serial=serial, sizes=sizes)

        return Simulation(
            flat,
            window,
            self.steps,
            events,
            sizes,
            serial=serial,
            again=lambda more: same(steps=more),
            other=with_costs,
            pairs=pairs,
            launched=unroll(given, self.steps) if given.launches else None,
        )

    @cached_property
    def letters(self) -> list[str]:
        """The letters of its tasks."""
        return sorted({x.letter for list_ in self.window.lists for x in list_ if x.letter})


def simulate_schedule(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    links: Links | None = None,
    sizes: Sizes | None = None,
    steps: int | None = None,
    replicas: int | None = None,
    edges: Edges = MappingProxyType({}),
) -> Simulation:
    """Simulate a schedule for stages that each hand one value to those that they feed.

    The arguments are those of ``simulate``; in ``sizes``, stage s makes the value ``y<s>``. With
    several ``replicas``, each stage gets an A if the schedule has none; with one, an A does
    nothing. By default there are two if the schedule has an A, else one, as in its pictures.

    Besides, values go along ``edges``, from the stage that makes one to a later stage: ``{"skip":
    (0, 3)}``. Their gradients come back.

    Raises:
        VerificationError: the schedule is not valid.
        InputError: as for ``simulate``, or ``replicas`` is no number of at least 1, or an edge does
            not lead to a later stage.
    """
    if replicas is not None and (not isinstance(replicas, Integral) or replicas < 1):
        raise InputError(f"replicas is {replicas!r}; give a whole number of at least 1")
    if sizes is not None and not isinstance(sizes, Sizes):
        raise InputError(f"sizes is {sizes!r}; give Sizes(...)")
    pairs = pairs_in(schedule.verify())
    # the sums of a paired backward begin at its end
    buckets = {} if sizes is None or pairs else sizes.buckets
    program = chain_program(schedule, replicas=replicas, buckets=buckets, skips=edges)
    found = simulate(program, costs, links=links, sizes=sizes, steps=steps, pairs=pairs)
    return replace(found, slices=schedule.slices)


def default_steps(program: Program) -> int:
    """One step if it ends with a flush, else enough to show what goes on between batches."""
    computes = (x for list_ in program.lists for x in list_ if isinstance(x, ins.Compute))
    delay = max((x.batch - x.version for x in computes), default=0)
    reach = max(program.depth, delay)
    if reach > FURTHEST:
        raise InputError(
            f"program {program.name!r} reaches {reach} batches back; at most {FURTHEST} are "
            "simulated"
        )
    return 4 * (reach + 1) if reach else 1


def _saved(pairs: Pairs, times: Times, each: Each, costs: Costs | None) -> Saved:
    """How much time pairs save; without a cost, as ``costs["F&B"]``, nothing.

    A cost may be of a stage or a micro-batch, those of the pair's forward.

    Raises:
        InputError: a pair is longer than its tasks in turn, or shorter than one of them.
    """
    known: Mapping[Any, float] = seconds_of(costs)
    found: dict[Backward, tuple[int, int, float]] = {}
    for (letter, stage, i), (there, j) in pairs.items():
        first = each.get(("F", there, j), times["F", there])
        then = each.get((letter, stage, i), times[letter, stage])
        key = f"F&{letter}"
        cost = known.get((key, there, j), known.get((key, there), known.get(key, first + then)))
        if not max(first, then) <= cost <= (first + then) * (1 + 1e-9):
            raise InputError(
                f"costs[{key!r}] is {cost!r} for F{j}@{there}&{letter}{i}@{stage}, whose tasks "
                f"take {first:g} and {then:g}; give a time from {max(first, then):g} to "
                f"{first + then:g}"
            )
        found[letter, stage, i] = there, j, first + then - cost
    return found

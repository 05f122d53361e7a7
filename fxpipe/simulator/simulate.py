"""Simulate a program, or a schedule without a model, whose stages each hand on one value."""

from __future__ import annotations

from math import inf

import torch
from torch import fx

from fxpipe.errors import InputError
from fxpipe.ir.blocking import blocking
from fxpipe.ir.instruction import Compute
from fxpipe.ir.plan import Plan, Stage
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.unroll import FURTHEST, unroll
from fxpipe.ir.value import HOST, Edge
from fxpipe.ir.walk import waits_of, walk
from fxpipe.simulator.costs import Costs, Links, task_times
from fxpipe.simulator.events import run
from fxpipe.simulator.simulation import Simulation, Span
from fxpipe.simulator.sizes import Sizes
from fxpipe.text.instruction import print_instruction


def simulate(
    program: Program,
    costs: Costs | None = None,
    *,
    links: Links | None = None,
    overlap: bool = True,
    overhead: float = 0,
    sizes: Sizes | None = None,
    steps: int | None = None,
    stuck_ok: bool = False,
) -> Simulation:
    """Run a program on paper.

    Every device runs its list in order, each instruction as soon as the one before it is done and
    what it waits for is there. Instructions that compute nothing take no time of their own.

    Where devices have streams, an arrival holds up only what uses it.

    Args:
        program: a program with its communication in place.
        costs: letter of a kind of task, or (letter, stage) → time; by default the kind's own, in
            which a forward takes 1. Integers stay exact.
        links: the latency and bandwidth of the way from one device to another, one for all or
            (from, to) → Link, in the unit of the costs; None for transfers that take no time.
        overlap: whether a device computes while it sends. Without, it waits until the value has
            arrived.
        overhead: the time of an instruction that computes nothing, after it has waited.
        sizes: bytes, for memory and for links of limited bandwidth.
        steps: how many steps in a row, and the flush after the last; by default one, or, where
            batches overlap, enough for everything to have come into its stride.
        stuck_ok: simulate also a program that gets stuck, up to there.

    Raises:
        InputError: costs, links, sizes or steps do not fit, the program's communication is not in
            place, or it gets stuck.
    """
    if "communicate" not in program.passes:
        raise InputError(
            f"program {program.name!r} has no communication yet, and nothing would wait for "
            "anything; run it through communicate first"
        )
    program = blocking(program)
    times = task_times(program, costs)
    if not 0 <= overhead < inf:
        raise InputError(f"overhead is {overhead}; give a time of at least 0")
    usual = default_steps(program)
    count = usual if steps is None else steps
    if not isinstance(count, int):
        raise InputError(f"steps is {count!r}; give a whole number of at least 1")
    flat = program if count == usual == 1 else unroll(program, count)
    walked = walk([len(own) for own in flat.lists], waits_of(flat))
    events = run(
        flat, walked.turns, times, links=links, overlap=overlap, overhead=overhead, sizes=sizes
    )
    stuck = tuple(
        Span(device, events.free(device), inf, flat.lists[device][at], at)
        for device, (at, *_) in sorted(walked.stuck.items())
    )
    if stuck and not stuck_ok:
        first = stuck[0]
        raise InputError(
            f"program {program.name!r} gets stuck: device {first.device} waits for ever at "
            f"position {first.position}, {print_instruction(first.instruction)}; "
            "Program.verify() tells why"
        )

    def again(more: int) -> Simulation:
        return simulate(
            program,
            costs,
            links=links,
            overlap=overlap,
            overhead=overhead,
            sizes=sizes,
            steps=more,
        )

    return Simulation(flat, program, count, events, sizes, stuck, again=again)


def simulate_schedule(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    links: Links | None = None,
    overlap: bool = True,
    sizes: Sizes | None = None,
    steps: int | None = None,
) -> Simulation:
    """Run a schedule on paper, of stages that each hand one value to the next.

    The value that stage s makes is ``y<s>``, for ``sizes``; the arguments are those of
    ``simulate``.

    Raises:
        VerificationError: the schedule is not valid.
        InputError: as ``simulate``.
    """
    program = chain_program(schedule.verify())
    return simulate(program, costs, links=links, overlap=overlap, sizes=sizes, steps=steps)


def default_steps(program: Program) -> int:
    """One step where it ends with a flush, else as many as show what goes on between batches."""
    delay = max(
        (x.batch - x.version for own in program.lists for x in own if isinstance(x, Compute)),
        default=0,
    )
    reach = max(program.depth, delay)
    if reach > FURTHEST:
        raise InputError(
            f"program {program.name!r} reaches {reach} batches back; at most {FURTHEST} are "
            "simulated"
        )
    return 4 * (reach + 1) if reach else 1


def chain(stages: int) -> Plan:
    """Input ``x`` → ``y0`` → ``y1`` → … → ``loss``; the stages have no work in them."""
    values = ["x", *(f"y{stage}" for stage in range(stages - 1)), "loss"]
    ends = [HOST, *range(stages), HOST]
    edges = tuple(
        Edge(ends[k], ends[k + 1], value, gradient=k > 0) for k, value in enumerate(values)
    )
    return Plan(tuple(map(_empty, range(stages))), edges)


def chain_program(schedule: Schedule, *, frees: bool = True) -> Program:
    """Lower a verified schedule over a chain, with or without the frees."""
    from fxpipe.passes.lowering.communicate import communicate
    from fxpipe.passes.lowering.free import free
    from fxpipe.passes.lowering.lower import Lower

    lower = Lower(chain(schedule.stages), updates="U" in schedule.kinds)
    program = communicate(lower(schedule))
    return free(program) if frees else program


def _empty(index: int) -> Stage:
    graph = fx.Graph()
    graph.output(())
    return Stage(index, (), (), (), fx.GraphModule(torch.nn.Module(), graph))

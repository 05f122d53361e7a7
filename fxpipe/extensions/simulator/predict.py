"""Predict by simulation the seconds and bytes of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor
from torch.optim import Optimizer

from fxpipe.compiler.compiled import Compiled
from fxpipe.compiler.options import Options
from fxpipe.errors import InputError
from fxpipe.extend import find
from fxpipe.extensions.simulator import Simulation, simulate
from fxpipe.extensions.simulator.away import away_costs
from fxpipe.extensions.simulator.costs import Costs, Key, Link, Links, check_keys, measured_costs
from fxpipe.extensions.simulator.held import plan_sizes
from fxpipe.extensions.simulator.sizes import Sizes
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program


def predict_step(
    plan: Plan,
    program: Program,
    sizes: Sizes,
    costs: Costs | None = None,
    *,
    links: Links | None = None,
    serial: bool = False,
    steps: int | None = None,
    away: tuple[float, float] | None = None,
) -> Simulation:
    """Simulate a program with the costs that were measured on its plan.

    Args:
        costs: costs by kind of task; they replace the measured ones of that kind.
        serial: whether one thread runs the lists of all devices.
        away: the bytes per second that offloads store and fetch; by default as measured.

    Raises:
        InputError: nothing was measured and no costs are given, or the given costs do not fit.
    """
    check_keys(costs)
    given: dict[Key, float] = dict((costs or {}).items())
    place = next((spec.device for spec in plan.specs.values()), "cpu")
    measured = measured_costs(plan) | away_costs(plan, program, sizes, away or place)
    if not (known := {key: t for key, t in measured.items() if key[0] not in given} | given):
        raise InputError(
            "nothing was measured on this plan; give costs=, such as those of pipe.profile(...)"
        )
    found = simulate(program, known, links=links, serial=serial, sizes=sizes, steps=steps)
    return replace(found, seconds=True)


def given_links(options: Options) -> Links | None:
    """The links between devices of the ``Partition``; None if it has none."""
    links = options.partition.links(len(options.devices))
    return {pair: Link(*link) for pair, link in links.items()} or None


def peaks(
    compiled: Compiled,
    options: Options,
    state: Mapping[str, Tensor],
    own: Sequence[Optimizer | None],
) -> list[int]:
    """Device → the most bytes that it is predicted to hold in a step; see ``held_sizes``."""
    return _peaks(compiled, held_sizes(compiled, options, state, own, stepping=True))


def step_peaks(compiled: Compiled, options: Options, updates: bool) -> list[int]:
    """Device → the most bytes that it is predicted to hold in a step; see ``step_sizes``."""
    return _peaks(compiled, step_sizes(compiled, options, updates))


def _peaks(compiled: Compiled, sizes: Sizes) -> list[int]:
    """If nothing was measured, tasks take units of time."""
    costs = None if measured_costs(compiled.plan) else {"F": 1.0}
    predicted = predict_step(compiled.plan, compiled.whole(), sizes, costs)
    return [memory.peak for memory in predicted.memory]


def held_sizes(
    compiled: Compiled,
    options: Options,
    state: Mapping[str, Tensor],
    own: Sequence[Optimizer | None] | None,
    *,
    stepping: bool,
) -> Sizes:
    """Count the bytes that the stages of all processes and their optimizers hold.

    Args:
        state: name in the model → parameter or buffer.
        own: stage → the optimizer that this process has; None if it has none yet.
        stepping: whether optimizers step. Those that this process does not have are then made, only
            to be counted. If they are sharded, all are made, with the parameters of the replica
            that has the largest share.
    """
    plan, given = compiled.plan, options.optimizer if stepping else None
    optimizers = [*(own or [None] * len(plan.stages))]
    elsewhere = {s.index for s in plan.stages if own is not None and not options.owns(s.index)}
    for stage in plan.stages:
        parameters = {a.target: state[a.target] for a in stage.parameters}
        missing = own is None or stage.index in elsewhere or options.shards
        if given is not None and parameters and missing:
            if options.shards:
                parameters = _largest_share(parameters, options.replicas)
            optimizers[stage.index] = given.of(parameters)
    return plan_sizes(
        plan,
        state,
        optimizers,
        early=compiled.program.window if options.ranks else 0,
        elsewhere=elsewhere,
    )


def _largest_share(parameters: Mapping[str, Tensor], replicas: int) -> dict[str, Tensor]:
    """The parameters that the replica with the most bytes updates."""
    by = find("option", "owners")([p.nbytes for p in parameters.values()], replicas)
    shares: list[dict[str, Tensor]] = [{} for _ in range(replicas)]
    for of, (name, parameter) in zip(by, parameters.items(), strict=True):
        shares[of][name] = parameter
    return max(shares, key=lambda share: sum(p.nbytes for p in share.values()))


def step_sizes(compiled: Compiled, options: Options, updates: bool) -> Sizes:
    """The bytes that the stages hold in a step. Without ``optimizer=``, the state of an Adam that
    the caller steps is included."""
    state = compiled.traced.state_of(options.model)
    sizes = held_sizes(compiled, options, state, None, stepping=updates)
    if updates:
        return sizes
    adam = {s: 2 * size for s, size in sizes.gradients.items()}
    return replace(sizes, optimizer={s: size + adam[s] for s, size in sizes.optimizer.items()})

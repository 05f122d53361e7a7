"""A pipeline's figures: predicted from its plan, and measured while it trains."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fxpipe.errors import InputError
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.memory.held import Resting, sizes_of, undo_bytes
from fxpipe.memory.optimizer import optimizer_memory
from fxpipe.simulator import Simulation, simulate
from fxpipe.simulator.costs import Costs, Key, Links, measured_costs
from fxpipe.simulator.sizes import Sizes


def plan_sizes(
    plan: Plan,
    state: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer | None],
    schedule: Schedule,
) -> Sizes:
    """The bytes that a plan's stages hold, with the state of their optimizers after a step.

    Args:
        plan: the plan.
        state: name in the model → parameter or buffer.
        optimizers: stage → its optimizer.
        schedule: the schedule; where its batches overlap, updates keep more so that they can be
            undone.
    """
    if not any(optimizers):
        return sizes_of(plan, state)
    resting = {
        stage: _resting(optimizer, schedule)
        for stage, optimizer in enumerate(optimizers)
        if optimizer is not None
    }
    return sizes_of(plan, state, resting)


def _resting(optimizer: Optimizer, schedule: Schedule) -> Resting:
    state, step = optimizer_memory(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    trained = sum(p.nbytes for p in parameters if p.requires_grad)
    undo = undo_bytes(schedule, state, sum(p.nbytes for p in parameters), trained)
    if schedule.predict:  # batches read copies, beside which the newest version is kept
        state += trained
    return Resting(state, step, int(undo))


def predict(
    plan: Plan,
    program: Program,
    sizes: Sizes,
    costs: Costs | None,
    *,
    links: Links | None,
    overlap: bool,
    steps: int | None,
) -> Simulation:
    """Simulate a program with the costs that were measured on its plan.

    Raises:
        InputError: nothing was measured and no costs are given, or the given costs do not fit.
    """
    given: dict[Key, float] = dict((costs or {}).items())
    # costs that are given for a kind of task replace those that were measured for it
    known = {key: t for key, t in measured_costs(plan).items() if key[0] not in given} | given
    if not known:
        raise InputError(
            "nothing was measured on this plan; give costs=, such as those of pipe.profile(...)"
        )
    found = simulate(program, known, links=links, overlap=overlap, sizes=sizes, steps=steps)
    return replace(found, seconds=True)


def predicted_peaks(plan: Plan, program: Program, sizes: Sizes) -> list[int]:
    """Device → the most bytes that it is predicted to hold, as ``pipe.simulate()`` shows it."""
    found = predict(plan, program, sizes, None, links=None, overlap=True, steps=None)
    return [memory.peak for memory in found.memory]


def split_target(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Any]:
    """Inputs and target of a call such as ``profile(x, y)``.

    The last argument is the target if the model's forward does not take that many arguments.
    """
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return args[:-1], args[-1] if args else None
    return args, None

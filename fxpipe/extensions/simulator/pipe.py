"""What a pipe predicts, and what it measures: ``pipe.simulate`` and ``pipe.profile``."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from fxpipe.arguments import check_whole
from fxpipe.compiler.compiled import Compiled
from fxpipe.extensions.simulator.costs import Costs, Links, Times
from fxpipe.extensions.simulator.measured import measured_run
from fxpipe.extensions.simulator.predict import given_links, held_sizes, predict_step
from fxpipe.extensions.simulator.simulation import Simulation
from fxpipe.extensions.simulator.sizes import Sizes
from fxpipe.extensions.simulator.timed import timed
from fxpipe.ir.program import Program
from fxpipe.locks import locked
from fxpipe.pipeline import Pipeline
from fxpipe.torchtools.state import without_collection

_PROFILED: WeakKeyDictionary[Pipeline, tuple[Program, int, Times]] = WeakKeyDictionary()
"""Pipe → the program that was profiled last, the samples of its micro-batches, and the mean times
of its tasks."""


def simulate_pipe(
    pipe: Pipeline,
    costs: Costs | None = None,
    *,
    links: Links | None = None,
    steps: int | None = None,
) -> Simulation:
    """Predict the time and the memory of a training step.

    The times, in seconds, are those of each stage's operations, measured one by one when the model
    was cut, or of the last ``profile``. Neither has what a step takes besides its tasks.

    ``memory`` has the peak of each device in bytes, as the table shows it, and its parts: what
    is always allocated, by storage, and what the nodes of the running graph hold, or what a stage
    with leaf modules took in its first run. It does not count the scratch memory of operations.
    Gradients that ``.grad`` holds now are counted in addition to the step's own. Every rank
    predicts the same for all devices, without asking the other ranks: it takes gradients to be
    where it has some itself, and calls ``optimizer`` for the stages of other ranks, too, for their
    memory.

    Args:
        costs: the costs to predict with, instead of the measured ones.
        links: the links between devices; by default those of a ``Partition``.
        steps: how many steps are simulated in a row; see there.

    Raises:
        InputError: nothing is compiled or measured yet, or an argument does not fit.
    """
    compiled, options = pipe._calls.measured(), pipe._options
    program, samples, times = _PROFILED.get(pipe, (None, 0, None))
    profiled = program is compiled.program and samples == compiled.samples
    alone = options.group.size == 1 and not options.places
    return predict_step(
        compiled.plan,
        compiled.whole(),
        held(pipe, compiled),
        costs or (times if profiled else None),
        links=links or (None if costs else given_links(options)),
        serial=not costs and alone and compiled.threads == 1,
        steps=steps,
    )


@locked
def profile_pipe(
    pipe: Pipeline, *args: Any, target: Any = None, steps: int = 1, **kwargs: Any
) -> Simulation:
    """Train on a batch as ``step`` does, and return the measured times of all instructions.

    ``simulate`` predicts such steps with the times of these tasks from then on. Python's cyclic
    garbage is collected only after the steps, as a collection may take longer than one.

    Args:
        *args: the model's positional inputs.
        target: what the loss compares the output with.
        steps: how many steps to run and measure.
        **kwargs: the model's keyword inputs.

    Returns:
        The same as ``simulate`` returns, with measured times in seconds; over replicas, with
        those of this replica. ``costs`` are the times of the stages while all of them run, and
        can be given to ``simulate``. ``memory`` is predicted, as in ``simulate``, from the
        measured times.

    Raises:
        InputError: as in ``step``, or ``steps`` is below 1.
    """
    options, calls, engine = pipe._options, pipe._calls, pipe._engine
    with options.group.calling("profile"):
        check_whole("steps", steps, 1)
        with without_collection(), timed(engine) as times:
            for _ in range(steps):
                calls.step(args, kwargs, target, return_output=False)
        compiled = calls.compiled()
        measured = measured_run(compiled.whole(), steps, times, held(pipe, compiled))
        # all replicas predict with the times of the first
        taught = options.group.share("the times of tasks", lambda: [*measured.costs.items()])
        known = {(x, stage): time for (x, stage), time in taught}
        _PROFILED[pipe] = compiled.program, compiled.samples, known
    return measured


@locked
def held(pipe: Pipeline, compiled: Compiled) -> Sizes:
    """The bytes of what the stages and their optimizers hold, on all ranks."""
    progress = pipe._engine.progress
    state, optimizers = progress.state_of(compiled.traced), progress.optimizers_of(compiled.plan)
    return held_sizes(compiled, pipe._options, state, optimizers, stepping=True)

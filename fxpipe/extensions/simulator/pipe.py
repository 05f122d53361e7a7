"""What a pipe predicts, and what it measures: ``pipe.simulate`` and ``pipe.profile``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from time import perf_counter
from typing import Any

from torch import nn

from fxpipe.arguments import check_whole
from fxpipe.compiler.compiled import Compiled
from fxpipe.extensions.simulator.costs import Costs, Links
from fxpipe.extensions.simulator.measured import measured_run
from fxpipe.extensions.simulator.overheads import StepTimes
from fxpipe.extensions.simulator.predict import given_links, held_sizes, predict
from fxpipe.extensions.simulator.rehearsal import learn, rehearsal_of
from fxpipe.extensions.simulator.simulation import Simulation
from fxpipe.extensions.simulator.sizes import Sizes
from fxpipe.locks import locked
from fxpipe.pipeline import Pipeline
from fxpipe.torchtools.state import without_collection


def simulate_pipe(
    pipe: Pipeline,
    costs: Costs | None = None,
    *,
    links: Links | None = None,
    overlap: bool = True,
    steps: int | None = None,
) -> Simulation:
    """Predict the time and the memory of a training step.

    The first call measures the costs, in seconds, in rehearsed steps: real steps of random
    numbers, whose results are dropped and which update copies of the weights. ``profile``
    replaces these times by those of real steps. Over several ranks, on devices with streams or
    with leaf modules, no step is rehearsed, and the times are those of each stage alone,
    measured when it was compiled. ``step_time`` is the predicted time of a step, and ``range``
    how sure that is.

    ``memory`` has the peak of each device in bytes, as the table shows it, and its parts: what
    is always allocated, by storage, and what the nodes of the running graph hold. It counts
    neither the scratch memory of operations nor what stages with leaf modules save. Gradients
    that ``.grad`` holds now are counted in addition to the step's own. Every rank predicts the
    same for all devices, without asking the other ranks: it takes gradients to be where it has
    some itself, and calls ``optimizer`` for the stages of other ranks, too, for their memory.

    Args:
        costs: the costs to predict with, instead of the measured ones.
        links: the links between devices; by default those of a ``Partition``, or a hand-over to
            another thread.
        overlap: whether a device computes while it sends; see ``simulate``.
        steps: how many steps are simulated in a row; see there.

    Raises:
        InputError: nothing is compiled or measured yet, or an argument does not fit.
    """
    compiled = pipe._calls.measured()
    rehearsal = None if costs else rehearsal_of(pipe._compiler, pipe._engine, compiled)
    return predict(
        compiled.plan,
        compiled.whole(),
        held(pipe, compiled),
        costs,
        rehearsal=rehearsal,
        links=links or (None if costs else given_links(pipe._options)),
        overlap=overlap,
        steps=steps,
    )


@locked
def profile_pipe(
    pipe: Pipeline, *args: Any, target: Any = None, steps: int = 1, **kwargs: Any
) -> Simulation:
    """Train on a batch as ``step`` does, and return the measured times of all instructions.

    ``simulate`` predicts with these times from then on, unless devices have streams. Python's
    cyclic garbage is collected only after the steps, as a collection may take longer than one.

    Args:
        *args: the model's positional inputs; the target may be the last of them.
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
        if target is None and options.loss is not None:
            args, target = split_target(options.model, args, kwargs)
        with without_collection():
            start = perf_counter()
            with engine.timed() as times:
                for _ in range(steps):
                    calls.step(args, kwargs, target, return_output=False)
            seconds = perf_counter() - start
        compiled = calls.compiled()
        measured = measured_run(compiled.whole(), steps, times, held(pipe, compiled))
        learn(options, compiled, [StepTimes(seconds, times)], steps)
    return measured


@locked
def held(pipe: Pipeline, compiled: Compiled) -> Sizes:
    """The bytes of what the stages and their optimizers hold, on all ranks."""
    progress = pipe._engine.progress
    state, optimizers = progress.state_of(compiled.traced), progress.optimizers_of(compiled.plan)
    return held_sizes(compiled, pipe._options, state, optimizers, stepping=True)


def split_target(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Any]:
    """Split the arguments of a call such as ``profile(x, y)`` into inputs and target.

    The last argument is the target if the model's forward does not take all arguments.
    """
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return args[:-1], args[-1] if args else None
    return args, None

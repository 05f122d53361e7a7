"""Where a model's parameters and buffers are while it is compiled, and while it runs.

On devices with memory of their own, no device ever holds parameters of a stage that it does not
run. Meanwhile the model is traced, timed and compared with its plan on the first device, with
numbers that stand for parameters: all of these share the memory of the largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from fxpipe.compiler.compiled import Compiled
from fxpipe.compiler.front_end import Call
from fxpipe.compiler.lacking import naming_lacks
from fxpipe.compiler.options import Options
from fxpipe.ir.plan import Plan
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.traced import Traced
from fxpipe.runtime.batch import ordinary
from fxpipe.torchtools.meta import lent, standing_in
from fxpipe.torchtools.state import move, to_device


@contextmanager
def gathered(options: Options, call: Call, graphs: Iterable[Traced]) -> Iterator[Call]:
    """Yield the call with its tensors on the first device, or on a rank's own. Inside, there the
    model can run as a whole: if stages are apart, with stand-ins for its parameters.

    Gradients are enabled, as a later call may use the graphs to train.

    Args:
        options: the options of the pipe.
        call: the call.
        graphs: known graphs, whose constants are there, too.
    """
    with torch.inference_mode(False), torch.enable_grad():
        model, here = options.model, options.here
        constants = [constant for graph in graphs for constant in graph.constants.values()]
        with ExitStack() as stack:
            if options.hollow:
                shared = nn.Parameter if not options.whole else ()
                stack.enter_context(standing_in(model, lambda x: isinstance(x, shared)))
            if options.places:
                stack.enter_context(lent(model, constants, here, apart=options.apart))
            yield _on_first(options, call)


def settle(options: Options, traced: Traced, plan: Plan, schedule: Schedule) -> None:
    """Move the tensors of this process's stages to the devices where these run in a call.

    The tensors stay the same objects. No two stages have the same parameter or buffer.
    """
    with naming_lacks(options):
        for tensor, device in _homes(options, traced, plan, schedule):
            if not tensor.is_meta:  # it gets its data there later
                move(tensor, device)


def homes(options: Options, compiled: Compiled | None) -> dict[Tensor, torch.device]:
    """The parameters and buffers of this process's stages, each with its device. Empty if all are
    on the CPU, or nothing is compiled yet."""
    if compiled is None:
        return {}
    return dict(_homes(options, compiled.traced, compiled.plan, compiled.schedule))


def _homes(
    options: Options, traced: Traced, plan: Plan, schedule: Schedule
) -> list[tuple[Tensor, torch.device]]:
    """The tensors of this process's stages, each with its device; empty if all are on the CPU."""
    if not options.places:
        return []
    state = traced.state_of(options.model)
    return [
        (state[name], options.places[schedule.placement[stage.index]])
        for stage in plan.stages
        if options.owns(stage.index)
        for name in traced.touched(stage)
    ]


def _on_first(options: Options, call: Call) -> Call:
    """The same call with ordinary tensors, on the first device if devices have their own memory."""
    leaves = [*map(ordinary, call.leaves)]
    return replace(call, leaves=to_device(leaves, options.here) if options.places else leaves)

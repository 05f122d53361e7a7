"""The bytes that the stages of a plan hold, found from their graphs and counted by storage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from fxpipe.ir.plan import Plan
from fxpipe.ir.schedule import Schedule
from fxpipe.kernels.graph import GraphKernel
from fxpipe.memory.graph import GraphMemory
from fxpipe.simulator.sizes import Sizes
from fxpipe.torchtools.pieces import size_in_bytes


@dataclass(frozen=True)
class Resting:
    """The bytes that the optimizer of a stage holds.

    Attributes:
        state: its state, always.
        updating: what it needs in addition while it steps.
        undo: what is kept for a roll-back, from its step until no stage can roll back beyond it.
    """

    state: int = 0
    updating: int = 0
    undo: int = 0


def undo_bytes(schedule: Schedule, state: float, parameters: float, trained: float) -> float:
    """The bytes that a stage keeps from its update until no stage can roll back beyond it.

    Args:
        schedule: the schedule of the steps.
        state: bytes of the optimizer's state.
        parameters: bytes of the stage's parameters.
        trained: bytes of the parameters that are trained.
    """
    undo = state if schedule.overlaps else state + parameters
    return undo + trained if schedule.predict else undo


def sizes_of(
    plan: Plan,
    state: Mapping[str, Tensor],
    resting: Mapping[int, Resting] | None = None,
) -> Sizes:
    """The bytes of everything that the stages of a differentiated plan hold.

    They are for the example's micro-batch, and count whole storages. What a stage that runs under
    autograd saves is not known; ``unknown`` names such stages.

    Args:
        plan: the plan, with kernels.
        state: name in the model → parameter or buffer.
        resting: stage → the memory of its optimizer.
    """
    kept = {
        stage.index: GraphMemory(plan, stage, stage.kernel)
        for stage in plan.stages
        if isinstance(stage.kernel, GraphKernel)
    }
    rests = {s.index: (resting or {}).get(s.index, Resting()) for s in plan.stages}
    written = {s.index: _bytes(state[w.target] for w in s.writes) for s in plan.stages}
    trained = {
        s.index: [x for a in s.parameters if (x := state[a.target]).requires_grad]
        for s in plan.stages
    }
    gradients = {
        index: _bytes(x.grad for x in own if x.grad is not None) for index, own in trained.items()
    }
    return Sizes(
        {name: spec.bytes for name, spec in plan.specs.items()},
        saved={index: each.saved.bytes for index, each in kept.items()},
        deferred={index: each.deferred.bytes for index, each in kept.items()},
        state=written,
        saved_state={index: each.saved_state for index, each in kept.items()},
        parameters={s.index: _bytes(state[a.target] for a in s.parameters) for s in plan.stages},
        gradients={index: _bytes(own) for index, own in trained.items()},
        started={} if resting is not None else gradients,
        optimizer={
            # a step reads copies of the buffers that it writes
            s.index: rests[s.index].state
            + gradients[s.index]
            + written[s.index]
            + _bytes(state[a.target] for a in s.buffers)
            for s in plan.stages
        },
        updating={index: each.updating for index, each in rests.items()},
        undo={index: each.undo for index, each in rests.items()},
        holds={index: each.saved.values for index, each in kept.items()},
        deferred_holds={index: each.deferred.values for index, each in kept.items()},
        deferred_gradients={index: each.deferred.gradients for index, each in kept.items()},
        places={key: place for each in kept.values() for key, place in each.places.items()},
        laid_out={key: size for each in kept.values() for key, size in each.laid_out.items()},
        runs={key: run for each in kept.values() for key, run in each.runs.items()},
        adding={key: run for each in kept.values() for key, run in each.adding.items()},
        unknown=frozenset(s.index for s in plan.stages) - kept.keys(),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(map(size_in_bytes, tensors))

"""Run a plan's kernels one after another in this thread: the reference for a plan's meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from torch import Tensor

from fxpipe.ir.plan import Plan, Stage
from fxpipe.ir.value import HOST, gradient_groups, outputs_of
from fxpipe.kernels.kernel import BackwardResult, ForwardResult


@dataclass(frozen=True)
class SerialResult:
    """The results of the forward pass of one micro-batch.

    Attributes:
        values: name → value, of the inputs and of all values that cross between stages.
        written: buffer → its new value, if it was written.
    """

    values: dict[str, Any]
    written: dict[str, Tensor]


def run_serially(
    plan: Plan, values: Mapping[str, Any], state: Mapping[str, Tensor]
) -> SerialResult:
    """Run one micro-batch forward through a plan with kernels.

    Args:
        plan: the plan.
        values: the inputs, by name.
        state: name in the model → parameter, buffer or constant.
    """
    crossed = dict(values)
    written: dict[str, Tensor] = {}
    for stage in plan.stages:
        result = _forward(plan, stage, crossed, state)
        names = outputs_of(plan.edges_from(stage.index))
        crossed.update(zip(names, result.outputs, strict=True))
        written.update(zip((w.target for w in stage.writes), result.writes, strict=True))
        del result
    return SerialResult(crossed, written)


class SerialBackward:
    """The backward pass of one micro-batch through a differentiated plan, a stage at a time.

    A stage runs its forward again, so that no stage but the one that runs holds what it saves.

    Args:
        plan: a plan with kernels for backwards.
        values: the values that ``run_serially`` returns.
        state: name in the model → parameter, buffer or constant.
        output_gradients: value → its gradient, for each output that carries one back.
        halves: whether to run every backward as its two halves.
    """

    def __init__(
        self,
        plan: Plan,
        values: Mapping[str, Any],
        state: Mapping[str, Tensor],
        output_gradients: Mapping[str, Tensor],
        *,
        halves: bool = False,
    ) -> None:
        self._plan, self._values, self._state, self._halves = plan, values, state, halves
        self._crossing = {(name, HOST): gradient for name, gradient in output_gradients.items()}

    def run(self, stage: Stage) -> dict[str, Tensor]:
        """Run a stage's backward, after those of all later stages. Returns the gradients of the
        stage's parameters, by name in the model."""
        kernel = stage.kernel
        assert kernel is not None
        groups = gradient_groups(self._plan.gradients_into(stage.index))
        incoming = [
            reduce(add, [self._crossing[edge.value, edge.source] for edge in group])
            for group in groups
        ]
        saved = _forward(self._plan, stage, self._values, self._state).saved
        if self._halves:
            inputs, deferred = kernel.input_grad(saved, incoming)
            back = BackwardResult(inputs, kernel.weight_grad(deferred))
        else:
            back = kernel.backward(saved, incoming)
        carried = outputs_of(self._plan.gradients_from(stage.index))
        for value, gradient in zip(carried, back.inputs, strict=True):
            self._crossing[value, stage.index] = gradient
        names = [argument.target for argument in stage.parameters]
        gradients = zip(names, back.parameters, strict=True)
        return {name: gradient for name, gradient in gradients if gradient is not None}


def _forward(
    plan: Plan, stage: Stage, crossed: Mapping[str, Any], state: Mapping[str, Tensor]
) -> ForwardResult:
    assert stage.kernel is not None, "differentiate the plan first"
    return stage.kernel.forward(
        [state[a.target] for a in stage.parameters],
        [state[a.target] for a in stage.buffers],
        [crossed[edge.value] for edge in plan.edges_into(stage.index)],
    )

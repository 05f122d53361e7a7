"""Run a plan's kernels one after another in this thread: the reference for a plan's meaning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """The results of one micro-batch.

    Attributes:
        values: name → value, of all values that cross between stages.
        state: buffer → its new value, if it was written.
        gradients: parameter → its gradient.
    """

    values: dict[str, Any]
    state: dict[str, Tensor]
    gradients: dict[str, Tensor]


def run_serially(
    plan: Plan,
    values: Mapping[str, Any],
    state: Mapping[str, Tensor],
    output_gradients: Mapping[str, Tensor],
    *,
    halves: bool = False,
    take: Callable[[str, Tensor], None] | None = None,
    again: bool = False,
) -> SerialResult:
    """Run one micro-batch through a differentiated plan, forward and, if asked, backward.

    Args:
        plan: a plan with kernels.
        values: the inputs, by name.
        state: name in the model → parameter, buffer or constant.
        output_gradients: value → its gradient, for each output that carries one back.
        halves: whether to run every backward as its two halves.
        take: gets each parameter's gradient, with its name, as soon as its stage has run; by
            default they are kept in the result.
        again: whether stages keep nothing for their backwards but run their forwards again.
    """
    crossed = dict(values)

    def forward(stage: Stage) -> ForwardResult:
        assert stage.kernel is not None, "differentiate the plan first"
        return stage.kernel.forward(
            [state[a.target] for a in stage.parameters],
            [state[a.target] for a in stage.buffers],
            [crossed[edge.value] for edge in plan.edges_into(stage.index)],
        )

    written: dict[str, Tensor] = {}
    saved: list[list[Any]] = []
    for stage in plan.stages:
        result = forward(stage)
        names = outputs_of(plan.edges_from(stage.index))
        crossed.update(zip(names, result.outputs, strict=True))
        written.update(zip((w.target for w in stage.writes), result.writes, strict=True))
        saved.append([] if again else result.saved)
        del result
    gradients: dict[str, Tensor] = {}
    crossing: dict[tuple[str, int], Tensor] = {
        (name, HOST): gradient for name, gradient in output_gradients.items()
    }
    for stage in reversed(plan.stages if output_gradients else ()):
        assert stage.kernel is not None
        incoming = [
            reduce(add, [crossing[edge.value, edge.target] for edge in group])
            for group in gradient_groups(plan.edges_from(stage.index))
        ]
        kernel, kept = stage.kernel, forward(stage).saved if again else saved[stage.index]
        if halves:
            inputs, deferred = kernel.input_grad(kept, incoming)
            back = BackwardResult(inputs, kernel.weight_grad(deferred))
        else:
            back = kernel.backward(kept, incoming)
        carried = [edge for edge in plan.edges_into(stage.index) if edge.gradient]
        for edge, gradient in zip(carried, back.inputs, strict=True):
            crossing[edge.value, stage.index] = gradient
        for argument, parameter in zip(stage.parameters, back.parameters, strict=True):
            if parameter is not None:
                (take or gradients.__setitem__)(argument.target, parameter)
        del back
    return SerialResult(crossed, written, gradients)

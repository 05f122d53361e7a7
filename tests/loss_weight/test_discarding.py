"""A micro-batch of weight 0 adds nothing to the sums of gradients, whatever its own are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpipe.compiler.loss_weight.weighing import Discarding
from fxpipe.kernels.kernel import BackwardResult, PartialResult, Totals

Run = Callable[[Any, Totals], Sequence[Tensor | None]]

RUNS: dict[str, Run] = {
    "backward": lambda kernel, totals: kernel.backward([], [], totals).parameters,
    "weight_grad": lambda kernel, totals: kernel.weight_grad([], totals),
    "partial_backward": lambda kernel, totals: (
        kernel.partial_backward("B", 0, [], totals).parameters
    ),
}


class NotNumbers:
    """A kernel of two parameters, the second without a gradient; the first's is not a number."""

    forward_graph = backward_graph = input_grad_graph = weight_grad_graph = None

    def weight_grad(self, deferred: list[Any], totals: Totals = ()) -> list[Tensor | None]:
        first = totals[0] if totals else None
        return [torch.full((3,), nan) if first is None else first + nan, None]

    def backward(
        self, saved: list[Any], gradients: list[Tensor], totals: Totals = ()
    ) -> BackwardResult:
        return BackwardResult([torch.ones(2)], self.weight_grad([], totals))

    def partial_backward(
        self, kind: str, bucket: int, left: list[Any], totals: Totals = ()
    ) -> PartialResult:
        return PartialResult([torch.ones(2)], self.weight_grad([], totals))


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("zeros", [False, True])
def test_a_micro_batch_of_weight_0_leaves_the_sums(run: Run, zeros: bool) -> None:
    kernel: Any = NotNumbers()
    discarding = Discarding(kernel, zeros=zeros)
    summed = torch.arange(3.0)
    after = run(discarding, [summed, None])
    assert after[0] is summed and after[1] is None
    assert summed.tolist() == [0.0, 1.0, 2.0]
    begun = run(discarding, ())
    if zeros:  # as other replicas add to it
        assert begun[0] is not None and begun[0].tolist() == [0.0, 0.0, 0.0]
    else:
        assert begun[0] is None
    assert begun[1] is None

"""Max pooling saves the places of its maxima in as few bytes as they need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fxpipe.ir.plan import Plan
from tests.helpers.fronted import Answer, assert_equal, differentiated, front_end, run_plan, whole
from tests.helpers.halves import compare

POOLS: dict[int, Any] = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Pooled(nn.Module):
    """Pools values of which many are equal, so that places matter."""

    def __init__(self, pool: nn.Module, dims: int) -> None:
        super().__init__()
        self.convolution, self.pool = CONVOLUTIONS[dims](1, 2, 1), pool

    def forward(self, x: Tensor) -> Any:
        y = self.convolution(x)
        return self.pool(y + (y.round() - y).detach())


def saved(plan: Plan) -> dict[torch.dtype, int]:
    """Dtype → the elements of it that the only stage saves."""
    (stage,) = plan.stages
    kernel: Any = stage.kernel
    (output,) = kernel.forward_graph.graph.find_nodes(op="output")
    found: dict[torch.dtype, int] = {}
    for node in dict.fromkeys(output.args[0][kernel.outputs + kernel.writes :]):
        value = node.meta["val"]
        found[value.dtype] = found.get(value.dtype, 0) + value.numel()
    return found


@st.composite
def pooled(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    dims = draw(st.sampled_from([1, 2, 3]))
    kernel = draw(st.integers(2, 3))
    pool = POOLS[dims](
        kernel,
        stride=draw(st.integers(1, 3)),
        padding=draw(st.integers(0, 1)),
        dilation=draw(st.integers(1, 2)),
        ceil_mode=draw(st.booleans()),
    )
    most = {1: 200, 2: 24, 3: 8}[dims]
    sizes = [draw(st.integers(6, most)) for _ in range(dims)]
    torch.manual_seed(draw(st.integers(0, 9)))
    return Pooled(pool, dims), (3 * torch.randn(2, 1, *sizes)).requires_grad_()


@given(pooled())
def test_gradients_are_autograds_to_the_bit(case: tuple[nn.Module, Tensor]) -> None:
    model, x = case
    traced, answer = front_end(model, x), Answer(model, x)
    plan = differentiated(model, traced, whole(traced), x, inputs=True)
    ran = run_plan(model, traced, plan, x)
    assert_equal(ran.gradients, answer.gradients)


@pytest.mark.parametrize(
    ("plane", "dtype"),
    [
        ((8, 16), torch.int8),
        ((3, 43), torch.int16),
        ((128, 256), torch.int16),
        ((3, 10923), torch.int32),
    ],
)
def test_places_take_the_bytes_that_their_plane_needs(
    plane: tuple[int, int], dtype: torch.dtype
) -> None:
    model, x = Pooled(nn.MaxPool2d(1), 2), torch.randn(2, 1, *plane)  # the last place is one, too
    traced = front_end(model, x)
    plan = differentiated(model, traced, whole(traced), x)
    found = saved(plan)
    assert torch.int64 not in found
    assert found[dtype] == 2 * 2 * plane[0] * plane[1]
    assert_equal(run_plan(model, traced, plan, x).gradients, Answer(model, x).gradients)


def test_places_that_a_model_reads_stay_as_they_are() -> None:
    class Unpooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pooled = Pooled(nn.MaxPool2d(2, return_indices=True), 2)
            self.unpool = nn.MaxUnpool2d(2)

        def forward(self, x: Tensor) -> Tensor:
            unpooled: Tensor = self.unpool(*self.pooled(x))
            return unpooled

    model, x = Unpooled(), torch.randn(2, 1, 8, 8)
    traced = front_end(model, x)
    plan = differentiated(model, traced, whole(traced), x)
    assert torch.int8 not in saved(plan)
    assert_equal(run_plan(model, traced, plan, x).gradients, Answer(model, x).gradients)


def test_halves_of_a_backward_read_them() -> None:
    model, x = (
        nn.Sequential(Pooled(nn.MaxPool2d(2), 2), nn.Conv2d(2, 1, 1)),
        torch.randn(2, 1, 8, 8),
    )
    traced = front_end(model, x)
    plan = compare(model, traced, differentiated(model, traced, whole(traced), x), x)
    ran = run_plan(model, traced, plan, x, halves=True)
    assert_equal(ran.gradients, Answer(model, x).gradients)

"""Bytes and FLOPs of stages in the batch size: against runs of the model with real data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

import fxpipe
from fxpipe.compiler.predict import Sizes
from fxpipe.passes.graph.extents import BATCH, Extent
from tests.helpers.exported import UNet

ZERO = sympy.Integer(0)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (8,)),
    "u-net": (UNet, (2, 8, 8)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (5, 8)),
}


def compiled(model: nn.Module, x: Tensor, devices: int, **options: Any) -> fxpipe.Pipeline:
    return fxpipe.compile(
        model,
        ["cpu"] * devices,
        microbatches=2,
        loss=lambda output, target: output.square().mean(),
        example=((x,), {"target": x}),
        partition=fxpipe.Partition(**options),
    )


def counted(model: nn.Module, x: Tensor) -> tuple[int, int, int]:
    """FLOPs forward and backward, and bytes saved in between, of a real run."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with FlopCounterMode(display=False) as ahead, saved_tensors_hooks(keep, lambda t: t):
        loss = model(x).square().mean()
    with FlopCounterMode(display=False) as back:
        loss.backward()
    kept = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    return ahead.get_total_flops(), back.get_total_flops(), kept


def at(expression: sympy.Expr, batch: int) -> int:
    return int(expression.subs(BATCH, batch))


@pytest.mark.parametrize("name", MODELS)
def test_the_expressions_tell_what_a_run_of_another_size_does(name: str) -> None:
    factory, shape = MODELS[name]
    torch.manual_seed(0)
    model = factory()
    alone = copy.deepcopy(model)
    with compiled(model, torch.randn(6, *shape), 1) as pipe:  # made for micro-batches of 3
        (extent,) = pipe.sizes.stages
    if name == "transformer" and not extent.forward.has(BATCH):
        pytest.skip("this torch traces it for one size alone")
    assert extent.saved.has(BATCH)
    for batch in (2, 5):
        forward, backward, kept = counted(alone, torch.randn(batch, *shape))
        assert at(extent.forward, batch) == forward
        assert at(extent.backward, batch) == backward
        assert at(extent.saved, batch) == pytest.approx(kept, rel=0.1)


def test_what_stages_send_is_what_the_plan_says() -> None:
    with compiled(UNet(), torch.randn(6, 2, 8, 8), 3) as pipe:
        for stage, extent in enumerate(pipe.sizes.stages):
            away = [edge for edge in pipe.plan.edges_from(stage) if edge.target >= 0]
            assert at(extent.sent, 3) == sum(pipe.plan.bytes_of(edge) or 0 for edge in away)


def test_stages_share_the_work_of_the_whole() -> None:
    whole, parts = UNet(), UNet()
    x = torch.randn(6, 2, 8, 8)
    with compiled(whole, x, 1) as one, compiled(parts, x, 3) as three:
        (all_of_it,) = one.sizes.stages
        assert sympy.Add(*(extent.forward for extent in three.sizes.stages)) == all_of_it.forward


def sizes(*memory: Any, limits: tuple[float, ...]) -> Sizes:
    extents = (Extent(ZERO, ZERO, ZERO, ZERO),) * len(memory)
    names = tuple(f"device {index} (cpu)" for index in range(len(memory)))
    expressions = [sympy.sympify(each) for each in memory]
    return Sizes(extents, names, limits, 3, lambda b: [at(each, b) for each in expressions])


@pytest.mark.parametrize(
    ("memory", "limit", "largest"),
    [
        (10 * BATCH + 5, 104, 9),
        (10 * BATCH + 5, 105, 10),
        (10 * BATCH + 5, 10, 0),
        (BATCH**2 + BATCH, 110, 10),
        (BATCH**2 + BATCH, 109, 9),
        (sympy.floor(BATCH / 2) + 1, 4, 7),
        (sympy.Max(100, 7 * BATCH - 900), 1000, 271),
        (BATCH, 1 << 19, 1 << 19),
        (7, 10, None),
        (11, 10, 0),
    ],
)
def test_the_largest_micro_batch_is_found_by_what_is_predicted(
    memory: Any, limit: float, largest: int | None
) -> None:
    assert sizes(memory, limits=(limit,)).largest == largest


def test_the_tightest_stage_is_named() -> None:
    found = sizes(BATCH, 3 * BATCH, limits=(100.0, 92.0))
    assert "has 30 samples" in str(found) and "device 1 (cpu) then holds 90 B of 92 B" in str(found)


def test_the_table_shows_the_largest_micro_batch_where_memory_is_limited() -> None:
    x = torch.randn(6, 8)
    with compiled(mlp(), x, 2, memory_limits=2**20) as pipe:
        assert f"has {pipe.sizes.largest} samples" in str(pipe)
        assert "b: samples in a micro-batch" in str(pipe.sizes)
        assert "b: samples in a micro-batch" in pipe.sizes._repr_html_()
        assert repr(pipe.sizes).startswith("<Sizes: ")
    with compiled(mlp(), x, 2) as pipe:
        assert pipe.sizes.largest is None
        assert "largest micro-batch" not in str(pipe)


def test_leaf_modules_have_no_sizes() -> None:
    x = torch.randn(6, 8)
    pipe = fxpipe.compile(
        mlp(),
        ["cpu"],
        tracer="symbolic",
        microbatches=2,
        loss=nn.functional.mse_loss,
        example=((x,), {"target": x}),
    )
    with pipe, pytest.raises(fxpipe.InputError, match='tracer="export"'):
        _ = pipe.sizes


class Recurrent(nn.Module):
    """PyTorch's fastest kernel for it takes no size that is a symbol."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(4, 3, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)[0]
        return y


def test_a_model_that_takes_no_symbolic_size_has_sizes_for_its_own_and_a_table() -> None:
    with compiled(Recurrent(), torch.randn(4, 5, 4), 1) as pipe:
        pipe.step(torch.randn(4, 5, 4), target=torch.randn(4, 5, 3))
        (extent,) = pipe.sizes.stages
        assert extent.saved.is_number
        assert extent.saved > 0
        assert "layers" in str(pipe)

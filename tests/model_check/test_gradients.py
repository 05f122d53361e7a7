"""The gradients of a plan and of the model meet, in whatever order they come."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext, suppress
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import fxpipe
from fxpipe.compiler.model_check.check import check
from fxpipe.compiler.model_check.serial import SerialBackward
from fxpipe.errors import TraceError
from fxpipe.ir.plan import Stage
from fxpipe.ir.traced import Traced
from fxpipe.passes.differentiate.part_backward import part_backward
from tests.helpers.fronted import differentiated, front_end, in_stages, values_of
from tests.model_check.test_check import checked

BRANCHES = 4
SERIAL_BACKWARD = "fxpipe.compiler.model_check.gradients.SerialBackward"


class Branches(nn.Module):
    """Layers beside each other, the last of which is trained by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(BRANCHES))

    def forward(self, x: Tensor, order: tuple[int, ...] = tuple(range(BRANCHES))) -> Tensor:
        parts = {index: self.layers[index](x) for index in order}
        parts[BRANCHES - 1] = parts[BRANCHES - 1].detach()
        return torch.stack([parts[index].tanh() for index in range(BRANCHES)]).prod(0)


@given(
    order=st.permutations(range(BRANCHES)),
    stages=st.integers(1, BRANCHES),
    halves=st.booleans(),
    apart=st.booleans(),
    wrong=st.none() | st.integers(0, BRANCHES - 2),
)
@example(order=[2, 1, 3, 0], stages=BRANCHES, halves=True, apart=False, wrong=2)
def test_a_wrong_gradient_is_found_in_whatever_order_the_model_computes_it(
    order: list[int], stages: int, halves: bool, apart: bool, wrong: int | None
) -> None:
    torch.manual_seed(0)
    model, x = Branches(), torch.randn(2, 3)
    traced = front_end(model, x)
    plan = differentiated(model, traced, in_stages(traced, stages), x)
    met: list[str] = []

    class Spoiled(SerialBackward):
        def run(self, stage: Stage) -> dict[str, Tensor]:
            gradients = super().run(stage)
            met.extend(gradients)
            return {n: g * (2 if n == f"layers.{wrong}.bias" else 1) for n, g in gradients.items()}

    told = rf"the gradient of 'layers\.{wrong}\.bias'"
    with (
        patch(SERIAL_BACKWARD, Spoiled),
        nullcontext() if wrong is None else pytest.raises(TraceError, match=told),
    ):
        check(
            traced,
            part_backward(plan) if halves else plan,
            values_of(traced, x),
            traced.state_of(model),
            lambda: (model(x, tuple(order)), None),
            True,
            apart,
        )
    trained = [f"layers.{i}.{kind}" for i in range(BRANCHES - 1) for kind in ("weight", "bias")]
    runs = (1 + halves) * (1 if wrong is None else 4)
    assert sorted(met) == sorted(trained * runs)


def test_a_gradient_that_only_the_plan_has_is_refused() -> None:
    def invent(traced: Traced) -> None:
        assert traced.backward is not None
        made = cast(dict[str, str], traced.backward.gradients)
        made["p_layers_3_bias"] = made["p_layers_2_bias"]

    with pytest.raises(TraceError, match=r"the gradient of 'layers\.3\.bias'"):
        checked(Branches(), torch.randn(2, 3), invent, stages=1)


def test_an_error_of_the_plan_is_not_taken_for_one_of_the_model() -> None:
    class Fails(SerialBackward):
        def run(self, stage: Stage) -> dict[str, Tensor]:
            raise RuntimeError("a kernel fails")

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with (
        patch(SERIAL_BACKWARD, Fails),
        fxpipe.compile(model, ["cpu"] * 2, microbatches=1, loss=nn.functional.mse_loss) as pipe,
        pytest.raises(RuntimeError, match="a kernel fails"),
    ):
        pipe.step(torch.ones(2, 3), target=torch.ones(2, 3))


def test_an_error_of_the_plan_keeps_nothing_alive() -> None:
    """As where memory runs out: the steps that follow need it, and nothing collects before."""
    alive: list[weakref.ref[Tensor]] = []

    class Fails(SerialBackward):
        def run(self, stage: Stage) -> dict[str, Tensor]:
            gradients = super().run(stage)
            alive.extend(map(weakref.ref, gradients.values()))
            raise RuntimeError(f"stage {stage.index} fails")

    gc.disable()
    try:
        with patch(SERIAL_BACKWARD, Fails), suppress(RuntimeError):
            checked(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(2, 3))
        assert [gradient() for gradient in alive] == [None, None]
    finally:
        gc.enable()


def test_a_lack_of_memory_in_the_models_backward_is_no_fault_of_the_model() -> None:
    class Lacks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("no memory")

    model, x = Branches(), torch.randn(2, 3)
    traced = front_end(model, x)
    plan = differentiated(model, traced, in_stages(traced, 2), x)
    args = traced, plan, values_of(traced, x), traced.state_of(model)

    def call() -> tuple[Tensor, None]:
        lacks: Tensor = Lacks.apply(model(x))  # type: ignore[no-untyped-call]
        return lacks, None

    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        check(*args, call, True)

"""Rounding: seeded operations round as PyTorch's own do, and the check refuses no rounding."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn.functional import dropout, mse_loss
from torch.nn.functional import scaled_dot_product_attention as attend

import fxpipe
from fxpipe import random
from fxpipe.compiler.model_check.check import CloseError, check
from fxpipe.compiler.model_check.fixed_draws import FixedDraws
from fxpipe.compiler.model_check.serial import SerialBackward, SerialResult, run_serially
from fxpipe.errors import TraceError
from fxpipe.ir.plan import Stage
from tests.helpers.fronted import differentiated, front_end, in_stages, values_of
from tests.helpers.profiles import DEEP, deep

aten = torch.ops.aten
SEED = torch.tensor(0)
EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.37])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dropout_rounds_as_torchs_own(dtype: torch.dtype, rate: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(1000).to(dtype).requires_grad_()
    with FixedDraws():
        there, here = dropout(x, rate), random.native_dropout(x, rate, True, SEED, 0)[0]
    assert torch.equal(here, there)
    gradient = torch.randn(1000).to(dtype)
    gradients = [torch.autograd.grad(value, x, gradient)[0] for value in (here, there)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention_with_dropout_rounds_as_torchs_own(
    dtype: torch.dtype, casts: bool, masked: bool
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 9, 8).to(dtype) for _ in range(3))
    mask = torch.randn(9, 9).to(dtype) if masked else None
    with torch.autocast("cpu", torch.bfloat16) if casts else nullcontext(), FixedDraws():
        there = attend(q, k, v, mask, 0.2)
        here = random.attention(q, k, v, mask, 0.2, False, None, False, SEED, 0)
    assert here.dtype == there.dtype
    # a last bit of what is returned, and nothing of what is rounded inside
    torch.testing.assert_close(here, there, rtol=2 * torch.finfo(there.dtype).eps, atol=1e-6)


class Attention(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layer, self.rate = nn.Linear(8, 24), rate

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.layer(x).chunk(3, -1)
        y: Tensor = x + attend(q, k, v, dropout_p=self.rate)
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(
        *(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.Dropout(0.1)),
        nn.Linear(32, 8),
    ),
    "attention": lambda: nn.Sequential(Attention(0.1), Attention(0.2)),
}


@pytest.mark.smoke
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", MODELS)
def test_dropout_under_autocast_trains(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    model, (x, y) = MODELS[name](), torch.randn(2, 4, 7, 8)
    with (
        fxpipe.compile(model, 2, microbatches=2, loss=mse_loss) as pipe,
        torch.autocast("cpu", torch.bfloat16),
    ):
        assert pipe.step(x, target=y).isfinite()


class Inside(nn.Module):
    """Computes in bfloat16, though its input, its weights and its output are float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x.bfloat16() * 1.1
        y: Tensor = self.layer(h.float())
        return y


def compare(model: nn.Module, x: Tensor, target: Any, edit: Callable[[Any], None]) -> None:
    """Check the model's graph after the arguments of one operation were edited."""
    traced = front_end(model, x)
    edit(next(node for node in traced.graph.nodes if node.target is target))
    traced.graph.lint()
    traced.module.recompile()
    plan = differentiated(model, traced, in_stages(traced, 1), x)
    facts = traced, plan, values_of(traced, x), traced.state_of(model)
    check(*facts, lambda: (model(x), None), True)


@pytest.mark.smoke
@pytest.mark.parametrize(("factor", "refused"), [(1.1015625, False), (1.4, True)])
def test_what_is_allowed_follows_the_narrowest_type_inside(factor: float, refused: bool) -> None:
    """1.1015625 is 1.1 in bfloat16."""

    def edit(node: fx.Node) -> None:
        node.args = (node.args[0], factor)

    torch.manual_seed(0)
    with pytest.raises(TraceError, match="output") if refused else nullcontext():
        compare(Inside(), torch.randn(6, 4), aten.mul.Tensor, edit)


class Steps(nn.Module):
    """A step function of values that lie some last bits above the step."""

    def __init__(self, bits: float) -> None:
        super().__init__()
        self.below = 1 - bits * EPS
        self.layer = nn.Linear(4, 4)
        nn.init.constant_(self.layer.weight, 0.25)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y + (y > self.below)


@pytest.mark.parametrize(("bits", "refused"), [(6, False), (3000, True)])
def test_an_output_that_rounding_puts_on_the_other_side_of_a_step_is_no_wrong_one(
    bits: int, refused: bool
) -> None:
    def edit(node: fx.Node) -> None:
        with node.graph.inserting_after(node):
            less = node.graph.call_function(aten.mul.Tensor, (node, 1 - bits * EPS))
        less.meta.update(node.meta)
        node.replace_all_uses_with(less, lambda user: user is not less)

    with pytest.raises(TraceError, match="output") if refused else nullcontext():
        compare(Steps(2 / 3 * bits), torch.ones(3, 4), aten.addmm.default, edit)


class Flagged(nn.Module):
    """Its flag is a buffer that it writes, and one of its outputs."""

    flag: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("flag", torch.zeros(4, dtype=torch.bool))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.flag |= x[0] > 0
        return self.layer(x), x > 0


@pytest.mark.smoke
def test_flags_are_compared_exactly() -> None:
    def unedited(node: fx.Node) -> None:
        pass

    def edit(node: fx.Node) -> None:
        node.args = (node.args[0], 0.5)

    x = torch.linspace(-1, 1, 12).view(3, 4)
    compare(Flagged(), x, aten.gt.Scalar, unedited)
    with pytest.raises(TraceError, match="'flag': 1 of its entries differ"):
        compare(Flagged(), x.flip(0), aten.gt.Scalar, edit)


@contextmanager
def off_by(part: float) -> Iterator[None]:
    """Let the check find all gradients off by a part of their values."""

    class Spoiled(SerialBackward):
        def run(self, stage: Stage) -> dict[str, Tensor]:
            return {name: g * (1 + part) for name, g in super().run(stage).items()}

    with patch("fxpipe.compiler.model_check.gradients.SerialBackward", Spoiled):
        yield


@pytest.mark.parametrize(("wrong", "close"), [(1, True), (30, False)])
def test_few_other_choices_among_close_numbers_may_be_rounding(wrong: int, close: bool) -> None:
    def spoiled(*args: Any, **options: Any) -> SerialResult:
        ran = run_serially(*args, **options)
        values = dict(ran.values)
        for name, value in values.items():
            if value.dtype is torch.int64:
                values[name] = torch.cat([(value[:wrong] + 1) % 4, value[wrong:]])
        return replace(ran, values=values)

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.layer(x)
            return y, y.argmax(-1)

    torch.manual_seed(0)
    with (
        patch("fxpipe.compiler.model_check.check.run_serially", spoiled),
        pytest.raises(TraceError, match=f"{wrong} of its entries differ") as raised,
    ):
        compare(Chooses(), torch.randn(100, 4), aten.argmax.default, lambda node: None)
    assert isinstance(raised.value, CloseError) == close


LITTLE, MUCH = 0.002, 0.02


def trained(model: nn.Module) -> fxpipe.Pipeline:
    return fxpipe.compile(
        model, 1, microbatches=2, loss=mse_loss, optimizer=lambda p: torch.optim.SGD(p, 0.1)
    )


def batch(rows: int) -> dict[str, Any]:
    return {"target": torch.ones(rows, 4)}


@pytest.mark.smoke
def test_a_first_graph_off_by_little_is_refused_without_blame() -> None:
    with trained(nn.Linear(4, 4)) as pipe, off_by(LITTLE), pytest.raises(CloseError) as raised:
        pipe.step(torch.ones(4, 4), **batch(4))
    assert "float64" in str(raised.value)
    assert "autograd function" not in str(raised.value)
    assert not any("without extensions" in note for note in raised.value.__notes__)


@pytest.mark.smoke
def test_a_later_graph_off_by_little_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with trained(model) as pipe:
        pipe.step(torch.ones(4, 4), **batch(4))
        with off_by(LITTLE), caplog.at_level(logging.WARNING, "fxpipe"):
            pipe.step(torch.ones(6, 4), **batch(6))
            model.eval()
            before = model.weight.clone()
            pipe.step(torch.ones(6, 4), **batch(6))
        assert not torch.equal(before, model.weight)
        (message,) = [r.getMessage() for r in caplog.records if "by more than" in r.getMessage()]
        assert "the gradient of 'weight'" in message
        with off_by(MUCH), pytest.raises(TraceError, match="does not compute what the model"):
            pipe.step(torch.ones(10, 3, 4), target=torch.ones(10, 3, 4))


def test_training_that_goes_on_from_a_checkpoint_is_not_refused_for_little(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.ones(4, 4)
    with trained(nn.Linear(4, 4)) as pipe:
        pipe.step(x, **batch(4))
        pipe.save(tmp_path)
        later = pipe.step(x, **batch(4))
    with trained(nn.Linear(4, 4)) as pipe, off_by(LITTLE):
        pipe.load(tmp_path)
        assert torch.equal(pipe.step(x, **batch(4)), later)


CHANGES: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "a partial batch": lambda rows, length: (rows - 1, length),
    "a larger batch": lambda rows, length: (2 * rows, length),
    "another length": lambda rows, length: (rows, length + 2),
    "nothing": lambda rows, length: (rows, length),
}


@pytest.mark.parametrize("name", ["dropout", *deep("attention")])
def test_what_the_first_step_passes_no_later_size_and_no_resume_refuses(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Where it differs by more than the check allows, but by no more than rounding may."""

    @settings(max_examples=100 if DEEP else 3)
    @given(
        st.integers(0, 2**16),
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.sampled_from(sorted(CHANGES)),
        st.booleans(),
    )
    def trains(seed: int, dtype: torch.dtype, change: str, resumes: bool) -> None:
        torch.manual_seed(seed)
        model, rows, length = MODELS[name](), 4, 5
        little = LITTLE if dtype is torch.float32 else 100 * LITTLE
        folder = tmp_path_factory.mktemp("checkpoint")

        def opened() -> fxpipe.Pipeline:
            optimizer = partial(torch.optim.SGD, lr=0.1)
            return fxpipe.compile(model, 2, microbatches=2, loss=mse_loss, optimizer=optimizer)

        def step(pipe: fxpipe.Pipeline, rows: int, length: int) -> Tensor:
            x, y = torch.randn(2, rows, length, 8)
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                loss: Tensor = pipe.step(x, target=y)
            return loss

        with opened() as pipe:
            for _ in range(5):
                step(pipe, rows, length)
            if not resumes:
                with off_by(little):
                    assert step(pipe, *CHANGES[change](rows, length)).isfinite()
                return
            pipe.save(folder)
        model = MODELS[name]()
        with opened() as pipe, off_by(little):
            pipe.load(folder)
            assert step(pipe, *CHANGES[change](rows, length)).isfinite()

    trains()

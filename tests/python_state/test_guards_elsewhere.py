"""What a trace depends on besides attributes: leaf modules, closures, shapes, the default type."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from tests.oracles import loop

LEAF_CALLS = {"all": [0]}
BESIDE = str(Path(fxpipe.__file__).parent), str(Path(torch.__file__).parent)

pytestmark = pytest.mark.traces


def test_the_default_type_of_numbers_counts() -> None:
    class Sized(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.ones(()).element_size()

    x = torch.ones(4, 2)
    with fxpipe.compile(Sized(), ["cpu"], microbatches=2) as pipe, torch.no_grad():
        assert torch.equal(pipe(x), 4 * x)
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.equal(pipe(x), 8 * x)
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.smoke
def test_a_number_in_the_closure_of_a_loss_counts() -> None:
    beta = 1.0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * beta

    x = torch.randn(4, 4)
    with fxpipe.compile(nn.Linear(4, 4), ["cpu"], microbatches=2, loss=loss) as pipe:
        before = pipe.step(x, target=x)
        beta = 2.0
        assert torch.equal(pipe.step(x, target=x), 2 * before)


def test_a_shape_that_changes_with_a_parameter_counts() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    x, target = torch.randn(8, 4), torch.randint(3, (8,))
    with fxpipe.compile(model, 2 * ["cpu"], microbatches=2, loss=F.cross_entropy) as pipe:
        pipe.step(x, target=target)
        model[2] = nn.Linear(4, 5)
        alone = copy.deepcopy(model)
        loop.clear(model, alone)
        made = pipe.step(x, target=target + 2)
    assert torch.equal(made, loop.train(alone, 2, x, loss=F.cross_entropy, target=target + 2).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_an_order_in_memory_that_changes_with_a_parameter_counts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4), nn.Flatten())
    x, target = torch.randn(8, 3, 4, 4), torch.randint(3, (8,))
    with fxpipe.compile(model, 2 * ["cpu"], microbatches=2, loss=F.cross_entropy) as pipe:
        pipe.step(x, target=target)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        alone = copy.deepcopy(model)
        loop.clear(model, alone)
        made = pipe.step(x, target=target)
    assert torch.equal(made, loop.train(alone, 2, x, loss=F.cross_entropy, target=target).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


@pytest.mark.smoke
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.double(),
        lambda model: setattr(model.gains, "data", torch.arange(1.0, 9.0)),
    ],
    ids=["dtype", "shape"],
)
def test_data_that_are_put_into_a_parameter_count(change: Callable[[Any], Any]) -> None:
    class Gained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Embedding(5, 4), nn.Linear(4, 3)
            self.gains = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.last(self.first(x) * torch.ones(4, dtype=self.gains.dtype))
            return made * self.gains.sum() / self.gains.numel()

    torch.manual_seed(0)
    model = Gained()
    x, target = torch.arange(8) % 5, torch.arange(8) % 3
    with fxpipe.compile(model, 2 * ["cpu"], microbatches=2, loss=F.cross_entropy) as pipe:
        pipe.step(x, target=target)
        loop.clear(model)
        change(model)
        alone = copy.deepcopy(model)
        made = pipe.step(x, target=target)
    assert torch.equal(made, loop.train(alone, 2, x, loss=F.cross_entropy, target=target).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


class Moody(nn.Module):
    """A loss, or a part of one, whose mode counts."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * (1 if self.training else 2)


@pytest.mark.smoke
@pytest.mark.parametrize("held", [False, True])
def test_the_mode_of_a_module_that_is_no_part_of_the_model_counts(held: bool) -> None:
    moody, x = Moody(), torch.randn(4, 4)
    several = [moody]
    loss = (lambda output, target: several[0](output, target)) if held else moody
    with fxpipe.compile(nn.Linear(4, 4), ["cpu"], microbatches=2, loss=loss) as pipe:
        before = pipe.step(x, target=x)
        moody.eval()
        assert torch.equal(pipe.step(x, target=x), 2 * before)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "file",
    ["<python-input-0>", "<string>", *(f"{folder}_of_mine.py" for folder in BESIDE)],
    ids=["typed", "given", "beside fxpipe", "beside torch"],
)
def test_code_of_the_users_counts_wherever_it_is(file: str) -> None:
    mine: dict[str, Any] = {"__name__": "mine", "nn": nn, "SLOPE": 1.0}
    code = """
class Net(nn.Linear):
    gain = 1.0

    def forward(self, x):
        return super().forward(x) * SLOPE * self.gain
"""
    exec(compile(code, file, "exec"), mine)
    model, x = mine["Net"](4, 4), torch.randn(4, 4)
    with fxpipe.compile(model, ["cpu"], microbatches=2) as pipe, torch.no_grad():
        before = pipe(x)
        model.gain = 2.0
        assert torch.equal(pipe(x), 2 * before)
        mine["SLOPE"] = 4.0
        assert torch.equal(pipe(x), 8 * before)


@pytest.mark.smoke
@pytest.mark.parametrize("asked", [True, False])
def test_what_a_leaf_module_reads_and_changes_is_no_reason_to_trace(
    caplog: pytest.LogCaptureFixture, asked: bool
) -> None:
    class Leaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = {"all": [0]}

        def forward(self, x: Tensor) -> Tensor:
            self.calls["all"][0] += 1
            if asked:
                LEAF_CALLS["all"][0] += 1
            return x if x.sum() > 1e9 else x * min(self.calls["all"][0], 1)

    model = nn.Sequential(nn.Linear(4, 4), Leaf())
    x = torch.randn(8, 4)
    with (
        caplog.at_level(logging.INFO, "fxpipe"),
        fxpipe.compile(
            model,
            ["cpu"],
            microbatches=2,
            loss=F.mse_loss,
            extensions=[fxpipe.LeafModules("1")] if asked else [],
        ) as pipe,
    ):
        for _ in range(3):
            pipe.step(x, target=x)
    assert "anew" not in caplog.text


def _normed() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(4, 4))


@pytest.mark.parametrize("make", [lambda: nn.LSTM(4, 4), lambda: nn.GRU(4, 4), _normed])
def test_what_torchs_modules_make_of_their_weights_in_a_call_causes_no_new_trace(
    make: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = make(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            made = self.inner(x)
            y: Tensor = self.last(made[0] if isinstance(self.inner, nn.RNNBase) else made)
            return y

    torch.manual_seed(0)
    model = Recurrent()
    alone = copy.deepcopy(model)
    options: Any = {"loss": F.mse_loss, "extensions": [fxpipe.LeafModules("inner", "last")]}
    with (
        caplog.at_level(logging.INFO, "fxpipe"),
        fxpipe.compile(model, ["cpu"], microbatches=2, **options) as pipe,
    ):
        for _ in range(3):
            x = torch.randn(8, 3, 4)
            made = pipe.step(x, target=x)
            assert torch.equal(made, loop.train(alone, 2, x, loss=F.mse_loss, target=x).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
    assert "anew" not in caplog.text
    assert "itself while it runs" not in caplog.text


def test_a_leaf_module_that_is_replaced_counts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    x = torch.randn(8, 4)
    options: dict[str, Any] = {"extensions": [fxpipe.LeafModules("1")]}
    with fxpipe.compile(model, ["cpu"], microbatches=2, loss=F.mse_loss, **options) as pipe:
        pipe.step(x, target=x)
        model[1] = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        alone = copy.deepcopy(model)
        loop.clear(model, alone)
        made = pipe.step(x, target=x)
    assert torch.equal(made, loop.train(alone, 2, x, loss=F.mse_loss, target=x).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_what_each_call_changes_inside_of_an_attribute_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.counts = {"calls": [0]}

        def forward(self, x: Tensor) -> Tensor:
            self.counts["calls"][0] += 1
            made: Tensor = self.inner(x)
            return made

    x = torch.randn(8, 4)
    with fxpipe.compile(Counts(), ["cpu"], microbatches=2, loss=F.mse_loss) as pipe:
        for _ in range(2):
            pipe.step(x, target=x)
    assert caplog.text.count("Counts changes model.counts['calls'][0] itself") == 1
    assert "anew" not in caplog.text


def test_a_parameter_without_a_shape_gets_one_by_its_first_run() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
    x, target = torch.randn(8, 5), torch.randint(3, (8,))
    with fxpipe.compile(model, ["cpu"], microbatches=2, loss=F.cross_entropy) as pipe:
        made = pipe.step(x, target=target)
    alone = copy.deepcopy(model)
    loop.clear(alone)
    assert torch.equal(made, loop.train(alone, 2, x, loss=F.cross_entropy, target=target).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


FACTORS = [2]


torch.library.define("guards::scaled", "(Tensor x) -> Tensor")


@torch.library.impl("guards::scaled", "CompositeImplicitAutograd")
def scaled(x: Tensor) -> Tensor:
    """An operation that traces see through."""
    return x * FACTORS[0]


def test_what_an_operation_reads_that_traces_see_through_counts() -> None:
    class Scaling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = torch.ops.guards.scaled(x)
            return y

    x = torch.ones(4, 2)
    with fxpipe.compile(Scaling(), ["cpu"], microbatches=2) as pipe, torch.no_grad():
        for factor in (2, 3):
            FACTORS[0] = factor
            assert torch.equal(pipe(x), factor * x)

"""The loss of a batch is that of the whole batch, however it is split into micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import fxpipe
from fxpipe import InputError
from tests.helpers.losses import IGNORED, assert_whole, counted, masked_mean, net, rows
from tests.oracles import loop


def each_ignoring(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output, target, reduction="none")


@pytest.mark.parametrize("loss", [cross_entropy, masked_mean, each_ignoring])
def test_with_ignored_targets_the_loss_is_the_mean_over_the_others(
    loss: Callable[..., Tensor],
) -> None:
    model, alone = net(), net()
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=3, loss=loss, loss_weight=counted) as pipe:

        @given(st.lists(st.booleans(), min_size=3, max_size=9).filter(any))
        def equal(kept: list[bool]) -> None:
            x, y = rows(len(kept))
            y[~torch.tensor(kept)] = IGNORED
            loop.clear(model, alone)
            made = pipe.step(x, target=y)
            expected = cross_entropy(alone(x), y)
            expected.backward()
            torch.testing.assert_close(made, expected.detach())
            loop.assert_same(loop.gradients(model), loop.gradients(alone), 1e-12)

        equal()


def test_a_micro_batch_that_counts_for_nothing_leaves_no_trace_under_any_schedule() -> None:
    x, y = rows(8)
    y[2:6] = IGNORED
    for schedule in ("gpipe", "1f1b"):
        assert_whole(masked_mean, x, y, 4, loss_weight=counted, schedule=schedule)


def test_class_weights_are_weights_of_the_mean() -> None:
    weights = torch.tensor([1.0, 0.5, 2.0, 0.0, 3.0], dtype=torch.float64)
    x, y = rows(9)
    loss = nn.CrossEntropyLoss(weight=weights)
    assert_whole(loss, x, y, 4, loss_weight=lambda target: weights[target].sum())


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("tracer", ["export", "symbolic"])
def test_losses_are_averaged_or_added_up(reduction: Any, each: bool, tracer: Any) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target, reduction="none" if each else reduction)

    def whole(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target, reduction=reduction)

    assert_whole(loss, *rows(7), 3, whole, reduction=reduction, tracer=tracer)


def test_a_weight_function_is_given_every_target() -> None:
    def loss(output: Tensor, target: Tensor, kept: Tensor) -> Tensor:
        return (cross_entropy(output, target, reduction="none") * kept).sum() / kept.sum()

    x, y = rows(7)
    kept = torch.tensor([1.0, 0, 0, 0, 0.5, 2, 3], dtype=torch.float64)
    assert_whole(loss, x, (y, kept), 4, loss_weight=lambda target, kept: kept.sum())


class Own(nn.Module):
    """Returns its loss, the mean over what is not masked, beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.net(x)
        return {"loss": cross_entropy(output, labels), "output": output}


@pytest.mark.parametrize(
    "options",
    [
        {"loss_weight": lambda x, labels: counted(labels)},
        {},
        {"tracer": "symbolic"},
        {"leaf_modules": [nn.Tanh]},
    ],
)
def test_a_models_own_loss_is_weighed_by_its_inputs(options: dict[str, Any]) -> None:
    model = Own()
    alone = copy.deepcopy(model)
    x, y = rows(9)
    y[:4] = IGNORED
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=3, **options) as pipe:
        loss, output = pipe.step(x, labels=y, return_output=True)
        stepped = loop.gradients(model)
        loop.clear(model)
        called = pipe(x, labels=y)
        called["loss"].backward()
        with torch.no_grad():
            inferred = pipe.eval()(x, labels=y)
    expected = alone(x, y)
    expected["loss"].backward()
    torch.testing.assert_close(loss, expected["loss"].detach())
    assert torch.equal(output["loss"], loss)
    torch.testing.assert_close(output["output"], expected["output"].detach())
    loop.assert_same(stepped, loop.gradients(alone), 1e-12)
    assert torch.equal(called["loss"], loss) and torch.equal(inferred["loss"], loss)
    loop.assert_same(loop.gradients(model), stepped)


def test_a_sum_that_the_model_returns_is_added_up() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(self.net(x), y, reduction="sum")

    model = Summed()
    alone = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=3, reduction="sum") as pipe:
        loss = pipe.step(*rows(8))
        stepped = loop.gradients(model)
        loop.clear(model)
        called = pipe(*rows(8))
        called.backward()
    expected = alone(*rows(8))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    loop.assert_same(stepped, loop.gradients(alone), 1e-12)
    assert torch.equal(called, loss)
    loop.assert_same(loop.gradients(model), stepped)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"reduction": "men"}, "there is no reduction 'men': did you mean 'mean'"),
        ({"loss_weight": 3}, "loss_weight is 3; give a function from the targets to a number"),
        (
            {"reduction": "sum", "loss_weight": counted},
            'reduction is "sum" and there is a loss_weight',
        ),
    ],
    ids=["reduction", "number", "both"],
)
def test_what_is_no_reduction_or_weight_is_refused(options: Any, part: str) -> None:
    with pytest.raises(InputError) as raised:
        fxpipe.compile(net(), ["cpu"], loss=mse_loss, **options)
    assert part in str(raised.value)


@pytest.mark.parametrize(
    ("weight", "part"),
    [
        (lambda y: -1.0, "loss_weight is -1.0 for a micro-batch"),
        (lambda y: float("nan"), "loss_weight is nan for a micro-batch"),
        (lambda y: y, "loss_weight fails on a micro-batch"),
        (lambda a, b: 1, "give a function from the targets to a number"),
        (lambda y: 0, "loss_weight is 0 for every micro-batch"),
    ],
    ids=["negative", "nan", "tensor", "signature", "zero"],
)
def test_a_weight_that_is_no_number_of_at_least_0_is_refused(weight: Any, part: str) -> None:
    x, y = rows(4)
    pipe = fxpipe.compile(net(), ["cpu"], microbatches=2, loss=cross_entropy, loss_weight=weight)
    with pipe, pytest.raises(InputError) as raised:
        pipe.step(x, target=y)
    assert part in str(raised.value)
    assert all(parameter.grad is None for parameter in pipe.parameters())

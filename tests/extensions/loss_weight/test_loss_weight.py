"""With a function that weighs micro-batches, the loss is that of the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fxpipe
from fxpipe import InputError, LossWeight
from tests.compiler.test_bad_functions import Mute, empty, mute
from tests.helpers.losses import IGNORED, assert_whole, counted, masked_mean, net, rows
from tests.helpers.refusals import refused, stepped
from tests.oracles import loop

COUNTED = [LossWeight(counted)]


def each_ignoring(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output, target, reduction="none")


@pytest.mark.smoke
@pytest.mark.parametrize("loss", [cross_entropy, masked_mean, each_ignoring])
def test_with_ignored_targets_the_loss_is_the_mean_over_the_others(
    loss: Callable[..., Tensor],
) -> None:
    model, alone = net(), net()
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=3, loss=loss, extensions=COUNTED) as pipe:

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
        assert_whole(masked_mean, x, y, 4, extensions=COUNTED, schedule=schedule)


@pytest.mark.smoke
def test_class_weights_are_weights_of_the_mean() -> None:
    weights = torch.tensor([1.0, 0.5, 2.0, 0.0, 3.0], dtype=torch.float64)
    x, y = rows(9)
    loss = nn.CrossEntropyLoss(weight=weights)
    assert_whole(loss, x, y, 4, extensions=[LossWeight(lambda y: weights[y].sum())])


def test_a_weight_function_is_given_every_target() -> None:
    def loss(output: Tensor, target: Tensor, kept: Tensor) -> Tensor:
        return (cross_entropy(output, target, reduction="none") * kept).sum() / kept.sum()

    x, y = rows(7)
    kept = torch.tensor([1.0, 0, 0, 0, 0.5, 2, 3], dtype=torch.float64)
    assert_whole(loss, x, (y, kept), 4, extensions=[LossWeight(lambda y, kept: kept.sum())])


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("weight", "part"),
    [
        (lambda y: -1.0, "the LossWeight is -1.0 for a micro-batch"),
        (lambda y: float("nan"), "the LossWeight is nan for a micro-batch"),
        (lambda y: y, "the LossWeight fails on a micro-batch"),
        (lambda a, b: 1, "give a function from the targets to a number"),
        (lambda y: 0, "the LossWeight is 0 for every micro-batch"),
    ],
    ids=["negative", "nan", "tensor", "signature", "zero"],
)
def test_a_weight_that_is_no_number_of_at_least_0_is_refused(weight: Any, part: str) -> None:
    x, y = rows(4)
    given = [LossWeight(weight)]
    pipe = fxpipe.compile(net(), ["cpu"], microbatches=2, loss=cross_entropy, extensions=given)
    with pipe, pytest.raises(InputError) as raised:
        pipe.step(x, target=y)
    assert part in str(raised.value)
    assert all(parameter.grad is None for parameter in pipe.parameters())


@pytest.mark.smoke
def test_what_is_no_function_is_refused_and_so_is_a_weight_of_a_sum() -> None:
    number: Any = 3
    with pytest.raises(InputError, match="the weight of LossWeight is 3; give a function from the"):
        LossWeight(number)
    with pytest.raises(InputError, match='reduction is "sum" and there is a LossWeight'):
        fxpipe.compile(
            net(), ["cpu"], loss=cross_entropy, reduction="sum", extensions=[LossWeight(counted)]
        )


@pytest.mark.smoke
def test_errors_without_a_text_are_told_by_their_type() -> None:
    for function, part in ((mute, "Mute, whose text cannot be made"), (empty, "(ValueError)")):
        given = [LossWeight(function)]
        error = refused(InputError, partial(stepped, extensions=given), part)
        assert type(error.__cause__) is (Mute if function is mute else ValueError)


class Own(nn.Module):
    """Returns its loss, the mean over what is not masked, beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.net(x)
        return {"loss": cross_entropy(output, labels), "output": output}


@pytest.mark.smoke
@pytest.mark.parametrize(
    "options",
    [
        {"extensions": [LossWeight(lambda x, labels: counted(labels))]},
        {},
        {"extensions": [fxpipe.LeafModules(nn.Tanh)]},
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

"""Numbers that a loss returns beside it come back weighted as the loss is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import fxpipe
from fxpipe import InputError
from tests.helpers.losses import IGNORED, net, rows
from tests.helpers.profiles import deep
from tests.helpers.ranks import DeviceMesh, on_ranks
from tests.oracles import loop

X, Y = rows(10)
Y[[0, 1, 2, 7]] = IGNORED


def right(output: Tensor, target: Tensor) -> Tensor:
    """The share of the targets that count, and are right."""
    kept = target != IGNORED
    return ((output.argmax(1) == target) & kept).sum() / kept.sum().clamp(min=1)


def pair(output: Tensor, target: Tensor) -> Any:
    loss = cross_entropy(output, target)
    return 2 * loss, {"ce": loss, "right": right(output, target), "scale": 2}


def mapping(output: Tensor, target: Tensor) -> Any:
    loss, numbers = pair(output, target)
    return {"loss": loss} | numbers


def branching(output: Tensor, target: Tensor) -> Any:
    loss, numbers = pair(output, target)
    if loss > 1e9:
        loss = loss / 2
    return loss, {**numbers, "ce": numbers["ce"].detach().item()}


def expected(model: nn.Module) -> dict[str, float]:
    output = model(X)
    loss = cross_entropy(output, Y)
    return {
        "loss": 2 * float(loss.detach()),
        "loss/ce": float(loss.detach()),
        "loss/right": float(right(output, Y)),
        "loss/scale": 2.0,
    }


def of_loss(pipe: fxpipe.Pipeline) -> dict[str, float]:
    return {name: value for name, value in pipe.metrics.items() if name.startswith("loss")}


@pytest.mark.smoke
@pytest.mark.parametrize("schedule", ["1f1b", "2bw", *deep("zb-h1")])
@pytest.mark.parametrize("loss", [pair, mapping])
def test_numbers_of_the_batch_are_in_the_metrics_and_the_loss_trains(
    loss: Callable[..., Any], schedule: str
) -> None:
    model, alone = net(), net()
    sgd = partial(torch.optim.SGD, lr=0.1)
    optimizer = sgd(alone.parameters())
    options: dict[str, Any] = {"schedule": schedule, "optimizer": sgd}
    with fxpipe.compile(model, 2, microbatches=4, loss=loss, **options) as pipe:
        pipe.metrics  # noqa: B018
        pipe.step(X, target=Y)
        assert of_loss(pipe) == pytest.approx(expected(alone), rel=1e-6)
        pipe.flush()
        assert not pipe.plan.stages[-1].calls
    pair(alone(X), Y)[0].backward()
    optimizer.step()
    loop.assert_same(model.state_dict(), alone.state_dict(), 1e-12)


@pytest.mark.smoke
def test_a_loss_that_is_called_as_it_is_has_numbers_too() -> None:
    kept = Y.clamp(min=0)
    with fxpipe.compile(net(), 2, microbatches=5, loss=branching) as pipe:
        pipe.metrics  # noqa: B018
        for _ in range(2):
            made = pipe.step(X, target=kept)
            found = of_loss(pipe)
    assert found["loss"] == float(made) == pytest.approx(2 * found["loss/ce"])
    assert found["loss/ce"] == pytest.approx(cross_entropy(net()(X), kept).item(), rel=1e-6)


@pytest.mark.smoke
def test_numbers_beside_a_sum_are_added_up_and_beside_given_weights_weighted() -> None:
    def summed(output: Tensor, target: Tensor) -> Any:
        each = (output - target).square().mean(1)
        return each.sum(), {"most": each.amax(), "samples": len(output)}

    def averaged(output: Tensor, target: Tensor) -> Any:
        loss = (output - target).square().mean()
        return loss, {"mean": loss}

    target = torch.zeros(10, 5, dtype=torch.float64)
    with fxpipe.compile(net(), 1, microbatches=3, loss=summed, reduction="sum") as pipe:
        pipe.metrics  # noqa: B018
        pipe.step(X, target=target)
        found = of_loss(pipe)
    each = net()(X).detach().square().mean(1)
    most = sum(float(part.amax()) for part in each.tensor_split(3))
    wanted = {"loss": float(each.sum()), "loss/most": most, "loss/samples": 10.0}
    assert found == pytest.approx(wanted)
    weight = fxpipe.LossWeight(lambda target: 1)
    with (
        fxpipe.compile(net(), 1, microbatches=3, loss=averaged, extensions=[weight]) as pipe,
        warnings.catch_warnings(action="ignore"),  # it is no mean over micro-batches
    ):
        pipe.metrics  # noqa: B018
        pipe.step(X, target=target)
        assert of_loss(pipe)["loss/mean"] == pytest.approx(of_loss(pipe)["loss"])


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("beside", "part"),
    [
        ({"logits": torch.ones(3)}, r"a Tensor of shape \(3,\) as 'logits' beside the loss"),
        ({"name": "ce"}, "a str as 'name' beside the loss; return numbers or scalars there"),
    ],
)
def test_what_is_no_number_beside_the_loss_is_refused(beside: Any, part: str) -> None:
    with (
        fxpipe.compile(net(), 1, microbatches=2, loss=lambda o, t: (o.mean(), beside)) as pipe,
        pytest.raises(InputError, match=part),
    ):
        pipe.step(X, target=Y)


@pytest.mark.smoke
def test_other_numbers_in_a_later_call_are_refused() -> None:
    name = ["first"]

    def loss(output: Tensor, target: Tensor) -> Any:
        value = output.square().mean()
        return value, {name[0]: value.detach().item()}

    text = "called 'later', and for the first micro-batch 'first'; let it return the same"
    with fxpipe.compile(net(), 1, microbatches=2, loss=loss) as pipe:
        pipe.step(X, target=Y)
        name[0] = "later"
        with pytest.raises(fxpipe.FxpipeError, match=text):
            pipe.step(X, target=Y)


def on_rank(mesh: DeviceMesh) -> Any:
    torch.set_num_threads(1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with fxpipe.compile(net(), mesh, microbatches=4, loss=pair) as pipe:
            pipe.metrics  # noqa: B018
            pipe.step(X, target=Y)
            found = of_loss(pipe)
        with fxpipe.compile(net(), mesh, microbatches=4, loss=rooted) as pipe:
            pipe.step(X, target=Y)
            pipe.step(X, target=Y)
    return found, [str(warning.message) for warning in told]


def rooted(output: Tensor, target: Tensor) -> Tensor:
    return mse_loss(output, torch.zeros_like(output)).sqrt()


@pytest.mark.smoke
@pytest.mark.needs("ranks")
def test_every_rank_has_the_numbers_and_hears_of_a_loss_that_is_not_that_of_the_batch() -> None:
    for found, told in on_ranks(2, on_rank):
        assert found == pytest.approx(expected(net()), rel=1e-6)
        assert len(told) == 1 and "no weights of micro-batches make it right" in told[0]

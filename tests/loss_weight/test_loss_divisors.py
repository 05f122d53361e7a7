"""What divides a loss is told from its graph, and asked for where it cannot be told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, mse_loss, nll_loss, pad

import fxpipe
from tests.helpers.losses import IGNORED, assert_whole, counted, masked_mean, net, rows
from tests.helpers.profiles import DEEP, deep
from tests.oracles import loop

WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 0.0, 3.0], dtype=torch.float64)


def of_classes(output: Tensor, target: Tensor) -> Tensor:
    kept = target.clamp(min=0)
    return cross_entropy(output.transpose(1, 2), kept, weight=WEIGHTS, ignore_index=2)


def shifted(output: Tensor, target: Tensor) -> Tensor:
    after = pad(target, (0, 1), value=IGNORED)[:, 1:].contiguous()
    return nll_loss(log_softmax(output.view(-1, 5), 1), after.view(len(output) * 3))


def several(output: Tensor, target: Tensor) -> Tensor:
    """Two terms that are means over the same, and one that no sample changes."""
    classes, target = output.flatten(0, 1), target.flatten()
    first = cross_entropy(classes, target, label_smoothing=0.1)
    return torch.stack([first, cross_entropy(2 * classes, target)]).mean() / 4 + WEIGHTS.sum()


DIVIDED: dict[Callable[..., Tensor], Callable[[Tensor], Tensor]] = {
    lambda output, target: cross_entropy(output.transpose(1, 2), target): counted,
    of_classes: lambda y: WEIGHTS[y.clamp(min=0)][y != 2].sum(),
    shifted: lambda y: counted(y[:, 1:]),
    several: counted,
}
"""Losses of a sequence, and what they are divided by."""


TARGETS = st.lists(st.tuples(*3 * [st.sampled_from([IGNORED, *range(5)])]), min_size=3, max_size=7)


@pytest.mark.smoke
@pytest.mark.parametrize(("loss", "divisor"), DIVIDED.items())
def test_what_divides_a_loss_weighs_its_micro_batches(
    loss: Callable[..., Tensor], divisor: Callable[[Tensor], Tensor]
) -> None:
    model, alone, whole = net(), net(), net()
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=3, loss=loss) as pipe:

        @settings(max_examples=2000 if DEEP else 10)
        @given(TARGETS)
        def equal(targets: list[tuple[int, ...]]) -> None:
            x, y = rows(3 * len(targets))[0].view(-1, 3, 4), torch.tensor(targets)
            assume(divisor(y) > 0)
            loop.clear(model, alone, whole)
            made = pipe.step(x, target=y)
            looped = loop.train(alone, 3, x, loss=loss, target=y, weight=divisor)
            assert torch.equal(made, looped.loss)
            loop.assert_same(loop.gradients(model), loop.gradients(alone))
            expected = loss(whole(x), y)
            expected.backward()
            torch.testing.assert_close(made, expected.detach())
            loop.assert_same(loop.gradients(model), loop.gradients(whole), 1e-12)

        equal()


@pytest.mark.smoke
@pytest.mark.parametrize("schedule", ["gpipe", "zb-v", "2bw"])
def test_under_any_schedule_an_update_is_that_of_the_whole_batch(schedule: str) -> None:
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))).double()
    alone = copy.deepcopy(model)
    x, y = torch.randn(8, 5, dtype=torch.float64), torch.arange(8) % 5
    y[:3] = IGNORED
    options: dict[str, Any] = {"schedule": schedule, "loss": cross_entropy}
    sgd = partial(torch.optim.SGD, lr=0.1)
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=4, optimizer=sgd, **options) as pipe:
        loss = pipe.step(x, target=y)
        pipe.flush()
    expected = cross_entropy(alone(x), y)
    expected.backward()
    sgd(alone.parameters()).step()
    torch.testing.assert_close(loss + 0, expected.detach())
    loop.assert_same(model.state_dict(), alone.state_dict(), 1e-12)


def test_where_all_targets_count_losses_are_averaged_by_samples_to_the_bit() -> None:
    model, alone = net(), net()
    with fxpipe.compile(model, ["cpu"], microbatches=3, loss=cross_entropy) as pipe:
        for samples in range(3, 10):
            loop.clear(model, alone)
            x, y = rows(samples)
            made = pipe.step(x, target=y)
            assert torch.equal(made, loop.train(alone, 3, x, loss=cross_entropy, target=y).loss)
            loop.assert_same(loop.gradients(model), loop.gradients(alone))


@pytest.mark.smoke
def test_a_batch_of_ignored_targets_is_what_it_is_to_the_model() -> None:
    model, alone = net(), net()
    x, y = rows(6)
    y.fill_(IGNORED)
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=3, loss=cross_entropy) as pipe:
        made = pipe.step(x, target=y)
    cross_entropy(alone(x), y).backward()
    assert made.isnan()
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


class Own(nn.Module):
    """Returns its loss, which cannot be compared with that of joined outputs."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net(), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.net(x), y)


def quotient(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output, target, reduction="sum") / (target != IGNORED).sum()


def by_target(output: Tensor, target: Tensor) -> Tensor:
    losses = cross_entropy(output, target, reduction="none")
    return losses.where(target != IGNORED, 0).sum() / (target != IGNORED).sum()


@pytest.mark.parametrize("loss", [masked_mean, quotient, by_target])
def test_a_divisor_in_a_models_own_loss_is_asked_for_once(loss: Callable[..., Tensor]) -> None:
    x, y = rows(8)
    y[:3] = IGNORED
    with fxpipe.compile(Own(loss), ["cpu"], microbatches=4) as pipe:
        with pytest.warns(UserWarning, match=r"a function of the model's inputs that") as warned:
            pipe.step(x, y)
        pipe.step(x, y)
    assert loss.__code__.co_filename in str(warned[0].message)
    assert warned[0].filename == __file__
    model, alone = Own(loss), Own(loss)
    weight = fxpipe.LossWeight(lambda x, y: counted(y))
    with fxpipe.compile(model, 2, microbatches=4, extensions=[weight]) as pipe:
        made = pipe.step(x, y)
    expected = alone(x, y)
    expected.backward()
    torch.testing.assert_close(made, expected.detach())
    loop.assert_same(loop.gradients(model), loop.gradients(alone), 1e-12)


def test_a_sum_over_targets_that_a_model_returns_is_told() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target, reduction="sum")

    x, y = rows(6)
    with (
        fxpipe.compile(Own(loss), ["cpu"], microbatches=3) as pipe,
        pytest.warns(UserWarning, match=r'a sum over targets.*give .*reduction="sum"'),
    ):
        pipe.step(x, y)
    model, alone = Own(loss), Own(loss)
    with fxpipe.compile(model, 2, microbatches=3, reduction="sum") as pipe:
        torch.testing.assert_close(pipe.step(x, y), alone(x, y).detach())


PLAIN: list[Callable[..., Tensor]] = [
    lambda output, y: mse_loss(output, torch.ones_like(output)),
    lambda output, y: cross_entropy(output, y, reduction="sum") / len(y),
    lambda output, y: cross_entropy(output, y, reduction="none"),
    lambda output, y: cross_entropy(output, y.eq(torch.arange(5)[:, None]).T.double()),
    lambda output, y: (output.square().sum(1) / (1 + y)).mean(),
    lambda output, y: cross_entropy(output, y) + output.mean() / WEIGHTS.sum(),
]


@pytest.mark.smoke
@pytest.mark.parametrize("loss", PLAIN)
def test_nothing_is_said_of_means_over_samples(loss: Callable[..., Tensor]) -> None:
    for samples in (*deep(6), 7):  # a warning would be an error
        assert_whole(loss, *rows(samples), 3, lambda *given: loss(*given).mean())

"""What divides a loss is told from its graph, and asked for where it cannot be told."""

from __future__ import annotations

import copy
import re
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
from tests.helpers.profiles import DEEP
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


def masked_quotient(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output, target, reduction="sum") / (target != IGNORED).sum()


def tuple_mean(output: Tensor, scale: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output, target).square().sqrt() * scale.amax()


@pytest.mark.smoke
@pytest.mark.parametrize("loss", [masked_mean, masked_quotient, tuple_mean])
def test_what_is_not_told_from_a_loss_is_asked_for_once_with_the_line_to_paste(
    loss: Callable[..., Tensor],
) -> None:
    x, y = rows(8)
    target: Any = (torch.ones(8, dtype=torch.float64), y) if loss is tuple_mean else y
    options: dict[str, Any] = {"loss": loss, "microbatches": 4}
    y[:3] = IGNORED
    with fxpipe.compile(net(), ["cpu"], **options) as pipe:
        with pytest.warns(UserWarning, match="is not that of the whole batch") as warned:
            pipe.step(x, target=target)
        pipe.step(x, target=target)
    line = re.search(r"extensions=(\[.*\])\)$", str(warned[0].message))
    assert line is not None and loss.__name__ in str(warned[0].message)
    assert warned[0].filename == __file__
    assert_whole(loss, x, target, 4, extensions=[*eval(line[1])])


def test_a_mean_over_what_a_mask_selects_is_asked_for() -> None:
    def by_target(output: Tensor, target: Tensor) -> Tensor:
        losses = cross_entropy(output, target, reduction="none")
        return losses[target > 1].mean()

    def by_output(output: Tensor, target: Tensor) -> Tensor:
        losses = cross_entropy(output, target, reduction="none")
        return torch.masked_select(losses, losses > 0.1).mean()

    x, y = rows(8)
    y.copy_(torch.tensor([0, 0, 1, 3, 4, 2, 2, 3]))
    for loss in (by_target, by_output):
        with (
            fxpipe.compile(net(), ["cpu"], microbatches=4, loss=loss) as pipe,
            pytest.warns(UserWarning, match="is not that of the whole batch.*LossWeight\\(lambda"),
        ):
            pipe.step(x, target=y)
    weighed = [fxpipe.LossWeight(lambda target: (target > 1).sum())]
    assert_whole(by_target, x, y, 4, extensions=weighed)


def test_terms_that_are_means_over_different_things_are_told() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target) + 0.1 * output.square().mean()

    model, alone = net(), net()
    x, y = rows(6)
    y[1] = IGNORED
    with (
        fxpipe.compile(model, ["cpu"] * 2, microbatches=3, loss=loss) as pipe,
        pytest.warns(UserWarning, match=r"target != -100\).sum\(\)\)\]\)$"),
    ):
        made = pipe.step(x, target=y)
    assert torch.equal(made, loop.train(alone, 3, x, loss=loss, target=y).loss)


def test_a_sum_over_targets_that_would_be_averaged_is_told() -> None:
    def loss(output: Tensor, target: Tensor, count: Tensor) -> Tensor:
        return cross_entropy(output, target, reduction="sum") / count

    x, y = rows(6)
    target = y, torch.tensor(6)
    with (
        fxpipe.compile(net(), ["cpu"], microbatches=3, loss=loss) as pipe,
        pytest.warns(UserWarning, match=r'a sum over targets.*give .*reduction="sum"'),
    ):
        pipe.step(x, target=target)
    assert_whole(loss, x, target, 3, reduction="sum")


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
    for samples in (6, 7):  # a warning would be an error
        assert_whole(loss, *rows(samples), 3, lambda *given: loss(*given).mean())

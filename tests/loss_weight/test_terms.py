"""What a loss divides by is read from its graph, and computed as a loop would count it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from fxpipe.compiler.loss_weight.terms import Divisor, _Reader
from fxpipe.passes.tracing.loss_graph import graph_of_loss
from fxpipe.passes.tracing.loss_module import LossModule

WEIGHT = torch.tensor([1.0, 0.5, 2.0, 4.0])
Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
TARGET = torch.tensor([0, 1, -100, 3, -100, 2])
MASK = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])


def terms_of(loss: Callable[..., Tensor], *targets: Any) -> tuple[Divisor | None, ...]:
    leaves, spec = pytree.tree_flatten(tuple(targets))
    module = LossModule(lambda y, *t: (loss(y, *t), {}), loss, pytree.tree_flatten(Y)[1])
    names = [f"t{index}" for index in range(len(leaves))]
    graph, of = graph_of_loss(module, [Y], leaves, spec, names)
    inputs = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    pairs = zip(inputs, of, strict=True)
    numbers = {name: names.index(target) for name, target in pairs if target is not None}
    return _Reader(graph, numbers, {}, (), range(len(leaves))).terms(
        graph.graph.output_node().args[0]  # type: ignore[arg-type]
    )


def value_of(divisor: Divisor | None, *targets: Any) -> float:
    assert divisor is not None and divisor.made is not None and divisor.mean
    return float(divisor.made(*(targets[at] for at in divisor.leaves)))


COUNTED: dict[str, tuple[Callable[..., Tensor], float]] = {
    "ignored": (lambda y, t: F.cross_entropy(y, t), 4),
    "another ignored": (lambda y, t: F.cross_entropy(y, t.clamp(min=0), ignore_index=0), 3),
    "scaled": (lambda y, t: 0.5 * F.cross_entropy(y, t) / 3, 4),
    "flattened": (lambda y, t: F.cross_entropy(y.view(-1, 4), t.view(3, 2).flatten()), 4),
    "classes weighed": (lambda y, t: F.cross_entropy(y, t, WEIGHT), 1.0 + 0.5 + 4.0 + 2.0),
    "nll": (lambda y, t: F.nll_loss(y.log_softmax(1), t), 4),
}


@pytest.mark.parametrize("name", COUNTED)
def test_the_divisor_is_what_the_mean_counts(name: str) -> None:
    loss, count = COUNTED[name]
    (divisor,) = terms_of(loss, TARGET)
    assert value_of(divisor, TARGET) == count


@pytest.mark.parametrize("name", COUNTED)
def test_means_of_parts_weighed_by_their_divisors_are_the_mean_of_all(name: str) -> None:
    loss, _ = COUNTED[name]
    (divisor,) = terms_of(loss, TARGET)
    parts = [(Y[:2], TARGET[:2]), (Y[2:], TARGET[2:])]
    if name == "flattened":
        parts = [(Y[:2], TARGET[:2]), (Y[2:], TARGET[2:])]
        whole = F.cross_entropy(Y, TARGET)
        losses = [F.cross_entropy(y, t) for y, t in parts]
    else:
        whole, losses = loss(Y, TARGET), [loss(y, t) for y, t in parts]
    counts = [value_of(divisor, t) for _, t in parts]
    made = sum(n * x for n, x in zip(counts, losses, strict=True)) / sum(counts)
    torch.testing.assert_close(made, whole)


def test_a_mean_over_samples_has_no_divisor() -> None:
    assert terms_of(lambda y, t: F.mse_loss(y, t), Y.flip(0)) == (None,)
    assert terms_of(lambda y, t: (y - t).square().sum(1).mean(), Y.flip(0)) == (None,)


def test_each_term_of_a_sum_has_its_own() -> None:
    def loss(y: Tensor, t: Tensor, other: Tensor) -> Tensor:
        return F.cross_entropy(y, t) + 0.1 * F.mse_loss(y, other)

    divisors = terms_of(loss, TARGET, Y.flip(0))
    assert len(divisors) == 2
    found = [divisor for divisor in divisors if divisor is not None]
    assert [value_of(divisor, TARGET, Y) for divisor in found] == [4]


def test_a_quotient_by_a_mask_is_asked_about() -> None:
    def loss(y: Tensor, mask: Tensor) -> Tensor:
        return (y.sum(1) * mask).sum() / mask.sum()

    (divisor,) = terms_of(loss, MASK)
    assert divisor is not None and divisor.made is None and not divisor.mean
    (divisor,) = terms_of(lambda y, mask: y.sum(1)[mask > 0].mean(), MASK)
    assert divisor is not None and divisor.made is None


def test_a_sum_is_told_as_one() -> None:
    (divisor,) = terms_of(lambda y, t: F.cross_entropy(y, t, reduction="sum"), TARGET)
    assert divisor is not None and divisor.sums
    (divisor,) = terms_of(lambda y, t: F.cross_entropy(y, t, reduction="sum") / 6, TARGET)
    assert divisor is None  # a sum by a constant may be a mean


def test_smoothing_where_all_weights_are_0_is_no_number() -> None:
    weight = torch.tensor([0.0, 1.0, 1.0, 1.0])
    (divisor,) = terms_of(lambda y, t: F.cross_entropy(y, t, weight, label_smoothing=0.1), TARGET)
    assert math.isnan(value_of(divisor, torch.zeros(3, dtype=torch.int64)))
    assert value_of(divisor, torch.full((3,), -100)) == 0

"""What random operations draw has the distribution that it should have."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from fxpipe.random import mix
from tests.helpers.draws import drawn
from tests.helpers.profiles import deep

COUNT = 40_000


def near(value: Tensor | float, expected: float, deviation: float, count: int = COUNT) -> bool:
    """Whether a mean of so many draws lies within six standard errors."""
    return abs(float(value) - expected) < 6 * deviation / math.sqrt(count)


def long() -> Tensor:
    return torch.full((COUNT, 1), 2.0, dtype=torch.float64)


@pytest.mark.parametrize(
    ("function", "mean", "deviation"),
    [
        (lambda x: torch.normal(x, x * 3), 2.0, 6.0),
        (lambda x: torch.normal(1.0, 2.0, x.shape, dtype=x.dtype), 1.0, 2.0),
        (lambda x: torch.empty_like(x).normal_(1.0, 2.0), 1.0, 2.0),
        (lambda x: torch.empty_like(x).uniform_(1.0, 3.0), 2.0, 2 / math.sqrt(12)),
        (lambda x: torch.empty_like(x).exponential_(4.0), 0.25, 0.25),
        (lambda x: torch.randint_like(x, 2, 5), 3.0, math.sqrt(2 / 3)),
        (lambda x: torch.randint_like(x, torch.tensor(5)), 2.0, math.sqrt(2)),
        (lambda x: torch.empty_like(x).random_(5), 2.0, math.sqrt(2)),
        (lambda x: torch.empty_like(x).bernoulli_(x / 8), 0.25, math.sqrt(3 / 16)),
        (lambda x: torch.empty_like(x).log_normal_(1.0, 0.5).log(), 1.0, 0.5),
        (lambda x: torch.empty_like(x).geometric_(0.2), 5.0, math.sqrt(0.8) / 0.2),
        (lambda x: torch.poisson(x * 2), 4.0, 2.0),
    ],
)
def test_draws_have_their_mean_and_deviation(
    function: Callable[[Tensor], Tensor], mean: float, deviation: float
) -> None:
    y = drawn(function, long())
    assert near(y.mean(), mean, deviation)
    assert abs(float(y.std()) / deviation - 1) < 0.03


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_right_share_scaled(p: float) -> None:
    y = drawn(lambda x: nn.functional.dropout(x, p), long())
    assert near((y == 0).double().mean(), p, math.sqrt(p * (1 - p)))
    kept = y[y != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 2 / (1 - p)))


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_all_or_nothing(p: float) -> None:
    x = torch.randn(5, 4)
    assert torch.equal(drawn(lambda x: nn.functional.dropout(x, p), x), x * (1 - p))


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    y = drawn(lambda x: nn.functional.alpha_dropout(x, 0.2, training=True), _normal())
    assert near(y.mean(), 0, 1.5)
    assert near((y**2).mean(), 1, 3)


def _normal() -> Tensor:
    return torch.randn(COUNT, 1, generator=torch.Generator().manual_seed(0))


def test_uniform_numbers_fill_the_unit_interval() -> None:
    for function in (torch.rand_like, lambda x: torch.rand(x.shape[0], 1)):
        y = drawn(function, long())
        assert 0 <= y.min() < 0.01
        assert 0.99 < y.max() < 1
        assert near(y.double().mean(), 0.5, math.sqrt(1 / 12))
        assert near(((y.double() - 0.5) ** 2).mean(), 1 / 12, 0.08)


def test_normal_numbers_have_mean_zero_and_variance_one() -> None:
    for function in (torch.randn_like, lambda x: torch.randn(x.shape[0], 1)):
        y = drawn(function, long())
        assert near(y.double().mean(), 0, 1)
        assert near((y.double() ** 2).mean(), 1, math.sqrt(2))
        assert near((y.abs() < 1).double().mean(), 0.6827, 0.47)


def test_integers_are_even_over_their_range() -> None:
    for low, function in (
        (3, lambda x: torch.randint(3, 8, (x.shape[0],))),
        (0, lambda x: torch.randint(5, (x.shape[0],))),
    ):
        y = drawn(function, long())
        assert y.dtype == torch.int64
        counts = torch.bincount(y - low, minlength=5)
        assert len(counts) == 5
        assert all(near(count / COUNT, 0.2, 0.4) for count in counts)


def test_bernoulli_follows_its_chances() -> None:
    chances = torch.tensor([0.0, 0.2, 0.7, 1.0]).expand(COUNT, 4)
    y = drawn(torch.bernoulli, chances)
    assert set(y.unique().tolist()) == {0.0, 1.0}
    for column, p in enumerate((0.0, 0.2, 0.7, 1.0)):
        share = y[:, column].double().mean()
        assert float(share) == p if p in (0, 1) else near(share, p, 0.5)


def exponential(x: Tensor) -> Tensor:
    return torch.empty_like(x).exponential_()


HALF = (torch.float16, torch.bfloat16)
RARE: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "bernoulli": (torch.bernoulli, 1 / 1024),
    "bernoulli in place": (lambda x: torch.empty_like(x).bernoulli_(x), 1 / 1024),
    "exponential": (lambda x: exponential(x) > 9, math.exp(-9)),
    "geometric": (lambda x: torch.empty_like(x).geometric_(0.5) > 12, 2**-12),
    "cauchy": (lambda x: torch.empty_like(x).cauchy_().abs() > 300, 2 / (300 * math.pi)),
}


@pytest.mark.parametrize("kind", HALF, ids=str)
@pytest.mark.parametrize("name", RARE)
def test_half_precision_has_small_chances_and_long_tails(name: str, kind: torch.dtype) -> None:
    function, share = RARE[name]
    y = drawn(lambda x: function(x.to(kind)), torch.full((1_000_000, 1), 1 / 1024))
    assert near(y.double().mean(), share, math.sqrt(share), len(y))


@pytest.mark.parametrize(
    "kind", [torch.float16, *deep(torch.bfloat16, torch.float32, torch.float64)], ids=str
)
def test_exponential_numbers_are_never_zero(kind: torch.dtype) -> None:
    """One 0 of 2²⁴ would make what ``gumbel_softmax`` returns for its row NaN."""
    y = drawn(lambda x: exponential(x.to(kind)), torch.ones(30_000_000, 1))
    assert y.dtype == kind
    assert y.min() > 0


def test_a_permutation_holds_every_number_once() -> None:
    y = drawn(lambda x: torch.randperm(100) + 0 * x.shape[0], torch.ones(5, 4))
    assert not torch.equal(y, torch.arange(100))
    assert torch.equal(y.sort().values, torch.arange(100))


def test_seeds_and_numbers_next_to_each_other_give_unrelated_draws() -> None:
    x = torch.empty(1000, dtype=torch.float64)
    rows = [
        torch.ops.fxpipe.uniform(x, 0.0, 1.0, torch.tensor(seed), node)
        for seed in range(8)
        for node in range(8)
    ]
    related = torch.corrcoef(torch.stack(rows)) - torch.eye(64, dtype=torch.float64)
    assert related.abs().max() < 6 / math.sqrt(1000)
    assert len({mix(a, b) for a in range(100) for b in range(100)}) == 10_000


def test_cauchys_numbers_have_their_quartiles() -> None:
    y = drawn(lambda x: torch.empty_like(x).cauchy_(2.0, 3.0), long())
    for below, share in ((-1.0, 0.25), (2.0, 0.5), (5.0, 0.75)):
        assert near((y < below).double().mean(), share, 0.5)


def test_a_multinomial_follows_its_weights() -> None:
    weights = torch.tensor([1.0, 0.0, 3.0]).expand(COUNT, 3)
    y = drawn(lambda x: torch.multinomial(x, 2, replacement=True), weights)
    assert y.shape == (COUNT, 2)
    assert near((y == 2).double().mean(), 0.75, 0.5, 2 * COUNT)
    assert not (y == 1).any()
    without = drawn(lambda x: torch.multinomial(x, 2), weights)
    assert torch.equal(without.sort(1).values, torch.tensor([0, 2]).expand(COUNT, 2))


@pytest.mark.parametrize(
    "sample",
    [
        lambda x: Normal(x, x.exp()).rsample(),
        lambda x: Categorical(logits=x).sample().double() + 0 * x.sum(1),
    ],
    ids=["normal", "categorical"],
)
def test_torchs_distributions_are_drawn_from(sample: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(50, 4)
    checked = Normal._validate_args
    y = drawn(sample, x)
    assert (y.shape, y.dtype) == (sample(x).shape, sample(x).dtype)
    assert torch.equal(drawn(sample, x), y)
    assert not torch.equal(drawn(sample, x, seed=1), y)
    assert Normal._validate_args is checked

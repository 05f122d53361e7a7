"""The factors of micro-batches' losses, beside the loss of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fxpipe.compiler.loss_weight.terms import Divisor
from fxpipe.compiler.loss_weight.weighing import weighed

SUMS = ((3.0, 5.0), (2.0, 7.0))
"""Term → micro-batch → the sum over the targets that count there."""

MEANS = [Divisor("line 1", mean=True), Divisor("line 2", mean=True)]


def whole(counts: Sequence[Sequence[float]]) -> float:
    """The loss of the batch: each term is the mean over its targets in all micro-batches."""
    return sum(sum(sums) / sum(n) for sums, n in zip(SUMS, counts, strict=True))


def joined(counts: Sequence[Sequence[float]], factors: Sequence[float]) -> float:
    """The losses of the micro-batches, weighed."""
    return sum(
        factor * sum(sums[i] / n[i] for sums, n in zip(SUMS, counts, strict=True))
        for i, factor in enumerate(factors)
    )


@pytest.mark.smoke
def test_means_over_the_same_targets_are_weighed_by_these() -> None:
    counts = [(1.0, 3.0), (2.0, 6.0)]
    factors, wrong = weighed(MEANS, counts, [0.5, 0.5])
    assert wrong is None
    assert joined(counts, factors) == pytest.approx(whole(counts))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("counts", "named"), [([(1.0, 3.0), (3.0, 1.0)], 0), ([(2.0, 2.0), (3.0, 1.0)], 1)]
)
def test_means_over_other_targets_are_weighed_by_samples_and_told_of(
    counts: list[tuple[float, float]], named: int
) -> None:
    factors, wrong = weighed(MEANS, counts, [0.5, 0.5])
    assert list(factors) == [0.5, 0.5]
    assert wrong is MEANS[named]
    assert joined(counts, factors) != pytest.approx(whole(counts))

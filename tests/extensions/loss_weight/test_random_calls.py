"""Random models, called in random ways, with weights of micro-batches many of which are 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from fxpipe.extensions.loss_weight.weight import Weighted
from tests.helpers.profiles import DEEP
from tests.passes.graph.test_random_calls import Drawn, assert_equals_the_loop, drawn, tried


def small_ids(first: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A weight that is 0 for many a micro-batch: how many of its samples have a small id."""
    found = [first, *args, *kwargs.values()]
    if isinstance(first, dict | list):
        found = [*(first.values() if isinstance(first, dict) else first)]
    ids = next(leaf for leaf in found if isinstance(leaf, Tensor) and leaf.dtype == torch.int64)
    return (ids < 2).sum()


@pytest.mark.smoke
@pytest.mark.timeout(0 if DEEP else 900)
@tried
@given(drawn)
def test_a_random_call_equals_the_loop(call: Drawn) -> None:
    assert_equals_the_loop(call, {"weighted": Weighted(weight=small_ids)})

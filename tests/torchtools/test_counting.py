"""Bytes are counted by storage, until it is freed."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.torchtools.counting import Counting

FLOAT = 4


def test_a_storage_counts_once_however_many_views_share_it() -> None:
    with Counting() as counting:
        x = torch.ones(10)
        y = x.view(2, 5)[0]
        assert counting.alive == counting.peak == 10 * FLOAT
        z = y + 1
        assert counting.alive == 15 * FLOAT
        del x
        assert counting.alive == 15 * FLOAT  # y holds its memory
        del y
        assert (counting.alive, counting.peak) == (5 * FLOAT, 15 * FLOAT)
        del z
    assert counting.alive == 0


def test_what_was_there_before_does_not_count_unless_it_is_adopted() -> None:
    x, y = torch.ones(10), torch.ones(4)
    with Counting() as counting:
        counting.adopt([x, {"y": y}])
        assert counting.alive == 14 * FLOAT
        (x * 2).sum()
        assert counting.alive == 14 * FLOAT
    other = torch.ones(7)
    with Counting() as counting:
        other.add_(1)
        assert counting.alive == counting.peak == 0


def test_tensors_without_data_count_if_asked_in_whole_blocks() -> None:
    with Counting() as counting:
        torch.empty(10, device="meta").add(1)
        assert counting.peak == 0
    with Counting(meta=512) as counting:
        kept = torch.empty(129, device="meta")
        assert counting.alive == 1024
    del kept


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=20))
def test_the_peak_is_that_of_a_list_of_what_is_alive(steps: list[tuple[int, int]]) -> None:
    held: dict[int, torch.Tensor] = {}
    sizes: dict[int, int] = {}
    peak = 0
    with Counting() as counting:
        for slot, size in steps:
            made = torch.empty(size)  # beside the one whose place it takes
            peak = max(peak, sum(sizes.values()) + size)
            held[slot], sizes[slot] = made, size
            del made
            assert counting.alive == sum(sizes.values()) * FLOAT
        assert counting.peak == peak * FLOAT

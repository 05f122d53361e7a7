"""Shapes of inputs, and inputs of other shapes that are laid out alike."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.passes.tracing.shapes import resized, shapes_of

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def test_what_is_no_tensor_has_no_shape() -> None:
    assert shapes_of([torch.ones(2, 3), 5, torch.tensor(1), "x"]) == [(2, 3), None, (), None]
    assert resized(5, (), None) == 5
    assert resized(torch.ones(()), (), ()).shape == ()


@given(SIZES, st.data())
def test_a_tensor_of_another_shape_keeps_the_order_of_dimensions(
    sizes: list[int], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    back = sorted(range(len(sizes)), key=order.__getitem__)
    x = torch.empty([sizes[d] for d in order]).permute(*back)
    assert list(x.shape) == sizes
    others = data.draw(st.lists(st.integers(1, 4), min_size=len(sizes), max_size=len(sizes)))
    made = resized(x, x.stride(), tuple(others))
    like = torch.empty([others[d] for d in order]).permute(*back)
    assert made.is_meta and made.dtype is x.dtype and made.shape == like.shape
    large = [d for d in range(len(sizes)) if min(sizes[d], others[d]) > 1]
    if len(large) == len(sizes):  # strides of dimensions of size 1 tell nothing of the order
        assert made.stride() == like.stride()


def test_room_behind_a_dimension_is_kept() -> None:
    x = torch.empty(4, 7, 3)[:, :-2]
    made = resized(x, x.stride(), (6, 5, 3))
    assert made.stride() == torch.empty(6, 7, 3)[:, :-2].stride()
    assert resized(x, x.stride(), (4, 9, 3)).stride() == torch.empty(4, 11, 3)[:, :-2].stride()


def test_an_expanded_dimension_stays_expanded() -> None:
    x = torch.empty(1, 3).expand(4, 3)
    assert resized(x, x.stride(), (7, 5)).stride() == torch.empty(1, 5).expand(7, 5).stride()

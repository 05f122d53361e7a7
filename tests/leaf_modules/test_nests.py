"""Pytrees are taken apart into tensors and the rest, and put together again."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from fxpipe.compiler.leaf_modules.nests import Nest

LEAF = st.one_of(
    st.integers(),
    st.none(),
    st.text(max_size=3),
    st.builds(lambda n: torch.full((2,), n), st.floats(0, 9)),
)
VALUE = st.recursive(
    LEAF,
    lambda each: st.one_of(
        st.lists(each, max_size=3),
        st.tuples(each, each),
        st.dictionaries(st.sampled_from("abc"), each, max_size=3),
    ),
    max_leaves=8,
)


@given(VALUE)
def test_a_value_is_put_together_again(value: Any) -> None:
    nest = Nest.of(value)
    tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
    assert nest.tensors == len(tensors)
    again, spec = pytree.tree_flatten(nest.filled(tensors))
    leaves, expected = pytree.tree_flatten(value)
    assert spec == expected
    assert all(a is b or a == b for a, b in zip(again, leaves, strict=True))


class Config:
    """An object that may hide anything."""


def test_plain_leaves_may_differ_from_the_recorded_ones_and_objects_may_not() -> None:
    x, known = torch.ones(1), Config()
    recorded = Nest.of(([x], {"mask": x, "config": known}))
    assert Nest.of(([x], {"config": known, "causal": True})).can_be_given(recorded)
    assert not Nest.of(([x], {"config": Config()})).can_be_given(recorded)


def test_sizes_that_are_symbols_are_never_given() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    nest = Nest.of([torch.ones(1), ShapeEnv().create_unbacked_symint()])
    assert not nest.can_be_given(Nest.of([torch.ones(1), 5]))

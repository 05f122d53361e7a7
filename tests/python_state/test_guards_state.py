"""What the guards tell apart and what they take for the same state, without a pipe."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fxpipe.compiler.guard import Guard
from fxpipe.compiler.options import Options
from fxpipe.schedules.gpipe import gpipe
from fxpipe.torchtools.state import without_collection

_TREES = st.recursive(
    st.integers(0, 3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | st.builds(types.SimpleNamespace, left=inner, right=inner)
    ),
    max_leaves=12,
)

pytestmark = pytest.mark.traces


def _guards(model: nn.Module) -> Guard:
    return Guard(Options(model=model, devices=(), torch_devices=(), recipe=gpipe), {})


def _read(tree: Any) -> str:
    """All that a tree holds, read as a model would."""
    if isinstance(tree, types.SimpleNamespace):
        return f"<{_read(tree.left)} {_read(tree.right)}>"
    if isinstance(tree, dict):
        return f"{ {key: _read(value) for key, value in tree.items()} }"
    return (
        f"{type(tree)}{[_read(each) for each in tree]}" if not isinstance(tree, int) else f"{tree}"
    )


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Where something can be put in place: a container or an object, and a key of it."""
    if isinstance(tree, types.SimpleNamespace):
        tree = vars(tree)
    pairs = [*tree.items()] if isinstance(tree, dict) else [*enumerate(tree)]
    for key, value in pairs:
        if not isinstance(tree, tuple):
            yield tree, key
        if not isinstance(value, int):
            yield from _places(value)


@pytest.mark.smoke
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_changes_in_place_inside_of_an_attribute_is_another_state(data: Any) -> None:
    class Holds(nn.Module):
        def forward(self) -> str:
            return _read(self.tree)

    model = Holds()
    model.tree = [data.draw(_TREES), data.draw(_TREES)]  # type: ignore[assignment]
    guards = _guards(model)
    first = guards.present()
    with without_collection(), guards.reading():  # collection runs code of others in between
        before = model()
    guards.settle()
    assert guards.present() == first
    container, key = data.draw(st.sampled_from([*_places(model.tree)]))
    container[key] = data.draw(_TREES)
    if model() != before:
        assert guards.present() != first


def test_what_a_first_run_sets_is_no_new_state() -> None:
    class Lazy(nn.Module):
        table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.ones(4)
            return x * self.table

    model = Lazy()
    guards = _guards(model)
    first = guards.present()
    with guards.reading():
        model(torch.ones(4))
    guards.settle()
    assert guards.present() == first
    model.table = torch.zeros(4)
    assert guards.present() != first


def test_an_object_that_does_not_tell_its_length_may_be_held() -> None:
    class Stream:
        def __len__(self) -> int:
            raise TypeError("nobody knows")

        def __iter__(self) -> Iterator[int]:
            return iter(())

        def __contains__(self, value: object) -> bool:
            return False

    model = nn.Identity()
    model.scale = Stream()  # type: ignore[assignment]
    guards = _guards(model)
    with guards.reading():
        assert model.scale is not None
    assert guards.present() == guards.present()

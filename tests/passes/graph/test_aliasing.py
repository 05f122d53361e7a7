"""Operations that alias are found by what they really do."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from fxpipe.passes.graph.aliasing import fits_both_formats, is_view, may_alias, same_layout

aten = torch.ops.aten

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: aten.view.default(x, [6]),
    "t": lambda x: aten.t.default(x),
    "select": lambda x: aten.select.int(x, 0, 1),
    "expand": lambda x: aten.expand.default(x, [2, 3]),
    "detach": lambda x: aten.detach.default(x),
    "alias": lambda x: aten.alias.default(x),
    "unsafe_view": lambda x: aten._unsafe_view.default(x, [6]),
    "reshape_alias": lambda x: aten._reshape_alias.default(x, [6], [1]),
    "add": lambda x: aten.add.Tensor(x, 1),
    "clone": lambda x: aten.clone.default(x),
    "relu": lambda x: aten.relu.default(x),
    "mm": lambda x: aten.mm.default(x, x.t()),
}


def graph_of(call: Callable[[Tensor], Tensor]) -> fx.Node:
    graph = fx.Graph()
    with_proxy = fx.Proxy(graph.placeholder("x"))
    made = call(with_proxy)  # type: ignore[arg-type]
    node: fx.Node = made.node  # type: ignore[attr-defined]
    return node


@pytest.mark.parametrize("name", CALLS)
def test_an_operation_whose_result_shares_memory_is_known_to(name: str) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    made = CALLS[name](x)
    shares = made.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    node = graph_of(CALLS[name])
    assert isinstance(node.target, torch._ops.OpOverload)
    assert may_alias(node.target) == shares
    if not name.startswith(("unsafe", "reshape_alias")):  # their schemas say nothing
        assert is_view(node) == shares


def test_what_writes_in_place_aliases_and_is_no_view() -> None:
    node = graph_of(lambda x: aten.add_.Tensor(x, 1))
    assert may_alias(aten.add_.Tensor) and not is_view(node)


def test_an_item_is_a_view_and_another_function_is_not() -> None:
    assert is_view(graph_of(lambda x: operator.getitem(x, 0)))
    assert not is_view(graph_of(lambda x: operator.add(x, 0)))


def node_of(value: object) -> fx.Node:
    node = fx.Graph().placeholder("x")
    node.meta["val"] = value
    return node


def test_layouts_are_the_same_in_all_or_not() -> None:
    x = torch.empty(2, 3)
    same = [torch.empty(2, 3), torch.empty(6)[:6].view(2, 3)]
    other = [x.double(), torch.empty(3, 2), torch.empty(3, 2).t(), x.to("meta"), 5, None]
    assert all(same_layout(node_of(x), node_of(y)) for y in same)
    assert not any(same_layout(node_of(x), node_of(y)) for y in other)


@pytest.mark.parametrize(
    ("shape", "both"),
    [((2, 1, 3, 3), True), ((2, 4, 1, 1), True), ((2, 4, 3, 3), False), ((2, 4, 1), False)],
)
def test_only_dimensions_of_size_1_leave_the_format_open(
    shape: tuple[int, ...], both: bool
) -> None:
    x = torch.empty(shape)
    formats = {4: torch.channels_last}
    if x.dim() in formats:
        assert both == (x.is_contiguous() and x.is_contiguous(memory_format=formats[x.dim()]))
    assert fits_both_formats(node_of(x)) == both
    assert not fits_both_formats(node_of(None))

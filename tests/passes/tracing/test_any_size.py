"""Graphs for any sizes hold exactly for those for which the model computes the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import Traced
from fxpipe.kernels.graph import GraphKernel
from fxpipe.passes.differentiate.part_backward import part_backward
from fxpipe.passes.tracing.any_size import AnySize
from fxpipe.passes.tracing.symbols import SizeError, Symbols
from fxpipe.text.plan import print_graph
from tests.helpers.fronted import (
    differentiated,
    front_end,
    in_stages,
    rows_of,
    run_graph,
    shapes_for,
)
from tests.passes.differentiate.test_differentiate import made, some_cases
from tests.passes.tracing.test_capture import Computes

WITH_NUMBERS = {"lstm", "gru", "spectra", "strided", "views"}
"""Cases with operations that some version of PyTorch does not derive for symbols, whose backward it
then computes in another order, or of whose memory it then knows less."""


class Graphs:
    """The graphs of a model for any sizes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._graph: AnySize | None = None

    def of(self, *args: Any) -> Traced | None:
        """The graph for inputs of these sizes, of one for any number of rows; None if there is
        none."""

        def capture(leaves: Sequence[Any]) -> Traced:
            pairs = zip(leaves, args, strict=True)
            given = [
                x.requires_grad_(y.requires_grad) if isinstance(y, Tensor) else x for x, y in pairs
            ]
            return front_end(self.model, *given)

        if self._graph is not None and (made := self._graph.at(args)) is not None:
            return made
        rows = next(len(x) for x in args if isinstance(x, Tensor))
        self._graph, made = AnySize.of(rows_of(rows, *args), args, capture)
        return made


def planned(model: nn.Module, traced: Traced, *args: Any) -> Plan:
    """Cut in up to three stages, with backwards in halves."""
    return part_backward(differentiated(model, traced, in_stages(traced, 3), *args, inputs=True))


def everything(plan: Plan) -> list[Any]:
    """All that runs a plan, with the shape and strides of each value."""
    found: list[Any] = [plan.edges, sorted(plan.specs.items())]
    for stage in plan.stages:
        kernel = stage.kernel
        assert isinstance(kernel, GraphKernel)
        found += [kernel.input_strides, kernel.gradient_strides]
        modules = (
            kernel.forward_graph,
            kernel.backward_graph,
            kernel.input_grad_graph,
            kernel.weight_grad_graph,
        )
        graphs = [module and module.graph for module in modules]
        for graph in (*graphs, kernel.functional_backward, kernel.functional_weight_grad):
            found.append(graph and described(graph))
    return found


def described(graph: torch.fx.Graph) -> list[Any]:
    values = [
        [(tuple(x.shape), x.stride(), x.storage_offset(), x.dtype) for x in tensors_of(node)]
        for node in graph.nodes
    ]
    return [print_graph(graph), values]


def tensors_of(node: torch.fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return [x for x in values if isinstance(x, Tensor)]


def taller(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments with two rows more, where they have three."""
    return tuple(
        torch.cat([x, x[:2]]).detach().requires_grad_(x.requires_grad)
        if isinstance(x, Tensor) and x.shape[:1] == (3,)
        else x
        for x in args
    )


@some_cases
def test_a_plan_with_sizes_put_in_is_that_of_these_sizes(name: str) -> None:
    model, args, _ = made(name)
    graphs = Graphs(model)
    if name in WITH_NUMBERS or graphs.of(*args) is None:
        pytest.skip("such a plan is made for numbers")
    for given in (args, taller(args)):
        traced = graphs.of(*given)
        assert traced is not None
        own = planned(model, front_end(model, *given), *given)
        assert everything(planned(model, traced, *given)) == everything(own)


def accepted(model: nn.Module, batch: int, *rest: Any) -> set[int]:
    """Which sizes from 1 to 16 a graph captured with one size holds for."""
    args = (torch.randn(batch, 4), *rest)
    traced = Graphs(model).of(*args)
    if traced is None:
        return {batch}
    assert traced.of is not None
    holds = traced.of.accepts
    return {size for size in range(1, 17) if holds(shapes_for(size, batch, *args))}


def test_one_graph_holds_for_all_sizes_but_one() -> None:
    assert accepted(Computes(torch.relu), 3) == set(range(2, 17))


def _multiple_of_four(y: Tensor) -> Tensor:
    return y * 2 if y.shape[0] % 4 == 0 else y * 3


def _more_than_five(y: Tensor) -> Tensor:
    return y * 2 if y.shape[0] > 5 else y * 3


def _between(y: Tensor) -> Tensor:
    return y * 2 if 4 <= y.shape[0] < 9 else y * 3


def _in_eights(y: Tensor) -> Tensor:
    return y.reshape(8, -1)


def _in_fives(y: Tensor) -> Tensor:
    return y.flatten().reshape(-1, 5)


@pytest.mark.parametrize(
    ("function", "batch", "sizes"),
    [
        (_multiple_of_four, 8, {4, 8, 12, 16}),
        (_multiple_of_four, 6, set(range(2, 17)) - {4, 8, 12, 16}),
        (_more_than_five, 8, set(range(6, 17))),
        (_more_than_five, 3, {2, 3, 4, 5}),
        (_between, 8, {4, 5, 6, 7, 8}),
        (_in_fives, 10, {5, 10, 15}),
    ],
)
def test_a_branch_on_the_size_bounds_the_sizes(
    function: Callable[[Tensor], Tensor], batch: int, sizes: set[int]
) -> None:
    assert accepted(Computes(function), batch) == sizes


@pytest.mark.parametrize("function", [_multiple_of_four, _more_than_five, _between, _in_eights])
@pytest.mark.parametrize("batch", [2, 4, 6, 8, 10])
def test_whatever_size_is_accepted_computes_the_model(
    function: Callable[[Tensor], Tensor], batch: int
) -> None:
    model = Computes(function)
    graphs = Graphs(model)
    first = graphs.of(torch.randn(batch, 4))
    for size in range(1, 17):
        if first is not None and first.of is not None and first.of.accepts([(size, 4)]):
            x = torch.randn(size, 4)
            traced = graphs.of(x)
            assert traced is not None
            assert torch.equal(run_graph(model, traced, x)[0], model(x))


class Doubled(nn.Module):
    """Adds its inputs, of which one has twice as many columns as the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z: Tensor = self.layer(x.repeat(2, 1) + y)
        return z


def test_a_graph_is_refused_for_sizes_that_its_operations_do_not_take() -> None:
    args = torch.randn(3, 4), torch.randn(6, 4)
    model = Doubled()
    made, _ = AnySize.of([(0,), (0,)], args, lambda leaves: front_end(model, *leaves))
    assert made.traced is not None
    assert made.traced.accepts([(5, 4), (10, 4)])
    assert not made.traced.accepts([(5, 4), (9, 4)])


def test_symbols_stand_for_inputs_of_one_layout() -> None:
    symbols = Symbols([(0,), (0,)], [torch.randn(3, 4), torch.randn(6, 4)])
    with pytest.raises(SizeError, match="another layout"):
        symbols.numbers([torch.randn(4, 5).T, torch.randn(10, 4)])


@pytest.mark.parametrize("rows", [2, 3, 4, 6, 9])
def test_what_was_decided_for_a_size_is_refused_where_it_would_be_decided_otherwise(
    rows: int,
) -> None:
    symbols = Symbols([(0,)], [torch.randn(5, 4)])
    assert symbols.leaves[0].shape[0] > 3  # decided for five rows, and noted
    given = [torch.randn(rows, 4)]
    if rows > 3:
        assert [*symbols.numbers(given).values()] == [rows]
    else:
        with pytest.raises(SizeError, match="is not true"):
            symbols.numbers(given)

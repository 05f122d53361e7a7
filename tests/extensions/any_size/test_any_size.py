"""A plan with symbols for sizes, against one that is differentiated for the sizes themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe.extensions.any_size.any_size import (
    SizeError,
    Symbols,
    free_dims,
    put_sizes,
    symbols_as_operands,
)
from fxpipe.extensions.simulator.liveness import liveness
from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import Traced, Value
from fxpipe.kernels.graph import GraphKernel
from fxpipe.passes.differentiate.differentiate import Wanted, differentiate
from fxpipe.passes.differentiate.part_backward import part_backward
from fxpipe.passes.graph.fit import localise_sizes
from fxpipe.passes.graph.functionalise import functionalise
from fxpipe.passes.partition.assignment import first_readers
from fxpipe.passes.partition.cut import cut
from fxpipe.passes.tracing.trace import accepts, trace
from fxpipe.text.plan import print_graph
from tests.helpers.fronted import in_stages, values_of
from tests.passes.differentiate.test_differentiate import made, some_cases

WITH_NUMBERS = {"lstm", "gru", "spectra", "strided"}
"""Cases with operations that some version of PyTorch does not derive for symbols, or whose backward
it then computes in another order."""


def planned(model: nn.Module, traced: Traced, *args: Any) -> Plan:
    """Cut in up to three stages, differentiated, and backwards split in halves."""
    fitted, assignment = localise_sizes(traced, in_stages(traced, 3))
    plan = cut(fitted, assignment, first_readers(fitted, assignment))
    outputs = frozenset(out.name for out in traced.outputs if isinstance(out, Value))
    values, state = values_of(traced, *args), traced.state_of(model)
    return part_backward(differentiate(plan, values, state, Wanted(outputs, True)))


def everything(plan: Plan) -> list[Any]:
    """All that runs a plan, with the shape, strides and memory of each value."""
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
    lives = liveness(graph)
    values = [
        [(tuple(x.shape), x.stride(), x.storage_offset(), x.dtype) for x in tensors_of(node)]
        for node in graph.nodes
    ]
    return [print_graph(graph), values, sorted(lives.spans.values()), [*lives.of.values()]]


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
    model, args, traced = made(name)
    if name in WITH_NUMBERS or not any(free_dims(traced)):
        pytest.skip("such a plan is made for numbers")
    symbols = Symbols(free_dims(traced), args)
    pairs = zip(symbols.leaves, args, strict=True)
    leaves = [x.requires_grad_(y.requires_grad) if isinstance(y, Tensor) else x for x, y in pairs]
    with symbols_as_operands():
        plan = planned(model, traced, *leaves)
    for given in (args, taller(args)):
        put = put_sizes(plan, symbols, given).verify()
        assert everything(put) == everything(planned(model, traced, *given))


class Doubled(nn.Module):
    """Adds its inputs, of which one has twice as many columns as the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z: Tensor = self.layer(x.repeat(2, 1) + y)
        return z


def test_a_plan_is_refused_for_sizes_that_its_operations_do_not_take() -> None:
    model = Doubled()
    shapes = [(3, 4), (6, 4)]
    args = [torch.randn(shape) for shape in shapes]
    program = trace(model, tuple(args), {}, [(0,), (0,)])
    traced = functionalise(program, accepts(program, tuple(args), {}))
    symbols = Symbols(free_dims(traced), args)
    with symbols_as_operands():
        plan = planned(model, traced, *symbols.leaves)
    put = put_sizes(plan, symbols, [torch.randn(5, 4), torch.randn(10, 4)])
    assert put.stages[0].kernel is not None
    with pytest.raises(SizeError):
        put_sizes(plan, symbols, [torch.randn(5, 4), torch.randn(9, 4)])
    with pytest.raises(SizeError, match="another layout"):
        put_sizes(plan, symbols, [torch.randn(4, 5).T, torch.randn(10, 4)])


@pytest.mark.parametrize("rows", [2, 3, 4, 6, 9])
def test_a_plan_is_refused_for_sizes_for_which_an_operation_would_decide_otherwise(
    rows: int,
) -> None:
    args = (torch.randn(5, 4),)
    program = trace(nn.Linear(4, 4), args, {}, [(0,)])
    traced = functionalise(program, accepts(program, args, {}))
    symbols = Symbols(free_dims(traced), args)
    assert symbols.leaves[0].shape[0] > 3  # decided for five rows, and noted
    given = [torch.randn(rows, 4)]
    if rows > 3:
        assert [*symbols.numbers(given).values()] == [rows]
    else:
        with pytest.raises(SizeError, match="is not true"):
            symbols.numbers(given)

"""Writing over operands changes no result, and nothing that somebody else may still read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fxpipe.passes.differentiate.extract import reuse

aten = torch.ops.aten


def graph_of(function: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    with FakeTensorMode() as mode:
        return make_fx(function)(*(mode.from_tensor(x) for x in args))


def compared(module: fx.GraphModule, *args: Tensor) -> int:
    """Run before and after; the number of operations that write over an operand now."""
    untouched = copy.deepcopy(module)
    changed = reuse(module.graph)
    module.recompile()
    kept = [x.clone() for x in args]
    expected = pytree.tree_leaves(untouched(*(x.clone() for x in args)))
    found = pytree.tree_leaves(module(*args))
    assert len(found) == len(expected)
    for here, there in zip(found, expected, strict=True):
        assert (here.shape, here.dtype) == (there.shape, there.dtype)
        assert torch.equal(here.nan_to_num(7.0), there.nan_to_num(7.0))
    for here, there in zip(args, kept, strict=True):
        assert torch.equal(here, there)  # an argument was written
    writing = [
        node
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    ]
    assert len(writing) == changed
    return changed


def check(function: Callable[..., Any], *args: Tensor) -> int:
    return compared(graph_of(function, *args), *args)


def square() -> Tensor:
    return torch.randn(4, 4, dtype=torch.float64)


def test_a_chain_is_computed_in_one_piece_of_memory() -> None:
    assert check(lambda x: ((x + 1).sigmoid() * 2).tanh(), square()) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_number_is_not_rounded_to_half_precision_before_it_scales(dtype: torch.dtype) -> None:
    def function(x: Tensor) -> Tensor:
        y: Tensor = aten.mul.Scalar(x.sigmoid(), 0.9)
        return y

    assert check(function, square().to(dtype)) == 1


def test_the_second_operand_is_written_over_where_the_first_is_needed() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x + 1, x * 3
        return a / b, a

    assert check(function, square()) == 1


def test_what_the_gradient_of_an_activation_reads_is_written_over() -> None:
    def function(g: Tensor, x: Tensor) -> Tensor:
        y: Tensor = aten.threshold_backward(g * 2, x, 0.0)
        return y

    assert check(function, square(), square()) == 1


def test_arguments_are_never_written_over() -> None:
    assert check(lambda x, y: x + y, square(), square()) == 0
    assert check(lambda x: (x.t() + 1, x.view(-1) * 2), square()) <= 0


def test_returned_values_are_never_written_over() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = x + 1
        return a, a.relu(), a.t()

    assert check(function, square()) == 0


def test_values_read_later_are_never_written_over() -> None:
    def function(x: Tensor) -> Tensor:
        a = x + 1
        b = a.relu()
        return b + a.sin().sum()

    check(function, square())

    def through_a_view(x: Tensor) -> Tensor:
        a = x.exp()
        row = a[1]
        b = a.neg()
        return b * row

    check(through_a_view, square())


def test_a_view_is_never_written_over() -> None:
    def function(x: Tensor) -> Tensor:
        a = x.exp()
        return a.view(-1).neg().sum() + a.t().sigmoid().sum() + a.sum()

    check(function, square())


def _negated(split: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def function(x: Tensor) -> Any:
        a = x.exp()
        return [part.neg() for part in split(a)], a.sum()

    return function


def test_parts_of_a_result_are_never_written_over() -> None:
    for split in (
        lambda a: a.chunk(2, 1),
        lambda a: a.split([1, 3], 0),
        lambda a: a.unbind(0),
        lambda a: aten.unsafe_split(a, 2, 0),
        lambda a: aten.unsafe_split_with_sizes(a, [1, 3], 0),
    ):
        check(_negated(split), square())

    def reshaped(x: Tensor) -> Any:
        a = x.exp()
        return aten._unsafe_view(a, [16]).neg().sum() + a.sum()

    check(reshaped, square())


def test_an_operand_that_another_one_is_a_view_of_is_never_written_over() -> None:
    def transposed(x: Tensor) -> Tensor:
        a = x.exp()
        return a + a.t()

    assert check(transposed, square()) == 0

    def row(x: Tensor) -> Tensor:
        a = x.exp()
        return a * a[0]

    assert check(row, square()) == 0

    def both(x: Tensor) -> Tensor:
        a = x.exp()
        return torch.addcmul(a, a.t(), a[1])

    assert check(both, square()) == 0


def test_an_operation_on_one_value_twice_may_write_over_it() -> None:
    def function(x: Tensor) -> Tensor:
        a = x.exp()
        return a * a

    assert check(function, square()) == 1


def test_an_expanded_tensor_is_never_written_over() -> None:
    def function(x: Tensor) -> Tensor:
        a = x.sum(0)
        return a.expand(4, 4).sin() + a.exp()

    check(function, square())


def test_a_result_of_another_type_or_shape_needs_its_own_memory() -> None:
    assert check(lambda x: (x + 1) > 0, square()) == 0
    assert check(lambda x: (x + 1).sum(0) + x, square()) == 0


Step = tuple[str, int, int, int]

UNARY: dict[str, Callable[[Tensor, int], Tensor]] = {
    "relu": lambda a, k: a.relu(),
    "tanh": lambda a, k: a.tanh(),
    "neg": lambda a, k: a.neg(),
    "scale": lambda a, k: a * (k + 0.5),
    "clamp": lambda a, k: a.clamp(-1, k),
    "gelu": lambda a, k: torch.nn.functional.gelu(a),
    "silu": lambda a, k: torch.nn.functional.silu(a),
    "leaky": lambda a, k: torch.nn.functional.leaky_relu(a, 0.1),
    "pow": lambda a, k: a.pow(2 + k % 2),
    "t": lambda a, k: a.t(),
    "view": lambda a, k: a.reshape(2, 8).reshape(4, 4),
    "row": lambda a, k: a[k % 4].expand(4, 4),
    "slice": lambda a, k: torch.cat([a[:2], a[2:]]),
    "shift": lambda a, k: a[:, [1, 2, 3, 0]],
    "sum": lambda a, k: a.sum(0, keepdim=True).expand(4, 4),
    "half": lambda a, k: a.chunk(2, k % 2)[0].repeat(*((1, 2) if k % 2 else (2, 1))),
    "square": lambda a, k: a * a,
    "fill": lambda a, k: a.masked_fill(a > 0, float(k)),
    "unsafe": lambda a, k: aten._unsafe_view(aten.unsafe_split(a, 2, 0)[0], [2, 4]).repeat(2, 1),
    "contiguous": lambda a, k: a.t().contiguous(),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "sub": torch.sub,
    "div": lambda a, b: a / (b.abs() + 1),
    "maximum": torch.maximum,
    "where": lambda a, b: torch.where(a > b, a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "addcmul": lambda a, b: torch.addcmul(a, b, a),
    "threshold": lambda a, b: aten.threshold_backward(a, b, 0.1),
    "tanh backward": lambda a, b: aten.tanh_backward(a, b),
    "gelu backward": lambda a, b: aten.gelu_backward(a, b),
    "silu backward": lambda a, b: aten.silu_backward(a, b),
    "mm": torch.mm,
    "plus transposed": lambda a, b: a + b.t(),
}


@dataclass(frozen=True)
class Recipe:
    """Operations on earlier values by their numbers; 0 and 1 are arguments."""

    steps: tuple[Step, ...]
    returned: tuple[int, ...]

    def __call__(self, x: Tensor, y: Tensor) -> list[Tensor]:
        values = [x, y]
        for name, a, b, k in self.steps:
            one, two = values[a % len(values)], values[b % len(values)]
            values.append(UNARY[name](one, k) if name in UNARY else BINARY[name](one, two))
        return [values[index % len(values)] for index in self.returned] + [values[-1]]


numbers = st.integers(0, 40)
steps = st.tuples(st.sampled_from([*UNARY, *BINARY]), numbers, numbers, st.integers(0, 5))
recent = st.tuples(
    st.sampled_from([*UNARY, *BINARY]), st.just(-1), numbers, st.integers(0, 5)
)  # reads the last value
recipes = st.builds(
    Recipe,
    st.lists(st.one_of(steps, recent), min_size=1, max_size=12).map(tuple),
    st.lists(numbers, max_size=2).map(tuple),
)


@given(recipes)
def test_random_graphs_compute_the_same_bits(recipe: Recipe) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 4, 4, generator=generator, dtype=torch.float64)
    check(recipe, x.clone(), y.clone())

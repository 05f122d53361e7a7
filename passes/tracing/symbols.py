"""Symbols for the sizes of micro-batches, and numbers in their place.

What PyTorch decided while it ran, such as that a size is not 1, it noted as guards: a graph holds
for the sizes for which these are true.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from fxpipe.passes.graph.copies import node_copied
from fxpipe.passes.tracing.shapes import Dims


class SizeError(Exception):
    """A plan does not hold for these sizes, or has what no symbol stands for."""


class Symbols:
    """The inputs of a micro-batch, with symbols for the sizes that its graph leaves free.

    Attributes:
        free: for each flat input and target the dimensions of any size.
        leaves: the flat inputs and targets; those with symbols are tensors without data.
    """

    def __init__(self, dims: Dims, leaves: Sequence[Any]) -> None:
        """Args:
        dims: for each flat input and target the dimensions of any size.
        leaves: the flat inputs and targets of one micro-batch.
        """
        from torch.fx.experimental.symbolic_shapes import ShapeEnv  # slow to import

        self._env = ShapeEnv(
            duck_shape=False, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False
        )
        self._mode = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        self._expressions: list[tuple[int, list[Any]]] = []
        self.free = dims
        self.leaves = list(leaves)
        for index, free in enumerate(dims):
            if free:
                named = self.leaves[index] = self._named(f"input_{index}", leaves[index], free)
                self._expressions.append((index, [*map(_expression, _described(named))]))

    def _named(self, name: str, leaf: Tensor, free: Sequence[int]) -> FakeTensor:
        from torch._dynamo.source import ConstantSource  # slow to import, as is the other one
        from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

        dims = [DimDynamic.DYNAMIC if d in free else DimDynamic.STATIC for d in range(leaf.dim())]
        return self._mode.from_tensor(
            torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device),
            source=ConstantSource(name),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims),
        )

    def numbers(self, leaves: Sequence[Any]) -> dict[Any, int]:
        """Symbol → its number for the flat inputs and targets of a micro-batch.

        Raises:
            SizeError: what was made with these symbols does not hold for such a micro-batch.
        """
        numbers: dict[Any, int] = {}
        equal: list[tuple[Any, int]] = []
        for index, expressions in self._expressions:
            for expression, size in zip(expressions, _described(leaves[index]), strict=True):
                if getattr(expression, "is_symbol", False):
                    numbers.setdefault(expression, size)
                equal.append((expression, size))
        if any(_number(expression, numbers) != size for expression, size in equal):
            raise SizeError("the inputs have another layout")
        for guard in self._env.guards:
            if not _number(guard.expr, numbers):
                raise SizeError(f"{guard.expr} is not true")
        for symbol, expression in self._env.replacements.items():
            if symbol in numbers and _number(expression, numbers) != numbers[symbol]:
                raise SizeError(f"{symbol} is not {expression}")
        return numbers


class Put:
    """Puts numbers in the place of symbols."""

    def __init__(self, numbers: dict[Any, int]) -> None:
        self._numbers = numbers
        self._sizes: dict[Any, int] = {}  # expression → its number
        self._tensors: dict[int, tuple[FakeTensor, FakeTensor]] = {}
        self._memory: dict[int, torch.UntypedStorage] = {}

    def __call__(self, value: Any) -> Any:
        """The same value with numbers; a tuple stays a tuple, and a list a list."""
        kind = type(value)
        if kind is torch.SymInt:
            return self._size(value)
        if kind is FakeTensor:
            return self._tensor(value)
        if kind is tuple:
            return tuple(map(self, value))
        if isinstance(value, list):
            return [*map(self, value)]
        if kind in (torch.SymFloat, torch.SymBool):
            raise SizeError("a fraction of sizes")  # sympy may round it in another order
        return value

    def graph(self, graph: fx.Graph) -> fx.Graph:
        made = fx.Graph()
        made.set_codegen(graph._codegen)
        copies: dict[fx.Node, Any] = {}  # a size has a number

        def put(value: Any) -> Any:
            return copies[value] if isinstance(value, fx.Node) else self(value)

        for node in graph.nodes:
            if type(node.meta.get("val")) is torch.SymInt:
                copies[node] = self._size(node.meta["val"])
                continue
            copies[node] = node_copied(made, node, put, fx.node.map_aggregate)
            if "val" in node.meta:
                copies[node].meta["val"] = self(node.meta["val"])
        return made

    def _size(self, size: torch.SymInt) -> int:
        expression = _expression(size)
        if expression not in self._sizes:
            self._sizes[expression] = int(_number(expression, self._numbers))
        return self._sizes[expression]

    def _tensor(self, tensor: FakeTensor) -> FakeTensor:
        """A tensor of these sizes; tensors that share memory do so again."""
        storage = tensor.untyped_storage()
        known = not isinstance(storage.nbytes(), torch.SymInt)
        if known and not tensor._has_symbolic_sizes_strides:
            return tensor
        if id(tensor) not in self._tensors:
            shape, strides = self(tuple(tensor.shape)), self(tensor.stride())
            offset, size = self(tensor.storage_offset()), self(storage.nbytes())
            with no_dispatch():
                memory = storage if known else self._memory.get(storage._cdata)
                if memory is None:
                    memory = torch.UntypedStorage(size, device="meta")
                    self._memory[storage._cdata] = memory
                meta = torch.empty(0, dtype=tensor.dtype, device="meta")
                meta.set_(memory, offset, shape, strides)
                made = FakeTensor(tensor.fake_mode, meta, tensor.fake_device)
            self._tensors[id(tensor)] = tensor, made
        return self._tensors[id(tensor)][1]


def _described(leaf: Tensor) -> list[Any]:
    """The sizes and strides of a tensor."""
    return [*leaf.shape, *leaf.stride()]


def _expression(size: Any) -> Any:
    """A size as an expression of symbols, or a number."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _number(expression: Any, numbers: dict[Any, int]) -> Any:
    """An expression with numbers for its symbols."""
    return expression if isinstance(expression, int) else expression.xreplace(numbers)

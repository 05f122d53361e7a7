"""Differentiate a plan once for all sizes of micro-batches, and put in the sizes of each.

before:  view(h, [s0, 8])   with the symbol s0 for the length
after:   view(h, [12, 8])   for a micro-batch of length 12

Autograd on symbols takes longer than on numbers, but only once. What PyTorch decided while it ran,
such as that s0 is not 1, it noted as guards: the plan holds for the sizes for which these are true.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from fxpipe.compiler.front_end import Call
from fxpipe.errors import told
from fxpipe.ir.plan import Plan, Stage
from fxpipe.ir.traced import Traced
from fxpipe.kernels.graph import GraphKernel
from fxpipe.log import LOGGER
from fxpipe.passes.differentiate.extract import created
from fxpipe.passes.graph.lazy_module import lazy_module
from fxpipe.passes.tracing.trace import Dims, is_free, shapes_of


class SizeError(Exception):
    """A plan does not hold for these sizes, or has what no symbol stands for."""


def free_dims(traced: Traced) -> Dims:
    """For each flat input of a graph the dimensions of any size."""
    values = {n.name: n.meta.get("val") for n in traced.graph.find_nodes(op="placeholder")}
    shapes = shapes_of([values.get(name or "") for name in traced.inputs])
    return [tuple(d for d, size in enumerate(each or ()) if is_free(size)) for each in shapes]


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


FEW = 2
"""So many sizes of a graph that leaves no size free but the batch's have plans of their own. A plan
for any size takes as long to make as four."""


def sized(
    made: dict[Any, tuple[Symbols, Plan] | int | None],
    key: Any,
    traced: Traced,
    call: Call,
    differentiated: Callable[[Call], Plan],
) -> Plan | None:
    """The plan for the sizes of a call, from a plan for any; None if there is none.

    There is one for graphs that leave more than the size of the batch free, such as a length, and
    for others from the third size on.

    Args:
        made: kind of call → its plan for any size, with the symbols for sizes; None if there can
            be none; the number of sizes so far if there is none yet. Gets more.
        key: the kind of this call.
        traced: its graph.
        call: the call.
        differentiated: makes the plan of a call.
    """
    free = free_dims(traced)
    if not any(free):
        return None
    known = made.get(key, 0)
    alone = all(set(dims) <= {dim} for dims, dim in zip(free, call.batch.dims, strict=False))
    if alone and isinstance(known, int) and known < FEW:
        made[key] = known + 1
        return None
    try:
        if isinstance(known, int):
            made[key] = None
            symbols = Symbols(free, call.leaves)
            with symbols_as_operands():
                plan = differentiated(replace(call, leaves=symbols.leaves))
            known = made[key] = symbols, plan
        return known and put_sizes(known[1], known[0], call.leaves).verify()
    except Exception as error:  # symbols cannot do all that numbers can
        LOGGER.info("a plan is made for these sizes only: %s", told(error))
        return None


@contextmanager
def symbols_as_operands() -> Iterator[None]:
    """Inside, PyTorch does not warn of graphs whose operations have symbols as operands."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Raw SymInt value")
        yield


def put_sizes(plan: Plan, symbols: Symbols, leaves: Sequence[Any]) -> Plan:
    """Plan → Plan: the same plan for the sizes of a micro-batch, with a number for each symbol.

    Args:
        plan: a plan that was differentiated with the symbols.
        symbols: these symbols.
        leaves: the flat inputs and targets of the micro-batch.

    Raises:
        SizeError: as ``Symbols.numbers``, or the plan has a symbol for a fraction.
    """
    put = Put(symbols.numbers(leaves))
    stages = tuple(replace(stage, kernel=_sized(stage, put)) for stage in plan.stages)
    specs = {
        name: replace(
            spec,
            shape=put(spec.shape),
            strides=put(spec.strides),
        )
        for name, spec in plan.specs.items()
    }
    return replace(plan, stages=stages, specs=specs)


def _sized(stage: Stage, put: Put) -> GraphKernel:
    kernel = stage.kernel
    if not isinstance(kernel, GraphKernel):
        raise SizeError("a stage has no graphs")
    deferred, functional = kernel.functional_weight_grad, kernel.functional_backward
    return replace(
        kernel.mapped(put.module),
        functional_backward=functional and put.graph(functional),
        functional_weight_grad=deferred and put.graph(deferred),
        input_strides=put(kernel.input_strides),
        gradient_strides=put(kernel.gradient_strides),
    )


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

    def module(self, module: fx.GraphModule) -> fx.GraphModule:
        return lazy_module(module, self.graph(module.graph), type(module).__name__)

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
            args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), put)
            copies[node] = created(made, node.op, node.target, args, kwargs, node.name)
            copies[node].meta.update(node.meta)
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

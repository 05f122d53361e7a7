"""Record the operations that a function dispatches, as a graph.

before:  def f(x, w): return torch.relu(x @ w)        and fake tensors for x and w
after:   mm = aten.mm.default(x, w);  relu = aten.relu.default(mm);  return (relu,)

It does what ``make_fx`` does, but faster: without proxies, symbols and constants. A function that
needs these is refused, and left to ``make_fx``. With ``make_fx`` alone, compiling and the first
step take 1.3 to 2 times the processor time for GPT-2 with twelve blocks and for AmoebaNet-D.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode, autograd_would_have_decomposed

from fxpipe.extensions.fast_trace.variants import functional_variant, keeps_type
from fxpipe.passes.differentiate.extract import created
from fxpipe.passes.differentiate.joint import NotRecorded
from fxpipe.passes.graph.aliasing import may_alias

_DEVICE = torch.ops.prim.device.default


class GraphRecorder(TorchDispatchMode):
    """Records every operation below autograd; use it inside the mode of the fake tensors.

    Attributes:
        graph: the operations recorded so far.
        meta: the metadata that new nodes get.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.meta: Mapping[str, Any] = {}
        self._last: fx.Node | None = None
        self._same: dict[int, list[Tensor]] = {}  # tensor → itself and all that detach made of it
        self._shared: set[int] = set()  # tensors that may share their memory with others
        # with the tensors themselves, so that no new tensor gets the identity of one
        self._nodes: dict[int, tuple[Tensor, fx.Node]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper would take longer than the dispatch of most calls

    def place(self, arguments: Sequence[Any]) -> list[Any]:
        """Add arguments, and return them; a tensor that occurs again is replaced by an alias."""
        placed: list[Any] = []
        for argument in arguments:
            if isinstance(argument, Tensor) and id(argument) in self._nodes:
                argument = argument.detach().requires_grad_(argument.requires_grad)
            with self.graph.inserting_after(self._last):
                node = self._last = self.graph.placeholder(f"argument_{len(self._nodes)}")
            node.meta["val"] = argument
            if isinstance(argument, Tensor):
                self._nodes[id(argument)] = argument, node
            placed.append(argument)
        return placed

    def finish(self, returned: Sequence[Any]) -> fx.Graph:
        """Let the graph return these values, and return the graph."""
        self.graph.output(tuple(self.node_of(value) for value in returned))
        return self.graph

    def node_of(self, value: Any) -> Any:
        """The node of a tensor; any other value itself."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._nodes:
            raise NotRecorded("a tensor is read that is no argument and was not made here")
        return self._nodes[id(value)][1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # a short cut: each operation asks several times
        if func.namespace == "prim":  # reads an attribute of a tensor
            return func(*args, **kwargs)
        if not isinstance(func, OpOverload):
            raise NotRecorded(f"{func} is no operation")
        if func._schema.is_mutable:
            return self._in_place(func, args, kwargs)
        if autograd_would_have_decomposed(func, _tensors((args, kwargs))):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        several = isinstance(result, list | tuple)
        if not any(isinstance(leaf, Tensor) for leaf in (result if several else (result,))):
            return result
        node = self._node(func, args, kwargs, result)
        if func is torch.ops.aten.detach.default:
            same = self._same.setdefault(id(args[0]), [args[0]])
            same.append(result)
            self._same[id(result)] = same
        elif may_alias(func):
            self._shared.update(map(id, _tensors((args, kwargs, result))))
        if not several:
            self._nodes[id(result)] = result, node
            return result
        for index, leaf in enumerate(result):
            if isinstance(leaf, Tensor):
                part = self.graph.call_function(operator.getitem, (node, index))
                part.meta.update({**self.meta, "val": leaf})
                self._nodes[id(leaf)] = leaf, part
        return result

    def _in_place(self, func: OpOverload, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Record the functional variant; its node then stands for the written tensor."""
        variant = functional_variant(func)
        target = args[0] if args else None
        if variant is None or not isinstance(target, Tensor):
            raise NotRecorded(f"{func} has no functional variant")
        before = self.node_of(target)
        same = self._same.get(id(target), [target])
        if any(id(x) in self._shared or self.node_of(x).op == "placeholder" for x in same):
            raise NotRecorded(f"{func} writes what others may see")
        result = func(*args, **kwargs)
        node = self._node(variant, args, kwargs, target)
        if result is not target or not keeps_type(node, before):
            raise NotRecorded(f"{func} gives another tensor than it writes")
        self._nodes.update((id(x), (x, node)) for x in same)
        return result

    def _node(self, func: OpOverload, args: Any, kwargs: Any, value: Any) -> fx.Node:
        read, named = map_aggregate((args, kwargs), self.node_of)
        name = func.overloadpacket.__name__
        node = created(self.graph, "call_function", func, read, named, name)
        node.meta.update(self.meta)
        node.meta["val"] = value
        return node


def _tensors(values: Any) -> list[Tensor]:
    """The tensors among an operation's operands and results."""
    tensors: list[Tensor] = []

    def note(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
        return value

    map_aggregate(values, note)
    return tensors

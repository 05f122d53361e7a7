"""Collectives as nodes of graphs: named by the dimension of the mesh, bound to groups when run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, fx

from fxpipe.errors import TraceError
from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import Traced
from fxpipe.kernels.graph import GraphKernel
from fxpipe.kernels.kernel import Kernel, Wrapping
from fxpipe.passes.graph.lazy_module import copied
from fxpipe.runtime.group import Group
from fxpipe.runtime.interpreter import Stopped

T = TypeVar("T")

_c10d = torch.ops._c10d_functional

PATIENCE = 5.0
"""Seconds to wait, after a failed collective, for the other rank's own error, which says more."""


def communicates(node: fx.Node) -> bool:
    """Whether a node is a collective."""
    return node.target in STAND_INS


def _waited(operation: Any) -> Callable[..., Tensor]:
    """A collective that waits for its own result: so no stage ends between both."""

    @wraps(operation, (), ())  # who asks for the schema sees PyTorch's
    def run(*args: Any) -> Tensor:
        made: Tensor = _c10d.wait_tensor(operation(*args))
        return made

    run.__name__ = run.__qualname__ = str(operation._schema.name).rpartition("::")[2]
    return run


all_reduce = _waited(_c10d.all_reduce.default)
broadcast = _waited(_c10d.broadcast.default)
all_gather_into_tensor = _waited(_c10d.all_gather_into_tensor.default)
reduce_scatter_tensor = _waited(_c10d.reduce_scatter_tensor.default)
all_to_all_single = _waited(_c10d.all_to_all_single.default)

_WAITED: Mapping[Any, Callable[..., Tensor]] = {
    _c10d.all_reduce.default: all_reduce,
    _c10d.broadcast.default: broadcast,
    _c10d.all_gather_into_tensor.default: all_gather_into_tensor,
    _c10d.reduce_scatter_tensor.default: reduce_scatter_tensor,
    _c10d.all_to_all_single.default: all_to_all_single,
}


def name_groups(traced: Traced, dims: Mapping[str, str]) -> Traced:
    """Traced → Traced: each collective waits for its result, and names a dimension of the mesh, not
    a group, whose name differs from rank to rank.

    before:  a = all_reduce(x, 'sum', '3');  b = wait_tensor(a)
    after:   b = all_reduce(x, 'sum', 'tp')

    Raises:
        TraceError: a collective is of a group that is no dimension, or of a kind that is not known,
            or something reads its result before it is waited for.
    """
    if traced.backward is None:
        return traced
    graphs = traced.graph, traced.backward.graph
    if not any(str(node.target).startswith(_OWN) for graph in graphs for node in graph.nodes):
        return traced
    backward = fx.Graph()
    backward.output(backward.graph_copy(traced.backward.graph, {}))
    traced = replace(copied(traced), backward=replace(traced.backward, graph=backward))
    for graph in (traced.graph, backward):
        for node in list(graph.nodes):
            if str(node.target).startswith(_OWN) and node.target is not _c10d.wait_tensor.default:
                _join(graph, node, dims)
    return traced


_OWN = "_c10d_functional."


def _join(graph: fx.Graph, node: fx.Node, dims: Mapping[str, str]) -> None:
    """Replace a collective and the wait for it by one node."""
    *args, group = node.args
    if group not in dims:
        raise TraceError(
            f"{node.target} is over a process group ({group!r}) that is no dimension of the mesh "
            "of the pipe; let the model communicate over mesh['tp'] or the like alone"
        )
    if node.target not in _WAITED:
        raise TraceError(
            f"{node.target} is no collective that stages know; they know "
            f"{', '.join(each.__name__ for each in _WAITED.values())}"
        )
    waits = [user for user in node.users if user.target is _c10d.wait_tensor.default]
    if len(waits) != len(node.users) or len(waits) != 1:
        raise TraceError(
            f"{node.target} has a result that is read before it is waited for; wait for it first, "
            "by torch.distributed._functional_collectives.wait_tensor"
        )
    (wait,) = waits
    wait.target, wait.args = _WAITED[node.target], (*args, dims[str(group)])
    graph.erase_node(node)


def bind(dim: str, group: Any) -> None:
    """Let collectives of a dimension run over a process group of torch.distributed."""
    c10d: Any = torch._C._distributed_c10d
    if _bound.get(dim) is group:
        return
    if dim in _bound:
        c10d._unregister_process_group(dim)
    c10d._register_process_group(dim, group)
    _bound[dim] = group


_bound: dict[str, Any] = {}
_around: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def bound_to(dim: str, backend: Any, rank: int, size: int) -> None:
    """Let collectives of a dimension run over a backend of CPU ranks, of which this process has a
    number."""
    if backend not in _around:
        _around[backend] = _around_backend(backend, rank, size)
    bind(dim, _around[backend])


def _around_backend(backend: Any, rank: int, size: int) -> Any:
    kind, stores = dist.ProcessGroup.BackendType.GLOO, cast(Any, dist)
    group: Any = dist.ProcessGroup(stores.HashStore(), rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    return group


@contextmanager
def rerouted(dims: Mapping[str, str]) -> Iterator[None]:
    """Inside, collectives over process groups of torch.distributed, by their names, run over those
    to which dimensions are bound."""
    c10d: Any = torch._C._distributed_c10d
    before = {name: c10d._resolve_process_group(name) for name in dims}
    try:
        for name, dim in dims.items():
            bound = _bound[dim]
            backend = bound._get_backend(torch.device("cpu"))
            group = _around_backend(backend, bound.rank(), bound.size())
            group._set_group_name(name)  # the mesh finds its groups by their names
            c10d._unregister_process_group(name)
            c10d._register_process_group(name, group)
        yield
    finally:
        for name, group in before.items():
            c10d._unregister_process_group(name)
            c10d._register_process_group(name, group)


def without_collectives(plan: Plan) -> Plan:
    """Plan → Plan: a plan to measure, in whose graphs each collective makes a value of the same
    shape alone. Ranks measure one after another, and run graphs as often as clocks say."""

    def changed(module: fx.GraphModule) -> fx.GraphModule:
        if not any(map(communicates, module.graph.nodes)):
            return module
        graph = deepcopy(module.graph)
        for node in graph.nodes:
            if communicates(node):
                node.target = STAND_INS[node.target]
        return fx.GraphModule(module, graph)

    stages = [
        replace(stage, kernel=stage.kernel.mapped(changed))
        if isinstance(stage.kernel, GraphKernel)
        else stage
        for stage in plan.stages
    ]
    return replace(plan, stages=tuple(stages))


def _same(x: Tensor, *_: Any) -> Tensor:
    return x.clone()


def _sent(x: Tensor, *_: Any) -> Tensor:
    return x.clone()


def _repeated(x: Tensor, size: int, _: str) -> Tensor:
    return torch.cat([x] * size)


def _first(x: Tensor, _op: str, size: int, _: str) -> Tensor:
    return x[: len(x) // size].clone()


def _dealt(x: Tensor, outputs: list[int], *_: Any) -> Tensor:
    return x.new_zeros(sum(outputs), *x.shape[1:])


STAND_INS: Mapping[Any, Callable[..., Tensor]] = {
    all_reduce: _same,
    broadcast: _sent,
    all_gather_into_tensor: _repeated,
    reduce_scatter_tensor: _first,
    all_to_all_single: _dealt,
}
"""Collective → what makes a value of its shape."""


class InColumns(Wrapping):
    """A kernel whose graphs communicate. A collective that fails, as another rank has stopped the
    run, is no failure of this rank's own."""

    def __init__(self, kernel: Kernel, group: Group) -> None:
        super().__init__(kernel)
        self._group = group

    def _explained(self, run: Callable[..., T], *args: Any) -> T:
        try:
            return run(*args)
        except RuntimeError:
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline:
                if getattr(self._group, "failure", None) is not None:
                    raise Stopped from None
                time.sleep(0.01)
            raise

    def forward(self, *args: Any) -> Any:
        return self._explained(self.kernel.forward, *args)

    def backward(self, *args: Any) -> Any:
        return self._explained(self.kernel.backward, *args)

    def input_grad(self, *args: Any) -> Any:
        return self._explained(self.kernel.input_grad, *args)

    def weight_grad(self, *args: Any) -> Any:
        return self._explained(self.kernel.weight_grad, *args)

    def partial_backward(self, *args: Any) -> Any:
        return self._explained(self.kernel.partial_backward, *args)


def in_columns(kernels: list[Kernel], group: Group) -> list[Kernel]:
    """The kernels, each around which graphs communicate wrapped."""
    return [InColumns(kernel, group) if _any(kernel) else kernel for kernel in kernels]


def _any(kernel: Kernel) -> bool:
    graphs = kernel.forward_graph, kernel.backward_graph
    return any(communicates(node) for graph in graphs if graph for node in graph.graph.nodes)

"""Trace a model with ``torch.fx.symbolic_trace``: submodules of torch.nn stay calls.

before:  class Net(nn.Module): forward(x) = self.act(self.conv(x)).add_(1)
after:   conv = self.conv(x);  act = self.act(conv);  add_ = act.add(1);  return (add_,)

The leaf modules are called as they are, under autograd, with their own hooks, control flow and
autograd functions. Between them nothing works in place: an in-place operation is replaced by its
out-of-place variant, and a module with ``inplace=True`` gets a copy of its input.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from fxpipe.errors import TraceError
from fxpipe.ir.plan import Argument, Write
from fxpipe.ir.traced import (
    AUTOCAST,
    DRAWS,
    DRAWS_FROM_OTHERS,
    TAKES_TURNS,
    Traced,
)
from fxpipe.passes.tracing.explain import explained
from fxpipe.passes.tracing.items import (
    make_objects_at_readers,
    object_of,
    take_outputs_apart,
    take_slices_apart,
)
from fxpipe.passes.tracing.leaf_nests import UnfitLeaf
from fxpipe.passes.tracing.watching import StateReads
from fxpipe.random.leaf_draws import DrawsWatched, other_states
from fxpipe.torchtools import source
from fxpipe.torchtools.functions import functions_kept
from fxpipe.torchtools.pytrees import equal, versions
from fxpipe.torchtools.state import assigned_in_place, autocasts, under

_OUT_OF_PLACE: dict[Any, Callable[..., Any]] = {
    getattr(operator, f"__i{name}__"): getattr(operator, f"__{name}__")
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
        *("and", "or", "xor"),
    )
}
_VIEWS = frozenset(
    (
        *("view", "reshape", "t", "transpose", "permute", "squeeze", "unsqueeze", "expand"),
        *("flatten", "narrow", "select", "chunk", "split", "unbind", "getitem", "detach"),
        *("diagonal", "unfold", "unflatten", "ravel", "movedim", "moveaxis", "swapaxes"),
        *("swapdims", "broadcast_to", "broadcast_tensors", "meshgrid", "tensor_split"),
    )
)
_DROPOUTS = (_DropoutNd, nn.RNNBase, nn.MultiheadAttention)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def trace_symbolically(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    leaves: Collection[nn.Module] = (),
) -> Traced:
    """The model's graph with its leaf modules; it holds for every batch size.

    The model is traced in its present mode, on inputs of one micro-batch. Modules of torch.nn and
    ``leaves`` are called as they are.

    Raises:
        TraceError: the model cannot be traced; names its source line and the cure.
    """
    given = _given(model, args, kwargs)
    # what is not given has its default, for a stand-in of it would take the branches of a tensor
    every = {**_defaults(model), **given}
    constants = {name: value for name, value in every.items() if not isinstance(value, Tensor)}
    before = {module: {**module._buffers} for module in model.modules()}
    tracer = _Tracer(leaves)
    tracer.record_stack_traces = True
    try:
        with functions_kept(), StateReads(tracer, model):
            graph = tracer.trace(model, concrete_args=constants)
        _refuse_replaced(model, before)
    except Exception as error:
        raise explained(model, error, "symbolic") from error
    finally:
        for module, buffers in before.items():
            module._buffers.update(buffers)
    module = fx.GraphModule(model, graph)
    _out_of_place(module)  # before dead code is removed: an unused in-place operation looks dead
    make_objects_at_readers(graph)
    _drop_assertions(graph)
    names = _inputs(graph, given)
    tensors = [given[name] for name, node in names.items() if node is not None]
    written = Example(module).written(model, *tensors)
    take_slices_apart(graph)
    outputs, out_spec = take_outputs_apart(graph)
    _drop_unused(graph)
    graph.lint()
    module.recompile()
    held = leaf_tensors(module)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    owned = {*parameters, *(name for name, _ in model.named_buffers(remove_duplicate=False))}
    return Traced(
        module=module,
        parameters=tuple(Argument(name, name) for name in held if name in parameters),
        buffers=tuple(Argument(name, name) for name in held if name not in parameters),
        constants={
            name: operator.attrgetter(name)(module).detach() for name in held if name not in owned
        },
        inputs=tuple(names[name] for name in given),
        writes=tuple(Write(name, name) for name in held if name in written),
        outputs=outputs,
        out_spec=out_spec,
        leaves=True,
    )


def _refuse_replaced(
    model: nn.Module, held: Mapping[nn.Module, Mapping[str, Tensor | None]]
) -> None:
    """Raises TraceError where the tracer's stand-ins have replaced buffers that modules held."""
    for module, buffers in held.items():
        for name in buffers:
            new: Any = module._buffers.get(name)
            if isinstance(new, fx.Proxy):
                raise TraceError(
                    f"{type(model).__name__} cannot be traced at {source.of_node(new.node)} (it "
                    f'replaces the buffer {name!r}); use tracer="export"'
                )


def reserve_names(graph: fx.Graph, model: nn.Module, others: Iterable[str] = ()) -> None:
    """Let no new node have the name of a tensor of the model itself, or one of ``others``."""
    for name in (*model._parameters, *model._buffers, *others):
        graph._graph_namespace.create_name(name, None)


def leaf_tensors(module: fx.GraphModule) -> dict[str, list[fx.Node]]:
    """Name in the model of each parameter and buffer → the nodes that read it.

    A tensor with several names is listed under the first that the graph reads.
    """
    readers: dict[str, list[fx.Node]] = {}
    names: dict[int, str] = {}
    for node in module.graph.nodes:
        found: list[tuple[str, Tensor]] = []
        if node.op == "call_module":
            leaf = module.get_submodule(str(node.target))
            found = [
                (f"{node.target}.{name}", tensor)
                for tensors in (leaf.named_parameters(), leaf.named_buffers())
                for name, tensor in tensors
            ]
        elif node.op == "get_attr":
            tensor = operator.attrgetter(str(node.target))(module)
            found = [(str(node.target), tensor)] if isinstance(tensor, Tensor) else []
        for name, tensor in found:
            readers.setdefault(names.setdefault(id(tensor), name), []).append(node)
    return readers


def _given(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Parameter of ``forward`` → its argument, in the order of the flat inputs."""
    signature = inspect.signature(model.forward)
    bound = signature.bind(*args, **kwargs)
    given: dict[str, Any] = {}
    positional = list(signature.parameters)[: len(args)]
    for name in (*positional, *sorted(kwargs)):
        kind = signature.parameters[name].kind if name in signature.parameters else None
        value = bound.arguments.get(name)
        nested = not isinstance(value, Tensor) and any(
            isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)
        )
        if kind is None or kind in _VARIADIC or nested:
            raise TraceError(
                f"the symbolic tracer takes each input as a tensor of its own, and {name!r} is "
                'not; give its tensors one by one, or use tracer="export"'
            )
        given[name] = value
    return given


def _defaults(model: nn.Module) -> dict[str, Any]:
    """Parameter of ``forward`` → its default, of those that have one."""
    parameters = inspect.signature(model.forward).parameters.items()
    return {name: own.default for name, own in parameters if own.default is not own.empty}


def _drop_assertions(graph: fx.Graph) -> None:
    """Drop the tracer's assertions on constants, as a call with other constants is traced anew."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and "assert" in getattr(node.target, "__name__", ""):
            node.users.clear()
            graph.erase_node(node)
    _drop_unused(graph)


def _drop_unused(graph: fx.Graph) -> None:
    # a leaf module may be called for what it does to its buffers, or by its hooks
    graph.eliminate_dead_code(lambda node: node.op == "call_module" or node.is_impure())


def _inputs(graph: fx.Graph, given: Mapping[str, Any]) -> dict[str, str | None]:
    names: dict[str, str | None] = dict.fromkeys(given)
    for node in list(graph.nodes):
        if node.op != "placeholder":
            continue
        if isinstance(given.get(str(node.target)), Tensor):
            names[str(node.target)] = node.name
            node.args = ()  # its default, behind which no target of the loss could follow
        elif not node.users:
            graph.erase_node(node)
    return names


def _out_of_place(module: fx.GraphModule) -> None:
    """Let no node change a value in place that another node may read.

    After an in-place operation, nodes read its result instead of the old value.
    """
    graph = module.graph
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        target = _in_place_target(module, node)
        if target is None:
            continue
        if not isinstance(target, fx.Node) or is_view(target) or any(map(is_view, target.users)):
            raise TraceError(
                f"{node.name} at {source.of_node(node) or 'an unknown line'} writes into a part of "
                'a tensor; make a new tensor there, or use tracer="export", which can turn it '
                "into one"
            )
        for user in list(target.users):
            if order[user] > order[node]:
                user.replace_input_with(target, node)
        if node.op == "call_module":
            with graph.inserting_before(node):
                copy = graph.call_method("clone", (target,))
            copy.meta.update(node.meta)
            node.replace_input_with(target, copy)


def _in_place_target(module: fx.GraphModule, node: fx.Node) -> Any:
    """The value that a node changes in place; None if it changes none, "part" if it writes into a
    part of a tensor. The node itself is replaced by its out-of-place variant, if it has one."""
    if node.op == "call_function":
        if node.target in (operator.setitem, operator.delitem):
            return "part"
        if node.target in _OUT_OF_PLACE:
            node.target = _OUT_OF_PLACE[node.target]
            return node.args[0]
        name = getattr(node.target, "__name__", "")
        if name.endswith("_") and getattr(torch, name, None) is node.target:  # torch.relu_
            node.target = getattr(torch, name[:-1])
            return node.args[0]
        if node.kwargs.get("inplace"):
            node.kwargs = {**node.kwargs, "inplace": False}
            return node.args[0]
    if node.op == "call_method":
        name = str(node.target)
        if name.endswith("_") and not name.endswith("__"):
            if name == "copy_" or not hasattr(Tensor, name[:-1]):
                return "part"
            node.target = name[:-1]
            return node.args[0]
    if node.op == "call_module" and getattr(
        module.get_submodule(str(node.target)), "inplace", False
    ):
        return node.args[0] if node.args else "part"
    return None


def is_view(node: fx.Node) -> bool:
    """Whether a node's value is a view of its first argument."""
    if isinstance(node.target, torch._ops.OpOverload):
        aliases = (value.alias_info for value in node.target._schema.returns)
        return any(alias is not None and not alias.is_write for alias in aliases)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op in ("call_function", "call_method") and name in _VIEWS


def is_torchs(module: nn.Module) -> bool:
    """Whether a module is one of PyTorch's, which the tracer calls as it is without being asked."""
    return fx.Tracer().is_leaf_module(module, "")


def _drops(leaf: nn.Module) -> bool:
    """Whether a leaf module holds a dropout in training mode. Its rate may be 0 now and not later,
    which causes no new trace as with one of PyTorch's own."""
    return not is_torchs(leaf) and any(
        isinstance(module, _DROPOUTS) and module.training for module in leaf.modules()
    )


class _Tracer(fx.Tracer):
    """A tracer with leaf modules."""

    graph: fx.Graph

    def __init__(self, leaves: Collection[nn.Module]) -> None:
        super().__init__()
        self.leaves = {id(module) for module in leaves}

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if not len(self.graph.nodes):
            reserve_names(self.graph, self.root)
        node = super().create_node(kind, *args, **kwargs)
        if casts := autocasts():
            node.meta[AUTOCAST] = casts
        return node

    def create_arg(self, a: Any) -> Any:
        return super().create_arg(a) if (made := object_of(a, self)) is None else made

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) in self.leaves or super().is_leaf_module(m, module_qualified_name)


def _place(x: Any) -> int | None:
    """Where a tensor's memory begins."""
    return x.data_ptr() if isinstance(x, Tensor) and x.layout is torch.strided else None


class Example(fx.Interpreter):
    """Runs the graph once, to note the value of each node and the buffers that are written."""

    def written(self, model: nn.Module, *inputs: Tensor) -> set[str]:
        """All buffers of each module that writes one of them; BatchNorm writes some of its buffers
        without a change of their version counters."""
        buffers = dict(model.named_buffers(remove_duplicate=False))
        before = {name: (buffer._version, buffer.clone()) for name, buffer in buffers.items()}
        self.extra_traceback = False
        read = (self.fetch_attr(str(n.target)) for n in self.graph.find_nodes(op="get_attr"))
        self._read = set(map(_place, read)) - {None}
        with torch.no_grad(), assigned_in_place(model):
            self.run(*inputs)
        owners = {
            name.rpartition(".")[0]
            for name, buffer in buffers.items()
            if buffer._version != before[name][0] or not equal(buffer, before[name][1])
        }
        return {name for name in buffers if name.rpartition(".")[0] in owners}

    def run_node(self, n: fx.Node) -> Any:
        before = other_states() if n.op == "call_module" else {}
        # a module in place has a copy of its own, and what is given as out= is told by its gradient
        own = n.op == "call_module" and getattr(self.fetch_attr(str(n.target)), "inplace", False)
        own = own or "out" in n.kwargs
        given = [self.env[m] for m in n.all_input_nodes if m.op != "get_attr" and not own]
        written = versions(given)
        kept = self._attributes(n)
        with DrawsWatched() as watch, under(n.meta.get(AUTOCAST, ())):
            value = super().run_node(n)
        for key, held in self._attributes(n).items():
            if held != kept.get(key, held):
                raise UnfitLeaf(
                    str(n.target),
                    f"sets its attribute {key[1]!r} in every call, which code outside of it reads "
                    "and which would stay as it is there; let its forward return that, too",
                )
        if versions(given) != written:
            what = f"leaf module {n.target!r}" if n.op == "call_module" else n.name
            raise TraceError(
                f"{what} at {source.of_node(n) or 'an unknown line'} writes into what it is given, "
                "which other stages may read; let it work on a copy (x = x.clone())"
            )
        drew_from_others = bool(before) and other_states() != before
        if drew_from_others and not n.all_input_nodes:
            raise TraceError(
                f"leaf module {n.target!r} draws from Python's random or numpy.random, and takes "
                "no tensor that its draws could go by; give it one of the micro-batch"
            )
        n.meta[DRAWS_FROM_OTHERS] = drew_from_others
        drops = n.op == "call_module" and _drops(self.fetch_attr(str(n.target)))
        n.meta[DRAWS] = (watch.drew or drew_from_others or drops) and bool(n.all_input_nodes)
        n.meta[TAKES_TURNS] = watch.traced
        if isinstance(value, Tensor) and value.is_quantized:
            raise TraceError(
                f"{n.name} at {source.of_node(n) or 'an unknown line'} is a quantised tensor, "
                "which cannot be traced; make and use it inside of one leaf module: compile(..., "
                "leaf_modules=[its name])"
            )
        n.meta["val"] = value.to("meta") if isinstance(value, Tensor) else value
        return value

    def _attributes(self, n: fx.Node) -> dict[tuple[nn.Module, str], list[tuple[int, ...]]]:
        """Of a leaf module, each attribute → its tensors that the graph reads elsewhere, too."""
        parts = self.fetch_attr(str(n.target)).modules() if n.op == "call_module" else ()
        return {
            (part, key): [
                (_place(x) or 0, *versions(x))
                for x in pytree.tree_leaves(value)
                if _place(x) in self._read
            ]
            for part in parts
            for key, value in vars(part).items()
            if self._read and key not in ("_parameters", "_buffers", "_modules")
        }

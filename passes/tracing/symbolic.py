"""Trace a model with ``torch.fx.symbolic_trace``: submodules of torch.nn stay calls.

before:  class Net(nn.Module): forward(x) = self.act(self.conv(x)).add_(1)
after:   conv = self.conv(x);  act = self.act(conv);  add_ = act.add(1);  return (add_,)

Leaf modules are called as they are, under autograd, with their own hooks, control flow and autograd
functions. Nothing between them works in place: an in-place operation is replaced by its
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
from fxpipe.ir.traced import AUTOCAST, DRAWS, DRAWS_FROM_OTHERS, TAKES_TURNS, Traced
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
from fxpipe.torchtools.functions import ON_GRADIENTS, functions_kept, unheld
from fxpipe.torchtools.pytrees import detached, equal, versions
from fxpipe.torchtools.state import assigned_in_place, autocasts, tried, under

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

    The model is traced in its present mode, on the inputs of one micro-batch. Modules of torch.nn
    and ``leaves`` are called as they are.

    Raises:
        TraceError: the model cannot be traced; names its source line and the cure.
    """
    given = _given(model, args, kwargs)
    # a parameter that is not given gets its default, as a proxy would take a tensor's branches
    parameters = inspect.signature(model.forward).parameters.items()
    defaults = {name: p.default for name, p in parameters if p.default is not p.empty}
    every = {**defaults, **given}
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
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    owned = trained | {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return Traced(
        module=module,
        parameters=tuple(Argument(name, name) for name in held if name in trained),
        buffers=tuple(Argument(name, name) for name in held if name not in trained),
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
    """Check that no proxy has replaced a buffer that a module held; raises TraceError."""
    for module, buffers in held.items():
        for name in buffers:
            new: Any = module._buffers.get(name)
            if isinstance(new, fx.Proxy):
                raise TraceError(
                    f"{type(model).__name__} cannot be traced at {source.of_node(new.node)} (it "
                    f'replaces the buffer {name!r}); use tracer="export"'
                )


def reserve_names(graph: fx.Graph, model: nn.Module, others: Iterable[str] = ()) -> None:
    """Keep new nodes from taking the names of the model's own tensors, or those of ``others``."""
    for name in (*model._parameters, *model._buffers, *others):
        graph._graph_namespace.create_name(name, None)


def leaf_tensors(module: fx.GraphModule) -> dict[str, list[fx.Node]]:
    """Name in the model of each parameter or buffer → the nodes that read it.

    A tensor with several names is listed under the first that the graph reads.
    """
    readers: dict[str, list[fx.Node]] = {}
    names: dict[int, str] = {}
    for node in module.graph.nodes:
        read: dict[str, Any] = {}
        if node.op == "call_module":
            leaf = module.get_submodule(str(node.target))
            tensors = (*leaf.named_parameters(), *leaf.named_buffers())
            read = {f"{node.target}.{name}": tensor for name, tensor in tensors}
        elif node.op == "get_attr":
            read = {str(node.target): operator.attrgetter(str(node.target))(module)}
        for name, tensor in read.items():
            if isinstance(tensor, Tensor):
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


def _drop_assertions(graph: fx.Graph) -> None:
    """Drop the tracer's assertions on constants: a call with other constants is traced anew."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and "assert" in getattr(node.target, "__name__", ""):
            node.users.clear()
            graph.erase_node(node)
    _drop_unused(graph)


def _drop_unused(graph: fx.Graph) -> None:
    # a leaf module may be called only for its hooks, or for what it does to its buffers
    graph.eliminate_dead_code(lambda node: node.op == "call_module" or node.is_impure())


def _inputs(graph: fx.Graph, given: Mapping[str, Any]) -> dict[str, str | None]:
    """Parameter of ``forward`` → its placeholder if it is a tensor, else None."""
    names: dict[str, str | None] = dict.fromkeys(given)
    for node in list(graph.nodes):
        if node.op != "placeholder":
            continue
        if isinstance(given.get(str(node.target)), Tensor):
            names[str(node.target)] = node.name
            node.args = ()  # without its default, placeholders without one can follow
        elif not node.users:
            graph.erase_node(node)
    return names


def _out_of_place(module: fx.GraphModule) -> None:
    """Replace in-place operations; later nodes read their results instead of the old values."""
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
    """Return the value that a node changes in place, and make the node out-of-place if it can be.

    None if it changes nothing, "part" if it writes into a part of a tensor.
    """
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
    """Whether a leaf module of the user's holds a dropout in training mode. Its rate may be 0 now
    and change later, which causes a new trace only in modules of torch.nn."""
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

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Proxy:
        if kind == "call_method" and target in ON_GRADIENTS:
            raise unheld(target)
        return super().create_proxy(kind, target, *args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        node = object_of(a, self)
        return super().create_arg(a) if node is None else node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) in self.leaves or super().is_leaf_module(m, module_qualified_name)


def _place(x: Any) -> int | None:
    """The address of a dense tensor's memory."""
    return x.data_ptr() if isinstance(x, Tensor) and x.layout is torch.strided else None


class Example(fx.Interpreter):
    """Runs the graph once, to note the value of each node and the buffers that are written."""

    def written(self, model: nn.Module, *inputs: Tensor) -> set[str]:
        """Run the graph; return all buffers of each module that writes one of its buffers.

        BatchNorm writes some of its buffers without a change of their version counters.
        """
        buffers = dict(model.named_buffers(remove_duplicate=False))
        before = {name: (buffer._version, buffer.clone()) for name, buffer in buffers.items()}
        self.extra_traceback = False
        read = (self.fetch_attr(str(n.target)) for n in self.graph.find_nodes(op="get_attr"))
        self._read = set(map(_place, read)) - {None}
        with assigned_in_place(model):
            tried(lambda: self.run(*inputs))
        owners = {
            name.rpartition(".")[0]
            for name, buffer in buffers.items()
            if buffer._version != before[name][0] or not equal(buffer, before[name][1])
        }
        return {name for name in buffers if name.rpartition(".")[0] in owners}

    def run_node(self, n: fx.Node) -> Any:
        leaf = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        before = {} if leaf is None else other_states()
        # an in-place module works on a copy, and autograd itself refuses a wrong out=
        may_write = getattr(leaf, "inplace", False) or "out" in n.kwargs
        operands = [self.env[m] for m in n.all_input_nodes if m.op != "get_attr" and not may_write]
        written = versions(operands)
        kept = self._attributes(leaf)
        with DrawsWatched() as watch, under(n.meta.get(AUTOCAST, ())):
            value = super().run_node(n)
        for key, held in self._attributes(leaf).items():
            if held != kept.get(key, held):
                raise UnfitLeaf(
                    str(n.target),
                    f"sets its attribute {key[1]!r} in every call, which code outside of it reads "
                    "and would never see change; let its forward return it, too",
                )
        if versions(operands) != written:
            what = n.name if leaf is None else f"leaf module {n.target!r}"
            raise TraceError(
                f"{what} at {source.of_node(n) or 'an unknown line'} writes into what it is given, "
                "which other stages may read; let it work on a copy (x = x.clone())"
            )
        drew_from_others = bool(before) and other_states() != before
        if drew_from_others and not n.all_input_nodes:
            raise TraceError(
                f"leaf module {n.target!r} draws from Python's random or numpy.random, and takes "
                "no tensor of the micro-batch, from which its draws could be seeded; give it one"
            )
        n.meta[DRAWS_FROM_OTHERS] = drew_from_others
        drops = leaf is not None and _drops(leaf)
        n.meta[DRAWS] = (watch.drew or drew_from_others or drops) and bool(n.all_input_nodes)
        n.meta[TAKES_TURNS] = watch.traced
        if isinstance(value, Tensor) and value.is_quantized:
            raise TraceError(
                f"{n.name} at {source.of_node(n) or 'an unknown line'} is a quantised tensor, "
                "which cannot be traced; make and use it inside of one leaf module: compile(..., "
                "extensions=[fxpipe.LeafModules(its name)])"
            )
        tensor = isinstance(value, Tensor)
        n.meta["val"] = value.detach().to("meta") if tensor else detached(value)
        return value

    def _attributes(
        self, leaf: nn.Module | None
    ) -> dict[tuple[nn.Module, str], list[tuple[int, ...]]]:
        """Attribute of a leaf module → those of its tensors that the graph also reads elsewhere."""
        parts = () if leaf is None else leaf.modules()
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

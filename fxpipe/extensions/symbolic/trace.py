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
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxpipe.errors import FxpipeError, TraceError
from fxpipe.extensions.leaf_modules.graph import Example, reserve_names
from fxpipe.extensions.leaf_modules.objects import object_of
from fxpipe.extensions.symbolic.items import (
    make_objects_at_readers,
    take_outputs_apart,
    take_slices_apart,
)
from fxpipe.extensions.symbolic.state_reads import StateReads
from fxpipe.ir.plan import Argument, Write
from fxpipe.ir.traced import AUTOCAST, Traced
from fxpipe.passes.graph.aliasing import is_view
from fxpipe.passes.tracing.explain import refuse_names, untraceable
from fxpipe.passes.tracing.tracer import tensors_read
from fxpipe.torchtools import source
from fxpipe.torchtools.functions import ON_GRADIENTS, functions_kept, unheld
from fxpipe.torchtools.state import autocasts

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
_OTHER = "leave out fxpipe.Symbolic() and use torch.export"
"""What else to do about a model that ``torch.fx`` cannot trace."""
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class SymbolicTracer:
    """Traces models with ``torch.fx``; see ``fxpipe.passes.tracing.tracer.Tracer``."""

    def trace(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        called: Collection[nn.Module],
    ) -> Traced:
        """The model's graph, in which modules of torch.nn and those ``called`` are called."""
        try:
            return trace_symbolically(model, args, kwargs, called)
        except Exception as error:
            if isinstance(error, FxpipeError) or source.lacks_memory(error):
                raise
            refuse_names(model)
            raise untraceable(model, error, _OTHER) from error

    def calls(self, module: nn.Module) -> bool:
        """Whether a submodule is one of PyTorch's."""
        return fx.Tracer().is_leaf_module(module, "")


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
        if "co_varnames" in str(error):
            raise TraceError(
                f"{type(model).__name__} cannot be traced symbolically (a decorator around its "
                f"forward hides the parameters of forward); {_OTHER}"
            ) from error
        raise untraceable(model, error, _OTHER) from error
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
    held = tensors_read(module)
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
        under_autograd=True,
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
                    f"replaces the buffer {name!r}); {_OTHER}"
                )


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
                f"not; give its tensors one by one, or {_OTHER}"
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
        if not isinstance(target, fx.Node) or _is_view(target) or any(map(_is_view, target.users)):
            raise TraceError(
                f"{node.name} at {source.of_node(node) or 'an unknown line'} writes into a part of "
                f"a tensor; make a new tensor there, or {_OTHER}, which can turn it into one"
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


def _is_view(node: fx.Node) -> bool:
    """Whether a node's value is a view of its first argument."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return is_view(node) or (node.op in ("call_function", "call_method") and name in _VIEWS)


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

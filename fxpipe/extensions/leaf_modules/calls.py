"""Let ``torch.export`` see each call of a leaf module as one operation that it cannot look into.

before:  class Net(nn.Module): forward(x) = self.head(self.experts(x)[0])      experts is a leaf
traced:  leaf = fxpipe.leaf([x], 0);  getitem = leaf[0];  linear = aten.linear(getitem, w, b)
after:   experts = self.experts(x);  getitem = experts[0];  w = self.head.weight; …

The model runs once for real, to record the shapes of what its leaf modules return. Then it is
traced with a stand-in for each leaf module. In the resulting graph, leaf
modules are called as they are, with their own hooks, control flow and autograd functions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxpipe.errors import TraceError
from fxpipe.extensions.leaf_modules.graph import Example, versions
from fxpipe.extensions.leaf_modules.nests import (
    TensorPlace,
    UnfitLeaf,
    can_be_given,
    indices,
    refuse_objects,
    with_places,
)
from fxpipe.ir.plan import Argument, Write
from fxpipe.ir.traced import AUTOCAST, Traced, Value
from fxpipe.passes.tracing.tracer import tensors_read
from fxpipe.torchtools.state import Autocasts, autocasts, tried

_LIBRARY = torch.library.Library("fxpipe", "FRAGMENT")
_LIBRARY.define("leaf(Tensor[] inputs, int call) -> Tensor[]")
_LEAF = torch.ops.fxpipe.leaf.default
fx.node.has_side_effect(_LEAF)  # the model may call it only for what it does to its buffers

_known: dict[int, Sequence[Tensor]] = {}
"""Number of a call → what it returned, without data, while its model is being traced."""

_LIBRARY.impl("leaf", lambda inputs, call: [*map(torch.empty_like, _known[call])], "Meta")


def _sized(x: Tensor, size: Sequence[int], leaf: str) -> Tensor:
    """Check that a leaf module's result has the size that it had in the trace, and return it."""
    if list(x.shape) != list(size):
        raise TraceError(
            f"leaf module {leaf!r} returns a tensor of size {list(x.shape)}, and returned "
            f"{list(size)} when the model was traced, so that its size depends on values; mark a "
            "module around it as the leaf, one that returns tensors of one size"
        )
    return x


@dataclass(frozen=True)
class LeafCall:
    """One call of a leaf module.

    Attributes:
        number: identifies the call in ``_known``.
        name: the module's name in the model.
        given: positional and keyword arguments, with a ``TensorPlace`` for each tensor.
        results: the path, as indices, to each tensor in the result.
        returned: the result, with a ``TensorPlace`` for each tensor.
        casts: the autocast under which the module was called.
    """

    number: int
    name: str
    given: tuple[tuple[Any, ...], dict[str, Any]]
    results: tuple[tuple[Any, ...], ...]
    returned: Any
    casts: Autocasts


class LeafCalls:
    """The calls of leaf modules in one run of a model."""

    def __init__(self, leaves: Mapping[str, nn.Module], unasked: Collection[str] = ()) -> None:
        """Take the leaf modules by name; ``unasked`` are those that the user did not name, whose
        results' sizes are checked in every step."""
        self.leaves = leaves
        self.unasked = unasked
        self.calls: list[LeafCall] = []
        self._indices: Iterator[int] = iter(())
        self._inside = False

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside, record the calls of leaf modules while the model runs once for real."""
        with _called_instead(self.leaves, self._record):
            yield

    @contextmanager
    def opaque(self, model: nn.Module) -> Iterator[None]:
        """Inside, each call of a leaf module is one operation, for the model to be traced."""

        def begin(model: nn.Module, args: Any) -> None:
            self._indices = iter(range(len(self.calls)))

        hook = model.register_forward_pre_hook(begin)
        try:
            with _called_instead(self.leaves, self._stand_in):
                yield
        finally:
            hook.remove()

    def forget(self) -> None:
        """Forget the calls, and drop what they returned; to be called after tracing."""
        for call in self.calls:
            del _known[call.number]
        self.calls.clear()

    def _record(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._inside:  # a leaf inside of a leaf
            return module._call_impl(*args, **kwargs)
        refuse_objects(name, (args, kwargs))
        self._inside = True
        casts, before = autocasts(), versions((args, kwargs))
        try:
            output = module._call_impl(*args, **kwargs)
        finally:
            self._inside = False
        if versions((args, kwargs)) != before:
            raise UnfitLeaf(
                name, "writes into what it is given; let it work on a copy (x = x.clone())"
            )
        paths, _ = pytree.tree_flatten_with_path(output)
        for path, leaf in paths:
            if not isinstance(leaf, Tensor) and leaf is not None:
                raise UnfitLeaf(
                    name,
                    f"returns {type(leaf).__name__} {leaf!r:.40} at "
                    f"{pytree.keystr(path) or 'its output'}, which may differ from call to call; "
                    "return tensors",
                )
        tensors = [leaf for _, leaf in paths if isinstance(leaf, Tensor)]
        if any(tensor.is_quantized for tensor in tensors):
            raise UnfitLeaf(name, "returns a quantised tensor; return x.dequantize()")
        number = max(_known, default=-1) + 1
        call = LeafCall(
            number,
            name,
            with_places(name, "is given", (args, kwargs)),
            tuple(indices(name, output, path) for path, leaf in paths if isinstance(leaf, Tensor)),
            with_places(name, "returns", output),
            casts,
        )
        _known[number] = [torch.empty_like(x, device="meta") for x in tensors]
        self.calls.append(call)
        return output

    def _stand_in(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        index = next(self._indices, -1)
        call = self.calls[index] if index >= 0 else None
        placed = with_places(name, "is given", (args, kwargs))
        if call is None or call.name != name or not can_be_given(placed, call.given):
            raise UnfitLeaf(
                name,
                "is called otherwise when the model is traced than when it runs; let its calls "
                "depend on nothing but its inputs' shapes",
            )
        self.calls[index] = replace(call, given=placed)
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        results = torch.ops.fxpipe.leaf(tensors, call.number)
        return pytree.tree_map_only(TensorPlace, lambda place: results[place.index], call.returned)


def record_leaves(
    model: nn.Module, calls: LeafCalls, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Run the model once for real, to record what its leaf modules return."""

    def run() -> None:
        calls.forget()
        model(*args, **kwargs)

    with calls.recorded():
        tried(run)


def call_leaves(
    traced: Traced,
    model: nn.Module,
    calls: LeafCalls,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Traced:
    """Let the graph call its leaf modules, and read parameters and buffers from the model itself.

    The graph runs once on the inputs of one micro-batch; the caller restores the model's state.
    """
    rewriter = _Rewriter(traced, model, calls)
    module = rewriter.run()
    values = zip(traced.inputs, pytree.tree_leaves((args, kwargs)), strict=True)
    given = {rewriter.names[name]: value for name, value in values if name is not None}
    inputs = [given[n.name] for n in module.graph.nodes if n.op == "placeholder"]
    written = Example(module).written(module, *inputs)
    held = tensors_read(module)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    inside = tuple(f"{leaf}." for leaf in calls.leaves)
    return replace(
        traced,
        module=module,
        parameters=tuple(Argument(name, name) for name in held if name in parameters),
        buffers=tuple(Argument(name, name) for name in held if name not in parameters),
        constants=rewriter.constants,
        inputs=tuple(None if name is None else rewriter.names[name] for name in traced.inputs),
        outputs=tuple(
            replace(out, name=rewriter.names[out.name]) if isinstance(out, Value) else out
            for out in traced.outputs
        ),
        writes=tuple(
            Write(name, rewriter.writers.get(name, name))
            for name in held
            if name in rewriter.writers or (name in written and name.startswith(inside))
        ),
        under_autograd=True,
    )


class _Rewriter:
    """Copies a functional graph into one that reads and writes the model's own tensors."""

    def __init__(self, traced: Traced, model: nn.Module, calls: LeafCalls) -> None:
        self.traced = traced
        self.calls = {call.number: call for call in calls.calls}
        self.unasked = calls.unasked
        self.root: dict[str, Any] = dict(calls.leaves)
        self.state = traced.state_of(model)
        constants = {"fxpipe_" + t.replace(".", "_"): x for t, x in traced.constants.items()}
        self.constants = constants
        self.writers: dict[str, str] = {}
        self.graph = fx.Graph()
        for name in (*model._parameters, *model._buffers, *constants):  # no new node takes it
            self.graph._graph_namespace.create_name(name, None)
        copies: dict[fx.Node, fx.Node] = {}
        returned: Any = self.graph.graph_copy(traced.graph, copies)
        self.names = {old.name: new.name for old, new in copies.items()}
        self.order = {copies[node]: place for place, node in enumerate(copies)}
        count = len(traced.writes)
        targets = (write.target for write in traced.writes)
        self.written = dict(zip(targets, returned[:count], strict=True))
        self.graph.output(returned[count:])

    def run(self) -> fx.GraphModule:
        by_name = {node.name: node for node in self.graph.nodes}
        for argument in (*self.traced.parameters, *self.traced.buffers):
            self._read(by_name[self.names[argument.name]], argument.target)
        for target in self.written.keys() - {a.target for a in self.traced.buffers}:
            self._write(target, None)
        for node in list(self.graph.nodes):
            if node.target is _LEAF:
                self._call(node)
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph)

    def _read(self, placeholder: fx.Node, target: str) -> None:
        """Read a tensor right before its first use; copy it if it will be written."""
        users = [user for user in placeholder.users if user in self.order]
        if target in self.written:
            users.append(self.written[target])
        if not users:  # such as a constant that the graph does not need
            self.graph.erase_node(placeholder)
            return
        first = min(users, key=self.order.__getitem__)
        value = self._attribute(target, first)
        if target in self.written:
            self._write(target, value)
            with self.graph.inserting_after(value):
                value = self.graph.call_function(torch.ops.aten.clone.default, (value,))
            value.meta.update(placeholder.meta)
        placeholder.replace_all_uses_with(value)
        self.graph.erase_node(placeholder)

    def _write(self, target: str, attribute: fx.Node | None) -> None:
        """Copy the value that the graph computes for a buffer into the model's own buffer."""
        value = self.written[target]
        if attribute is None:
            attribute = self._attribute(target, value)
        with self.graph.inserting_after(value):
            copy = self.graph.call_function(torch.ops.aten.copy_.default, (attribute, value))
        copy.meta.update(value.meta)
        self.writers[target] = copy.name

    def _attribute(self, target: str, before: fx.Node) -> fx.Node:
        if target in self.traced.constants:
            target = "fxpipe_" + target.replace(".", "_")
        self.root[target] = (
            self.constants[target] if target in self.constants else self.state[target]
        )
        with self.graph.inserting_before(before):
            node = self.graph.get_attr(target)
        for key in ("nn_module_stack", "stack_trace"):
            if key in before.meta:
                node.meta[key] = before.meta[key]
        return node

    def _call(self, node: fx.Node) -> None:
        """Replace the operation that stands for a leaf module by a call of the module."""
        tensors: Any = node.args[0]
        call = self.calls[int(str(node.args[1]))]
        args, kwargs = pytree.tree_map_only(
            TensorPlace, lambda place: tensors[place.index], call.given
        )
        with self.graph.inserting_before(node):
            module = self.graph.call_module(call.name, args, kwargs)
        module.meta.update(node.meta)
        module.meta[AUTOCAST] = call.casts
        for item in list(node.users):
            path = call.results[int(str(item.args[1]))]
            checked = call.name in self.unasked
            value = module
            for index in path if checked else path[:-1]:
                with self.graph.inserting_before(item):
                    value = self.graph.call_function(operator.getitem, (value, index))
            if checked:
                item.args = (value, list(item.meta["val"].shape), call.name)
                item.target = _sized
            else:
                item.args = (value, path[-1]) if path else (value,)
                item.target = operator.getitem if path else torch.ops.aten.alias.default
        self.graph.erase_node(node)


@contextmanager
def _called_instead(
    modules: Mapping[str, nn.Module], function: Callable[[str, nn.Module, Any, Any], Any]
) -> Iterator[None]:
    """Inside, ``function(name, module, args, kwargs)`` is called instead of each of these modules
    and its hooks."""
    with ExitStack() as undo:
        for name, module in modules.items():
            # the attribute that nn.Module.compile sets: it replaces hooks and forward
            undo.callback(setattr, module, "_compiled_call_impl", module._compiled_call_impl)

            def call(*args: Any, name: str = name, module: Any = module, **kwargs: Any) -> Any:
                return function(name, module, args, kwargs)

            module._compiled_call_impl = call
        yield

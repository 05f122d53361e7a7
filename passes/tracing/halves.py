"""Split a joint graph of PyTorch's, of a model and its gradients, into forward and backward.

before:  convolution = …;  relu = …;  threshold_backward = …;  return [loss, gradient of weight]
after:   forward:   convolution = …;  relu = …;  return (loss,)
         backward:  threshold_backward = …;  return (gradient of weight,)       which reads relu

Its nodes get names that graphs for other sizes have, too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from fxpipe.errors import TraceError
from fxpipe.ir.plan import Argument, Write
from fxpipe.ir.traced import ORIGIN, Literal, Traced, Value, WholeBackward
from fxpipe.passes.graph.aliasing import same_layout
from fxpipe.passes.graph.lazy_module import lazy_module
from fxpipe.passes.graph.unread import drop_unread
from fxpipe.passes.tracing.shapes import shapes_of
from fxpipe.torchtools import source

if TYPE_CHECKING:
    from fxpipe.passes.tracing.capture import Whole

aten = torch.ops.aten


class Halves:
    """Splits a joint graph into the forward and the backward."""

    def __init__(self, module: fx.GraphModule, whole: Whole, names: Sequence[str]) -> None:
        self.module, self.whole = module, whole
        self.names = names
        self.forward, self.back = fx.Graph(), fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}  # node → its copy in the forward
        self.late: dict[fx.Node, fx.Node] = {}  # node → its copy in the backward
        self.parameters: list[Argument] = []
        self.buffers: list[Argument] = []
        self.constants: dict[str, Tensor] = {}
        self.inputs: list[str | None] = [None] * len(whole.leaves)
        self.tangents: dict[int, str] = {}  # number of an output → the name of its gradient
        self.origins: dict[Any, fx.Node] = {}  # sequence number → the first node of the forward
        self.ends = set[fx.Node]()  # what the graph returns

    def traced(self) -> Traced:
        graph = self.module.graph
        self.ends.update(graph.output_node().all_input_nodes)
        holders = graph.find_nodes(op="placeholder")
        for node in holders:
            self._placeholder(node)
        for node in graph.nodes:
            if node.op == "get_attr":
                self._constant(node)
            elif node.op == "call_function":
                self._copy(node)
        return self._finished(graph.output_node())

    def _placeholder(self, node: fx.Node) -> None:
        from torch._functorch._aot_autograd import descriptors as d

        match desc := node.meta["desc"]:
            case d.ParamAOTInput() | d.BufferAOTInput():
                name = self.whole.state[desc.target]
                copy = self._input(node, desc.target)
                is_parameter = isinstance(desc, d.ParamAOTInput)
                (self.parameters if is_parameter else self.buffers).append(
                    Argument(copy.name, name)
                )
                if name.startswith("loss:"):
                    self.constants[name] = getattr(self.whole, desc.target)
            case d.PlainAOTInput():
                place = self.whole.places[desc.idx]
                self.inputs[place] = self._input(node, _identifier(self.names[place])).name
            case d.TangentAOTInput(output=d.PlainAOTOutput(idx=index)):
                self.late[node] = self.back.placeholder(f"gradient_{index}")
                self.late[node].meta.update(node.meta)
                self.tangents[index] = self.late[node].name
            case d.TangentAOTInput(output=d.InputMutationAOTOutput(mutated_input=written)):
                raise self._writes(written)
            case _:
                raise TraceError(f"the model needs {desc}, which a graph cannot have")

    def _input(self, node: fx.Node, name: str) -> fx.Node:
        copy = self.forward.placeholder(name)
        copy.target = copy.name
        copy.meta.update({key: node.meta[key] for key in ("val",) if key in node.meta})
        self.copies[node] = copy
        return copy

    def _constant(self, node: fx.Node) -> None:
        tensor = getattr(self.module, str(node.target), None)
        if not isinstance(tensor, Tensor):
            called = next(iter(node.users), node)
            raise TraceError(
                f"the model calls torch's own {called.target} at {source.of_node(called)}, which "
                "no graph of a stage can hold; write an if or a loop of Python instead"
            )
        first = next(iter(self.forward.nodes))
        with self.forward.inserting_before(first):
            copy = self._input(node, f"c_{_identifier(str(node.target)).lstrip('_')}")
        if "val" not in copy.meta:
            copy.meta["val"] = tensor
        self.buffers.append(Argument(copy.name, str(node.target).lstrip("_")))
        self.constants[self.buffers[-1].target] = tensor.detach()

    def _copy(self, node: fx.Node) -> None:
        source: Any = node.args[0] if node.args else None
        if node.target is aten.detach.default:
            holder = self.copies if source in self.copies else self.late
            holder[node] = holder[source]
            return
        back = str(node.meta.get("partitioner_tag", "")).endswith("backward")
        if node.target is aten.native_batch_norm_backward.default and node.args[7]:
            # in training it reads no running statistics
            node.args = (*node.args[:3], None, None, *node.args[5:])
        written: Any = node.args[1] if len(node.args) > 1 else None
        if node.target is aten.copy.default and same_layout(source, written):
            source = written
            node.target, node.args, node.kwargs = aten.clone.default, (source,), {}
        if self._is_idle(node):
            holder = self.late if back else self.copies
            holder[node] = holder[source]
            return
        graph = self.back if back else self.forward
        of = self._read if back else self.copies.__getitem__
        args, kwargs = fx.map_arg((node.args, node.kwargs), of)
        is_size = isinstance(node.meta.get("val"), torch.SymInt)  # which graphs for one size lack
        name = "size" if is_size else getattr(node.target, "__name__", "value").split(".")[0]
        name = "view" if name in ("_unsafe_view", "reshape") else name  # equal but for symbols
        if back:
            name = self.forward._graph_namespace.create_name(name, None)
        copy = graph.create_node(node.op, node.target, name=name)
        copy.args, copy.kwargs = args, kwargs
        copy.name = name if back else copy.name
        keep = "val", "nn_module_stack", "stack_trace", "is_gradient_acc"
        copy.meta.update({key: node.meta[key] for key in keep if key in node.meta})
        number = node.meta.get("seq_nr")
        if back:
            self.late[node] = copy
            origin = None if node.meta.get("is_gradient_acc") else self.origins.get(number)
            if origin is not None:
                copy.meta["stack_trace"] = origin.meta.get("stack_trace")
            copy.meta[ORIGIN] = origin and origin.name
        else:
            self.copies[node] = copy
            self.origins.setdefault(number, copy)

    def _is_idle(self, node: fx.Node) -> bool:
        """Whether a node is a needless copy of another's value, as dropout with p = 0 leaves it, or
        a slice that is the whole of it, as ``x[:, 1]`` leaves where sizes are symbols."""
        source: Any = node.args[0] if node.args else None
        match node.target:
            case aten.clone.default:
                idle = source in self.copies and self.copies[source].op == "call_function"
            case aten.slice.Tensor:
                idle = source in self.copies and node.args[2:] == (0, sys.maxsize)
            case aten.slice_backward.default:
                idle = source in self.late and node.args[3:] == (0, sys.maxsize, 1)
            case _:
                return False
        ends = any(user.op == "output" or user in self.ends for user in node.users)
        return idle and not ends and same_layout(node, source)

    def _read(self, node: fx.Node) -> fx.Node:
        """What a node of the backward reads: of the forward by its name."""
        if node in self.late:
            return self.late[node]
        source = self.copies[node]
        if source not in self.late:
            with self.back.inserting_before(next(iter(self.back.nodes))):
                copy = self.back.placeholder(source.name)
            copy.name = copy.target = source.name
            copy.meta.update(source.meta)
            self.late[source] = copy
        return self.late[source]

    def _finished(self, end: fx.Node) -> Traced:
        from torch._functorch._aot_autograd import descriptors as d

        returned: Any = end.args[0]
        writes: list[Write] = []
        plain: dict[int, fx.Node] = {}
        gradients: dict[str, fx.Node] = {}
        by_target = {a.target: a.name for a in (*self.parameters, *self.buffers)}
        for node, desc in zip(returned, end.meta["desc"], strict=True):
            match desc:
                case d.InputMutationAOTOutput(mutated_input=d.BufferAOTInput(target=own)):
                    value = self._own(self.copies[node])
                    writes.append(Write(self.whole.state[own], value.name))
                    plain[-len(writes)] = value
                case d.InputMutationAOTOutput(mutated_input=written):
                    raise self._writes(written)
                case d.PlainAOTOutput(idx=index):
                    value = node.args[0] if index in self.whole.copied else node
                    plain[index] = self.copies[value]
                case d.GradAOTOutput(grad_of=of):
                    if not isinstance(node, fx.Node):
                        continue
                    match of:
                        case d.ParamAOTInput(target=own):
                            name = by_target[self.whole.state[own]]
                        case d.PlainAOTInput(idx=index):
                            name = self.inputs[self.whole.places[index]] or ""
                        case _:
                            continue
                    gradients[name] = self._read(node)
                case None:
                    continue
                case _:
                    raise TraceError(f"the model gives {desc}, which a graph cannot have")
        return self._built(writes, plain, gradients)

    def _built(
        self, writes: list[Write], plain: dict[int, fx.Node], gradients: Mapping[str, fx.Node]
    ) -> Traced:
        whole, number = self.whole, 0
        outputs: list[Value | Literal] = []
        names: dict[int, str] = {}
        values: list[fx.Node] = []
        buffers = {argument.name for argument in self.buffers}
        for leaf in whole.outputs:
            if not isinstance(leaf, Tensor):
                outputs.append(Literal(leaf, None if type(leaf) is int else ()))
                continue
            node = plain[number]
            if node.name in buffers:
                node = self._own(node)
            given = node.op == "placeholder" and not leaf.requires_grad
            if node.name in names.values() and not given:
                node = self._new_output(aten.alias.default, node)  # each has a gradient of its own
            names[number] = node.name
            number += 1
            outputs.append(Value(node.name))
            if node not in values:
                values.append(node)
        rest = [plain[index] for index in range(number, len(plain) - len(writes))]
        loss: str | None = None
        logged: dict[str, str] = {}
        if rest:
            first = self._own(rest[0])
            names[number] = loss = first.name
            if first not in values:
                values.append(first)
            of = whole.loss
            scalars = [self._own(node) for node in rest[1:]]
            keys = () if of is None else of.logged
            logged = dict(zip(keys, (node.name for node in scalars), strict=True))
            values += scalars
        written = [plain[-index] for index in range(1, len(writes) + 1)]
        self.forward.output((*written, *values))
        gradients = {name: self._cast_once(name, value) for name, value in gradients.items()}
        self.back.output(tuple(gradients.values()))
        kept = {node.name for node in self.back.find_nodes(op="placeholder")}
        unread = drop_unread(self.forward, kept)
        self.forward.lint()
        self.back.lint()
        shapes = shapes_of(whole.leaves)
        return Traced(
            lazy_module(nn.Module(), self.forward),
            parameters=tuple(a for a in self.parameters if a.name not in unread),
            buffers=tuple(a for a in self.buffers if a.name not in unread),
            constants={
                a.target: self.constants[a.target]
                for a in self.buffers
                if a.name not in unread and a.target in self.constants
            },
            inputs=tuple(None if name in unread else name for name in self.inputs),
            writes=tuple(writes),
            outputs=tuple(outputs),
            out_spec=whole.spec,
            accepts=lambda given: [*given] == shapes,
            loss=loss,
            logged=logged,
            backward=WholeBackward(
                self.back,
                {names[index]: name for index, name in self.tangents.items()},
                {name: node.name for name, node in gradients.items()},
            ),
        )

    def _writes(self, written: Any) -> TraceError:
        """That the model writes into a parameter, with the submodule that has it, or an input."""
        name = self.whole.state.get(getattr(written, "target", ""))
        if name is None:
            return TraceError(
                "the model writes into its input; let it work on a copy (x = x.clone())"
            )
        path = name.split(".")[:-1]
        return TraceError(
            f"the model writes into its parameter {name!r} while it runs, as an embedding with "
            "max_norm does, and weights change in updates alone; make it a buffer, or work on a "
            "copy of it",
            f"{'.'.join(path) or 'its forward'} (it writes into its parameter {name!r})",
            [".".join(path[:end]) for end in range(1, len(path) + 1)],
        )

    def _cast_once(self, name: str, gradient: fx.Node) -> fx.Node:
        """Let a weight that autocast casts for several readers be cast once, as where the model
        runs: autocast's cache knows no weights of a capture. So its gradients are added before
        they are cast back.

        before:  add(_to_copy(b, dtype=float32), _to_copy(a, dtype=float32))
        after:   _to_copy(add(b, a), dtype=float32)
        """
        weight = next(node for node in self.forward.nodes if node.name == name)
        users = [node for node in weight.users if node.target is aten._to_copy.default]
        casts = [node for node in users if node.kwargs == users[0].kwargs]
        of_casts = {node.name for node in casts}
        parts = _summands(gradient)
        several = [
            part
            for part in parts
            if part.target is aten._to_copy.default and part.meta.get(ORIGIN) in of_casts
        ]
        if len(casts) < 2 or len(several) < len(casts):
            return gradient
        first, *others = casts
        for other in others:
            other.replace_all_uses_with(first)
            if (read := self.late.pop(other, None)) is not None:
                if first in self.late:
                    read.replace_all_uses_with(self.late[first])
                    self.back.erase_node(read)
                else:
                    read.name = read.target = first.name
                    self.late[first] = read
        with self.back.inserting_before(gradient):
            # the first cast is differentiated last
            total: Any = several[0].args[0]
            for part in several[1:]:
                total = self._new(aten.add.Tensor, (total, part.args[0]), total)
            cast = self._new(aten._to_copy.default, (total,), several[-1])
            cast.kwargs = several[-1].kwargs
            rest = [cast if part is several[-1] else part for part in parts]
            rest = [part for part in rest if part not in several]
            total = rest[0]
            for part in rest[1:]:
                total = self._new(aten.add.Tensor, (total, part), gradient)
        summed: fx.Node = total
        return summed

    def _new(self, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        """A new node of the backward, with a value like another's."""
        name = target.__name__.split(".")[0]
        made = self.back.create_node("call_function", target, args)
        made.name = self.forward._graph_namespace.create_name(name, None)
        made.meta.update(like.meta)
        return made

    def _own(self, node: fx.Node) -> fx.Node:
        """The value as one that the graph computes, not as one of its inputs."""
        if node.op != "placeholder":
            return node
        return self._new_output(aten.clone.default, node)

    def _new_output(self, target: Any, node: fx.Node) -> fx.Node:
        name = target.__name__.split(".")[0]
        copy = self.forward.create_node("call_function", target, (node,), name=name)
        copy.meta.update(node.meta)
        return copy


def _summands(gradient: fx.Node) -> list[fx.Node]:
    """The gradients of which one is the sum, in the order in which they are added."""
    parts: list[fx.Node] = []
    while gradient.meta.get("is_gradient_acc") and gradient.target is aten.add.Tensor:
        gradient, last = gradient.all_input_nodes[:2]
        parts.append(last)
    return [gradient, *reversed(parts)]


def _identifier(name: str) -> str:
    """A name for a node."""
    name = re.sub(r"\W+", "_", name).strip("_") or "input"
    return name if not name[0].isdigit() else f"input_{name}"

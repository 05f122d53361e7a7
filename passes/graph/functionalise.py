"""Make an exported graph functional: no in-place operation, buffer writes as outputs.

before:  add_ = aten.add_.Tensor(b_count, 1);  relu_ = aten.relu_.default(bn)
after:   add = aten.add.Tensor(b_count, 1);  relu = aten.relu.default(bn);  return (add, relu)
         with the write count = add
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    OutputKind,
    SymIntArgument,
    TensorArgument,
)

from fxpipe.errors import TraceError
from fxpipe.extend import option
from fxpipe.ir.plan import Argument, Write
from fxpipe.ir.traced import AUTOCAST, Literal, Traced, Value
from fxpipe.passes.graph.aliasing import mark_in_place, same_layout
from fxpipe.passes.graph.exported import detach_without_grad, functional, refuse_in_place
from fxpipe.passes.graph.lazy_module import lazy_module
from fxpipe.passes.tracing.explain import at_node, untraceable
from fxpipe.passes.tracing.trace import Dims, Shapes, is_free, user_inputs
from fxpipe.torchtools.state import Autocasts, autocasts

aten = torch.ops.aten

_ASSERTIONS = frozenset(
    (
        *(aten._assert_tensor_metadata.default, aten._assert_scalar.default),
        *(aten.sym_constrain_range_for_size.default, aten.sym_constrain_range.default),
        aten._assert_async.msg,
    )
)


def functionalise(
    program: ExportedProgram,
    accepts: Callable[[Shapes], bool],
    model: nn.Module | None = None,
    dims: Dims | None = None,
) -> Traced:
    """The exported program as one functional graph.

    Args:
        program: the exported program; it is changed.
        accepts: whether the program holds for shapes of its inputs.
        model: the traced model, for error messages.
        dims: for each flat input the dimensions that are the batch; by default those of any size.

    Raises:
        TraceError: the model writes into one of its inputs, or it keeps something that a graph
            cannot hold. If ``model`` is given, any other failure becomes a TraceError, too.
    """
    try:
        return _functional(program, accepts, dims)
    except Exception as error:
        if model is None:
            raise
        raise untraceable(model, error) from error


def _functional(
    program: ExportedProgram,
    accepts: Callable[[Shapes], bool],
    dims: Dims | None,
) -> Traced:
    detach_without_grad(program.graph_module)
    refuse_in_place(program.graph_module)
    mark_in_place(program.graph_module)
    first_name = _first_names(program)
    samples = _samples(program, dims)
    casts = autocasts()
    rewritten, rewrite = None, option("rewrite")
    # run_decompositions makes an operation of each cast, which the stages can then share
    if rewrite is not None and not (casts and _shares_parameters(program)):
        rewritten = rewrite(program)
    if rewritten is None:
        program = functional(program)
    module, written = rewritten or (program.graph_module, [])
    parameters, buffers, constants, inputs = _arguments(program, module, first_name)
    writes, outputs = _results(program, module, first_name, written, samples)
    _let_copies_have_gradients(module)
    _let_strides_vary(module)
    writes, outputs = _return_values(module, writes, outputs, {a.name for a in buffers})
    _tidy(module, {*(a.name for a in (*parameters, *buffers)), *filter(None, inputs)})
    out_spec = program.call_spec.out_spec
    assert out_spec is not None
    module, new = _with_lasting_names(module)
    if casts:
        _note_casts(module.graph, casts if rewritten else ())
    return Traced(
        module=module,
        parameters=tuple(replace(a, name=new[a.name]) for a in parameters),
        buffers=tuple(replace(a, name=new[a.name]) for a in buffers),
        constants=constants,
        inputs=tuple(None if name is None else new[name] for name in inputs),
        writes=tuple(replace(write, value=new[write.value]) for write in writes),
        outputs=tuple(
            replace(out, name=new[out.name]) if isinstance(out, Value) else out for out in outputs
        ),
        out_spec=out_spec,
        accepts=accepts,
    )


def _arguments(
    program: ExportedProgram, module: fx.GraphModule, first_name: Callable[[str], str]
) -> tuple[list[Argument], list[Argument], dict[str, torch.Tensor], list[str | None]]:
    """The parameters and buffers that a graph reads, its constants by name, and its inputs.

    Raises:
        TraceError: the graph reads something else.
    """
    parameters: list[Argument] = []
    buffers: list[Argument] = []
    constants: dict[str, torch.Tensor] = {}
    inputs: list[str | None] = []
    used = {node.name for node in module.graph.nodes if node.users}
    for spec in program.graph_signature.input_specs:
        name = getattr(spec.arg, "name", "")
        match spec.kind:
            case InputKind.PARAMETER if name in used:
                parameters.append(Argument(name, first_name(str(spec.target))))
            case InputKind.BUFFER if name in used:
                buffers.append(Argument(name, first_name(str(spec.target))))
            case InputKind.CONSTANT_TENSOR if name in used:
                target = f"constant.{spec.target}"
                buffers.append(Argument(name, target))
                constant = program.constants[str(spec.target)]
                assert isinstance(constant, torch.Tensor)
                constants[target] = constant.detach()
            case InputKind.USER_INPUT:
                is_value = isinstance(spec.arg, TensorArgument) and name in used
                inputs.append(name if is_value else None)
            case InputKind.CUSTOM_OBJ | InputKind.TOKEN:
                raise TraceError(f"the model keeps {spec.target!r}, which a graph cannot hold")
            case _:
                pass
    return parameters, buffers, constants, inputs


def _results(
    program: ExportedProgram,
    module: fx.GraphModule,
    first_name: Callable[[str], str],
    written: Sequence[str],
    samples: Collection[Any],
) -> tuple[list[Write], list[Value | Literal]]:
    """The writes of a graph to buffers, to those ``written`` first, and its outputs. ``samples``
    are the symbols of the batch size.

    Raises:
        TraceError: the graph writes something else, or returns something that no graph can hold.
    """
    writes = [Write(first_name(target), "") for target in written]
    outputs: list[Value | Literal] = []
    returned: Any = module.graph.output_node().args[0]
    kept = [*returned[: len(written)]]
    values = {node.name: node.meta.get("val") for node in module.graph.nodes}
    for out, node in zip(
        program.graph_signature.output_specs, returned[len(written) :], strict=True
    ):
        match out.kind:
            case OutputKind.BUFFER_MUTATION:
                writes.append(Write(first_name(str(out.target)), getattr(out.arg, "name", "")))
            case OutputKind.USER_OUTPUT:
                name = node.name if isinstance(node, fx.Node) else ""
                outputs.append(_output(out.arg, name, values.get(name), samples))
            case OutputKind.USER_INPUT_MUTATION:
                raise TraceError(
                    f"the model writes into its input {out.target!r}; let it work on a copy "
                    "(x = x.clone())"
                )
            case OutputKind.PARAMETER_MUTATION:
                message = (
                    f"the model writes into its parameter {out.target!r} while it runs, as an "
                    "embedding with max_norm does, and weights change in updates alone; make it a "
                    "buffer, or work on a copy of it"
                )
                # scaling the rows of an embedding's own weight twice is the same as once
                if node.target is aten.embedding_renorm.default:
                    raise at_node(message, node, "it scales rows of its parameter")
                raise TraceError(message)
            case kind:
                raise TraceError(f"the model has an output of kind {kind.name}; return tensors")
        kept.append(node)
    module.graph.output_node().args = (tuple(kept),)
    return writes, outputs


def _shares_parameters(program: ExportedProgram) -> bool:
    """Whether several operations read one parameter, which autocast casts once for all of them."""
    parameters = program.graph_signature.inputs_to_parameters
    placeholders = program.graph.find_nodes(op="placeholder")
    return any(node.name in parameters and len(node.users) > 1 for node in placeholders)


def _note_casts(graph: fx.Graph, casts: Autocasts) -> None:
    """Let the nodes run under this autocast; under none if the casts are operations of the graph.

    Then merge equal casts of a parameter: autocast casts it once for all its readers, and adds
    their gradients before it casts them back, wherever the stages are cut.
    """
    first_casts: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        node.meta[AUTOCAST] = casts
        cast = node.target is aten._to_copy.default
        if not casts and cast and node.args[0].op == "placeholder":
            first = first_casts.setdefault((node.args, *node.kwargs.items()), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _first_names(program: ExportedProgram) -> Callable[[str], str]:
    """Name of a parameter or buffer → the first of its names, as ``named_parameters`` has it."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, tensor in program.state_dict.items():
        names[name] = first.setdefault(id(tensor), name)
    return lambda name: names.get(name, name)


def _samples(program: ExportedProgram, dims: Dims | None) -> Collection[Any]:
    """The symbols of the batch size among the sizes of a program's inputs; none if it is fixed."""
    shapes = [_shape(node.meta.get("val")) for node in user_inputs(program)]
    sizes = [
        shape[dim]
        for leaf, shape in enumerate(shapes)
        for dim in (range(len(shape)) if dims is None else dims[leaf])
    ]
    return {size.node.expr for size in sizes if is_free(size)}


def _output(argument: Any, name: str, value: Any, samples: Collection[Any]) -> Value | Literal:
    """Describe one output, from its signature, and the name and value of its node.

    If the batch size is a symbol, it shows the dimensions that are the batch.
    """
    if isinstance(argument, TensorArgument):
        if not samples:
            return Value(name)
        sizes = enumerate(_shape(value))
        return Value(name, tuple(dim for dim, size in sizes if _counts(size, samples)))
    if isinstance(argument, SymIntArgument):
        return Value(name, (0,) if _counts(value, samples) else None)
    if isinstance(argument, ConstantArgument):
        counts = None if type(argument.value) is int and not samples else ()
        return Literal(argument.value, counts)
    raise TraceError(f"the model returns {argument!r}, which a graph cannot hold; return tensors")


def _shape(value: Any) -> Sequence[Any]:
    return value.shape if isinstance(value, torch.Tensor) else ()


def _counts(size: Any, samples: Collection[Any]) -> bool:
    """Whether a size is the number of samples itself, not a number computed from it."""
    return isinstance(size, torch.SymInt) and size.node.expr in samples


def _let_copies_have_gradients(module: fx.GraphModule) -> None:
    """Rewrite ``copy(x, y)``, which has no derivative, as a clone of ``y`` if the layouts agree,
    else as a scatter of ``y`` into all of ``x``."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target is not aten.copy.default:
            continue
        target, source = node.args[:2]
        like, value = target.meta["val"], source.meta["val"]
        if _layout(like) == _layout(value):
            node.target, node.args, node.kwargs = aten.clone.default, (source,), {}
            continue
        if not like.dim():
            node.target, node.args = aten._to_copy.default, (source,)
            node.kwargs = {"dtype": like.dtype}
            continue
        with module.graph.inserting_before(node):
            spread = module.graph.call_function(aten.expand_as.default, (source, target))
        spread.meta.update({**node.meta, "val": value.expand(like.shape)})
        node.target, node.args = aten.slice_scatter.default, (target, spread)


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    return value.dtype, value.shape, value.stride()


def _let_strides_vary(module: fx.GraphModule) -> None:
    """Write ``view`` as ``reshape``, as strides may differ from those of the trace: attention, for
    example, chooses its kernel by which tensors require a gradient."""
    for node in module.graph.nodes:
        if node.target is aten.view.default:
            node.target = aten.reshape.default


def _return_values(
    module: fx.GraphModule,
    writes: list[Write],
    outputs: list[Value | Literal],
    buffers: set[str],
) -> tuple[list[Write], list[Value | Literal]]:
    """Let the graph return the values of its writes and outputs.

    Arguments that are written to a buffer are copied, and so are buffers that are returned.
    """
    end = module.graph.output_node()
    returned: Any = end.args[0]

    def computed(node: Any, kept: bool) -> Any:
        if node.op != "placeholder" or not kept:
            return node
        with module.graph.inserting_before(end):
            copy = module.graph.call_function(aten.clone.default, (node,))
        copy.meta.update(node.meta)
        return copy

    count = len(writes)
    written = [computed(node, True) for node in returned[:count]]
    values = [
        computed(node, node.name in buffers)
        for node, out in zip(returned[count:], outputs, strict=True)
        if isinstance(out, Value) and isinstance(node, fx.Node)
    ]
    end.args = ((*written, *values),)
    rest = iter(values)
    return (
        [replace(write, value=node.name) for write, node in zip(writes, written, strict=True)],
        [replace(o, name=next(rest).name) if isinstance(o, Value) else o for o in outputs],
    )


def _with_lasting_names(module: fx.GraphModule) -> tuple[fx.GraphModule, dict[str, str]]:
    """The graph with names that its copies keep, and old name → new name.

    The exporter names placeholders as fx would not (``input`` is a builtin), and numbers nodes by
    counting size computations too, which only a dynamic graph has. Here a node is named after its
    operation and its number among nodes of that operation, so that graphs for other sizes agree.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            continue
        is_size = isinstance(node.meta.get("val"), torch.SymInt | int)
        name = "size" if is_size else getattr(node.target, "__name__", "value").split(".")[0]
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: copies[n])
        copies[node] = graph.create_node(node.op, node.target, args, kwargs, name)
        copies[node].meta.update(node.meta)
    return lazy_module(module, graph), {old.name: node.name for old, node in copies.items()}


def _tidy(module: fx.GraphModule, placeholders: set[str]) -> None:
    """Drop assertions, needless copies, dead nodes and placeholders that nothing reads."""
    graph = module.graph
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in reversed(order):
        if node.op == "call_function" and node.target in _ASSERTIONS and not node.users:
            graph.erase_node(node)
        elif _is_idle_copy(node, order):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.name not in placeholders and not node.users:
            graph.erase_node(node)
    graph.lint()


def _is_idle_copy(node: fx.Node, order: Mapping[fx.Node, int]) -> bool:
    """Whether a node is a needless copy of another node's value, such as dropout with p = 0 leaves.

    Nothing works in place any more, so a copy with the same strides changes no values. But it keeps
    the gradients of its readers together: they are added up before they join those of the value's
    other readers, of which the latest is added first. A copy is needed if these sums would change.
    """
    if node.op != "call_function" or node.target is not aten.clone.default:
        return False
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.op != "call_function":
        return False
    if any(user.op == "output" for user in node.users):
        return False  # an output of the model stays a separate tensor
    last = max((order[user] for user in node.users), default=0)
    later = [order[user] for user in source.users if order[user] > order[node]]
    if later and (len(node.users) > 1 or min(later) < last):
        return False
    return same_layout(node, source)

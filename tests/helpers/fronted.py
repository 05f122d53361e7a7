"""The passes from a model to a plan with kernels, called one by one; and the model's own answer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxpipe.errors import PartitionError
from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import SEED, Literal, Traced, Value
from fxpipe.ir.value import HOST, gradient_groups, outputs_of
from fxpipe.passes.differentiate.divide import Wanted, divide
from fxpipe.passes.graph.randomness import seed_randomness
from fxpipe.passes.partition.assignment import Assignment, compute_nodes, first_readers
from fxpipe.passes.partition.balance import balance
from fxpipe.passes.partition.cut import cut
from fxpipe.passes.partition.measure import NodeCost
from fxpipe.passes.tracing.capture import capture
from fxpipe.passes.tracing.explain import untraceable


def front_end(model: nn.Module, *args: Any, **kwargs: Any) -> Traced:
    """The model's graph with its backward, seeded; inputs that require a gradient get one."""
    leaves = pytree.tree_leaves((args, kwargs))
    known = [*inspect.signature(model.forward).parameters]
    of = [*zip(known, args, strict=False), *kwargs.items()]
    given = [(name, len(pytree.tree_leaves(value))) for name, value in of]
    names = [
        name if count == 1 else f"{name}_{index}" for name, count in given for index in range(count)
    ]
    names += [f"more_{index}" for index in range(len(leaves) - len(names))]
    wants = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
    try:
        traced = capture(model, None, args, kwargs, (), (), names, wants, step=False)
    except Exception as error:
        raise untraceable(model, error) from error
    return seed_randomness(traced)


def rows_of(size: int, *inputs: Any) -> list[tuple[int, ...]]:
    """For each flat input dimension 0, if it has this size."""
    return [
        (0,) if isinstance(leaf, Tensor) and leaf.shape[:1] == (size,) else ()
        for leaf in pytree.tree_leaves(inputs)
    ]


def shapes_for(size: int, rows: int, *inputs: Any) -> list[tuple[int, ...] | None]:
    """The shapes of flat inputs, with dimension 0 of another size where it has that of the rows."""
    leaves, dims = pytree.tree_leaves(inputs), rows_of(rows, *inputs)
    return [
        None if not isinstance(leaf, Tensor) else (size, *leaf.shape[1:]) if dim else (*leaf.shape,)
        for leaf, dim in zip(leaves, dims, strict=True)
    ]


def values_of(traced: Traced, *args: Any, seed: int = 0, **kwargs: Any) -> dict[str, Any]:
    """Placeholder → what the call gives it."""
    leaves = pytree.tree_leaves((args, kwargs))
    values = {n: leaf for n, leaf in zip(traced.inputs, leaves, strict=True) if n is not None}
    if traced.seeded:
        values[SEED] = torch.tensor(seed)
    return values


def run_graph(
    model: nn.Module, traced: Traced, *args: Any, seed: int = 0, **kwargs: Any
) -> tuple[Any, dict[str, Tensor]]:
    """Interpret the graph: the model's nested output, and what is written to buffers."""
    targets = {a.name: a.target for a in (*traced.parameters, *traced.buffers)}
    state, values = traced.state_of(model), values_of(traced, *args, seed=seed, **kwargs)
    arguments = [
        state[targets[node.name]] if node.name in targets else values[node.name]
        for node in traced.graph.nodes
        if node.op == "placeholder"
    ]
    flat = list(fx.Interpreter(traced.module).run(*arguments))
    writes = {write.target: flat.pop(0) for write in traced.writes}
    leaves = [out.value if isinstance(out, Literal) else flat.pop(0) for out in traced.outputs]
    assert not flat
    return pytree.tree_unflatten(leaves, traced.out_spec), writes


def in_stages(traced: Traced, stages: int) -> Assignment:
    """About as many nodes in each stage, or as many stages as there can be."""
    costs = {node.name: NodeCost(1.0, 0.0, 1) for node in traced.graph.nodes}
    try:
        return balance(traced, stages, costs)
    except PartitionError:
        return in_stages(traced, stages - 1)


def whole(traced: Traced) -> Assignment:
    return Assignment(1, {node.name: 0 for node in compute_nodes(traced.graph)})


def differentiated(
    model: nn.Module,
    traced: Traced,
    assignment: Assignment,
    *args: Any,
    inputs: bool = False,
    **kwargs: Any,
) -> Plan:
    """The plan with kernels; every output gets a gradient."""
    plan = cut(traced, assignment, first_readers(traced, assignment)).verify()
    outputs = frozenset(out.name for out in traced.outputs if isinstance(out, Value))
    return divide(plan, traced, traced.state_of(model), Wanted(outputs, inputs)).verify()


class Answer:
    """What eager PyTorch gives for a call: outputs, buffers, gradients from ones-like seeds."""

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        own = copy.deepcopy(model)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        leaves = [
            x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
            for x in leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        self.output = own(*args, **kwargs)
        self.leaves = [x for x in pytree.tree_leaves(self.output) if isinstance(x, Tensor)]
        self.buffers = dict(own.named_buffers())
        self.seeds = [seed_like(x) for x in self.leaves]
        wanted = [(n, p) for n, p in own.named_parameters() if p.requires_grad]
        inputs = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        roots = [(x, g) for x, g in zip(self.leaves, self.seeds, strict=True) if x.requires_grad]
        found: Sequence[Tensor | None] = [None] * (len(wanted) + len(inputs))
        if roots and found:
            found = torch.autograd.grad(
                [x for x, _ in roots],
                [*(p for _, p in wanted), *inputs],
                [g for _, g in roots],
                allow_unused=True,
            )
        self.gradients = {
            n: g for (n, _), g in zip(wanted, found[: len(wanted)], strict=True) if g is not None
        }
        self.inputs = list(found[len(wanted) :])


def seed_like(x: Tensor) -> Tensor:
    """A gradient for a value: some pattern, the same for values of one shape."""
    if not (x.is_floating_point() or x.is_complex()):
        return torch.zeros_like(x)
    pattern = torch.arange(x.numel(), dtype=torch.float64).mul(0.7).sin().add(1.3)
    return pattern.reshape(x.shape).to(x.dtype)


@dataclass(frozen=True)
class Ran:
    """What a plan has computed: values that cross stages, what it wrote to buffers, gradients."""

    values: dict[str, Any]
    state: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


def run_plan(
    model: nn.Module,
    traced: Traced,
    plan: Plan,
    *args: Any,
    seed: int = 0,
    halves: bool = False,
    **kwargs: Any,
) -> Ran:
    """The plan's kernels one after another, each output's gradient being ``seed_like`` it."""
    ran, state = Ran(values_of(traced, *args, seed=seed, **kwargs)), traced.state_of(model)
    saved = []
    # (value, the stage that read it) → its gradient
    back: dict[tuple[str, int], Tensor] = {}
    for edge in plan.gradients:
        if edge.source == HOST:
            spec = plan.specs[edge.value]
            back[edge.value, HOST] = seed_like(torch.empty(spec.shape, dtype=spec.dtype))
    with torch.no_grad():
        for stage in plan.stages:
            assert stage.kernel is not None
            done = stage.kernel.forward(
                [state[a.target] for a in stage.parameters],
                [state[a.target] for a in stage.buffers],
                [ran.values[e.value] for e in plan.edges_into(stage.index)],
            )
            sent = outputs_of(plan.edges_from(stage.index))
            ran.values.update(zip(sent, done.outputs, strict=True))
            ran.state.update(zip((w.target for w in stage.writes), done.writes, strict=True))
            saved.append(done.saved)
        for stage in reversed(plan.stages if back else ()):
            assert stage.kernel is not None
            groups = gradient_groups(plan.gradients_into(stage.index))
            given = [reduce(add, [back[e.value, e.source] for e in group]) for group in groups]
            if halves:
                inputs, deferred = stage.kernel.input_grad(saved[stage.index], given)
                parameters = stage.kernel.weight_grad(deferred)
            else:
                whole = stage.kernel.backward(saved[stage.index], given)
                inputs, parameters = whole.inputs, whole.parameters
            carried = outputs_of(plan.gradients_from(stage.index))
            back.update(((n, stage.index), g) for n, g in zip(carried, inputs, strict=True))
            names = (a.target for a in stage.parameters)
            ran.gradients.update(
                (n, g) for n, g in zip(names, parameters, strict=True) if g is not None
            )
    return ran


def assert_equal(ours: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert sorted(ours) == sorted(expected)
    for name, tensor in ours.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


def _rows(inputs: Any) -> int:
    return next(len(x) for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor) and x.dim())


__all__ = [
    "Answer",
    "assert_equal",
    "differentiated",
    "front_end",
    "in_stages",
    "rows_of",
    "run_graph",
    "run_plan",
    "seed_like",
    "shapes_for",
    "values_of",
    "whole",
]

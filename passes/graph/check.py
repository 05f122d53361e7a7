"""Check on an example that a compiled plan computes what the model computes.

An unnoticed wrong trace is the worst fault that a compiler of models can have. So the finished
kernels, not an intermediate form, are compared with the model itself: every output, the buffers,
and the gradient of every parameter. Random operations draw a fixed pattern in both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxpipe.errors import TraceError
from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import DRAWS_FROM_OTHERS, Traced, Value
from fxpipe.ir.value import HOST
from fxpipe.kernels.graph import GraphKernel
from fxpipe.kernels.inductor import compiled
from fxpipe.kernels.serial import SerialResult, run_serially
from fxpipe.passes.graph.randomness import FixedDraws, fixed_others, pattern
from fxpipe.torchtools import moments, source
from fxpipe.torchtools.pytrees import pieces, taken_apart

_RELATIVE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""How much two runs of the same operations may differ, as a part of the greatest entry; a wrong
trace differs by far more."""

_NOISE = 4.0
"""How much a gradient may differ, in multiples of its own noise, where that is more."""

_ROUNDING = 8
"""By how many last bits the sum of some thousand numbers may be off."""

_CURES = {
    False: 'use tracer="symbolic", which calls modules as they are',
    True: "have the submodule around it called as it is: compile(..., leaf_modules=[its name]), "
    'or, where that is the model itself and tracer is "symbolic", use tracer="export"',
}
"""Whether the graph has leaf modules → what to do about an operation that the tracer misses."""

_WITHOUT_GRADIENTS = (
    "; or the model computes something else where gradients are off, as nn.TransformerEncoder does "
    "with padding: torch.backends.mha.set_fastpath_enabled(False)"
)


def check(
    traced: Traced,
    plan: Plan,
    values: Mapping[str, Any],
    state: Mapping[str, Tensor],
    call: Callable[[], tuple[Any, Tensor | None]],
    differentiated: bool,
    own: Collection[int],
) -> None:
    """Compare a differentiated plan with the model; split backwards are run whole and in halves.

    Args:
        traced: the graph that the plan was cut from.
        plan: the plan.
        values: the inputs of one micro-batch, by name.
        state: name in the model → parameter or buffer.
        call: runs the model, and the loss if there is one; returns the output, and the loss or
            None. The caller restores the model's state.
        differentiated: whether gradients are compared as well.
        own: the stages whose parameters' gradients are compared; a rank has no memory for those of
            other ranks.

    Raises:
        TraceError: the plan and the model differ; names the output or parameter.
        InputError: the model fails where gradients are wanted; names its line.
    """
    called = [node for node in traced.graph.nodes if node.op == "call_module"]
    narrow = _narrowest(plan)
    compare = partial(
        _compare, _CURES[traced.leaves] + ("" if differentiated else _WITHOUT_GRADIENTS), narrow
    )
    difference = partial(_difference, narrow)

    @contextmanager
    def draws() -> Iterator[None]:
        with ExitStack() as stack:
            if traced.seeded or traced.leaves:
                stack.enter_context(FixedDraws())
            if any(node.meta.get(DRAWS_FROM_OTHERS) for node in called):
                stack.enter_context(fixed_others())
            yield

    buffers = {write.target for stage in plan.stages for write in stage.writes}
    for norm in traced.deferred:
        buffers |= {norm.running_mean, norm.running_var, norm.tracked or norm.running_mean}
    before = {name: state[name].clone() for name in sorted(buffers)}
    kept = _kept(state, {id(state[name]) for name in before})

    def run() -> tuple[list[tuple[str, Tensor]], Tensor | None]:
        with torch.enable_grad() if differentiated else torch.no_grad(), source.refusing_failures():
            output, loss = call()
        leaves = pytree.tree_leaves(taken_apart(output))
        outputs = [
            (out.name, leaf)
            for out, leaf in zip(traced.outputs, leaves, strict=False)
            if isinstance(out, Value) and isinstance(leaf, Tensor)
        ]
        return outputs, loss

    parted = any(stage.input_grad is not None for stage in plan.stages)

    def run_plan(seeds: Mapping[str, Tensor]) -> list[SerialResult]:
        with torch.no_grad():
            return [
                run_serially(plan, values, {**state, **before}, seeds, halves=halves, own=own)
                for halves in ([False, True] if parted else [False])
            ]

    def run_again() -> _Gradients:
        for name, tensor in before.items():
            state[name].copy_(tensor)
        with draws():
            seeds, of_model = _gradients(plan, state, own, traced.loss, *run())
            return _Gradients(of_model, [result.gradients for result in run_plan(seeds)])

    with draws():
        outputs, loss = run()
        # before the backward, in which a checkpoint inside of the model writes its buffers again
        after = {name: state[name].clone() for name in before}
        for name, tensor in kept.items():
            compare(f"what is written to the buffer {name!r}", tensor, state[name])
        seeds: dict[str, Tensor] = {}
        of_model: dict[str, Tensor] = {}
        if differentiated:
            seeds, of_model = _gradients(plan, state, own, traced.loss, outputs, loss)
        results = run_plan(seeds)
    parameters = {a.name: state[a.target] for a in traced.parameters}
    computed = {**values, **parameters, **results[0].values}
    for name, there in outputs:
        compare(f"output {name!r}", computed[name], there)
    if loss is not None and traced.loss is not None:
        compare("the loss", computed[traced.loss], loss)
    for name, here in moments.commit(traced.deferred, before, results[0].state).items():
        compare(f"what is written to the buffer {name!r}", here, after[name])
    first = _Gradients(of_model, [result.gradients for result in results])
    unlike = [name for name in of_model if any(difference(*pair) for pair in first.pairs(name))]
    nearby = _nearby(run_again, state, of_model, narrow) if unlike else []
    for name in unlike:
        noise = max(_greatest(other.of_model[name] - of_model[name]) for other in nearby)
        for index, pair in enumerate(first.pairs(name)):
            others = (other.pairs(name)[index] for other in nearby)
            if all(difference(*each, noise) for each in (pair, *others)):
                compare(f"the gradient of {name!r}", *pair, noise)


class _Gradients(NamedTuple):
    """Gradients by the names of parameters, for one set of weights.

    Attributes:
        of_model: from the model's own backward.
        of_plan: from the plan's whole backwards and, if it has them, from their halves.
    """

    of_model: Mapping[str, Tensor]
    of_plan: Sequence[Mapping[str, Tensor]]

    def pairs(self, name: str) -> list[tuple[Tensor, Tensor]]:
        """A parameter's gradients from the plan, each with that from the model."""
        there = self.of_model[name]
        none = there.new_zeros(()).expand_as(there)
        return [(gradients.get(name, none), there) for gradients in self.of_plan]


def _narrowest(plan: Plan) -> torch.dtype | None:
    """The least precise floating-point type in graphs that were compiled to libraries, if any.

    Under autocast, libraries round fewer values to that type than the model does.
    """
    dtypes: set[torch.dtype] = set()
    for stage in plan.stages:
        if isinstance(stage.kernel, GraphKernel):
            for graph in (stage.kernel.forward_graph, stage.kernel.backward_graph):
                if graph is not None and compiled(graph) is not None:
                    values = (node.meta.get("val") for node in graph.graph.nodes)
                    dtypes.update(x.dtype for x in values if isinstance(x, Tensor))
    return max(dtypes & _RELATIVE.keys(), key=_RELATIVE.__getitem__, default=None)


def _nearby(
    run_again: Callable[[], _Gradients],
    state: Mapping[str, Tensor],
    trained: Iterable[str],
    narrow: torch.dtype | None,
) -> list[_Gradients]:
    """The gradients at three other sets of weights, moved by as much as sums round.

    They show how large rounding errors are: the gradient of a bias before a BatchNorm, for example,
    is nothing else. And behind many BatchNorms, rounding decides on which side of zero a ReLU sees
    a number. At most of the other weights, the model and the plan then agree; a wrong trace is
    wrong at all of them.
    """
    nearby = []
    kept = {name: state[name].detach().clone() for name in trained}
    try:
        for times in (1, 3, 7):
            for name, weight in kept.items():
                signs = ((pattern(weight) * times).frac() < 0.5).to(weight) * 2 - 1
                off = _ROUNDING * max(torch.finfo(x).eps for x in (weight.dtype, narrow) if x)
                state[name].detach().copy_(weight * (1 + signs * off))
            nearby.append(run_again())
    finally:
        for name, weight in kept.items():
            state[name].detach().copy_(weight)
    return nearby


def _kept(state: Mapping[str, Tensor], written: Collection[int]) -> dict[str, Tensor]:
    """Copies of the buffers that no graph writes, each under its first name."""
    names: dict[int, str] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, nn.Parameter) and id(tensor) not in written:
            names.setdefault(id(tensor), name)
    return {name: state[name].clone() for name in names.values()}


def _gradients(
    plan: Plan,
    state: Mapping[str, Tensor],
    own: Collection[int],
    loss_name: str | None,
    outputs: Sequence[tuple[str, Tensor]],
    loss: Tensor | None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run the model's own backward; return the gradients that it starts from, and those of the
    parameters of the stages ``own``."""
    roots = {loss_name: loss} if loss is not None else dict(outputs)
    back = {edge.value for edge in plan.edges if edge.gradient and edge.target == HOST}
    started = {name: value for name, value in roots.items() if name in back and value is not None}
    # values that depend on inputs alone need no gradient in the model's run
    reaching = [name for name, value in started.items() if loss is not None or value.requires_grad]
    seeds = {str(name): pattern(value).to(value) + 0.5 for name, value in started.items()}
    trained = {
        argument.target: state[argument.target]
        for stage in plan.stages
        for argument in stage.parameters
        if stage.index in own and state[argument.target].requires_grad
    }
    if not started or not trained:
        return seeds, {}
    try:
        gradients = torch.autograd.grad(
            [started[name] for name in reaching],
            list(trained.values()),
            [seeds[str(name)] for name in reaching],
            allow_unused=True,
        )
    except RuntimeError as error:
        line = str(error).splitlines()[0]
        raise TraceError(
            f"the model's own backward fails without any pipeline ({line}); mend the model first"
        ) from error
    of_model = {}
    for (name, parameter), gradient in zip(trained.items(), gradients, strict=True):
        if gradient is not None and gradient.layout is not torch.strided:
            raise TraceError(
                f"the gradient of {name!r} is {gradient.layout}, which cannot be added up over "
                "micro-batches here; make it dense, as with nn.Embedding(..., sparse=False)"
            )
        of_model[name] = torch.zeros_like(parameter) if gradient is None else gradient
    return seeds, of_model


def _compare(
    cure: str,
    narrow: torch.dtype | None,
    what: str,
    here: Tensor,
    there: Tensor,
    noise: float = 0.0,
) -> None:
    difference = _difference(narrow, here, there, noise)
    if difference:
        raise TraceError(
            "the traced graph does not compute what the model computes: "
            f"{what}: {difference}; some operation, such as an autograd function of its own, is "
            f"not seen by the tracer: {cure}"
        )


def _difference(narrow: torch.dtype | None, here: Tensor, there: Tensor, noise: float = 0.0) -> str:
    """How two tensors differ that were computed in types no less precise than ``narrow``; an empty
    string if they agree."""
    here, there = here.detach(), there.detach()
    if here.layout is not there.layout:
        return f"{here.layout}, not {there.layout}"
    if here.layout is not torch.strided:
        pairs = zip(pieces(here), pieces(there), strict=True)
        differences = (_difference(narrow, *pair, noise) for pair in pairs)
        return next(filter(None, differences), "")
    if here.shape != there.shape or here.dtype != there.dtype:
        return f"{tuple(here.shape)} {here.dtype}, not {tuple(there.shape)} {there.dtype}"
    if not (here.is_floating_point() or here.is_complex()):
        return "" if torch.equal(here, there) else "its entries differ"
    scale = _greatest(there)
    relative = max(_RELATIVE.get(x, 1e-3) for x in (there.dtype, narrow) if x)
    bound = max(relative * max(scale, 1e-6), _NOISE * noise)
    if torch.allclose(here, there, rtol=0.0, atol=bound, equal_nan=True):
        return ""
    return f"it differs by {float((here - there).abs().max()):.3g}, scale {scale:.3g}"


def _greatest(tensor: Tensor) -> float:
    """The greatest absolute value among the finite entries."""
    sizes = torch.nan_to_num(tensor.detach().abs().double(), 0.0, 0.0, 0.0)
    return float(sizes.amax()) if tensor.numel() else 0.0

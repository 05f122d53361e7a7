"""Check on an example that a compiled plan computes what the model computes.

An unnoticed wrong trace is the worst fault that a compiler of models can have. So the finished
kernels, not an intermediate form, are compared with the model itself: every output, the buffers,
and the gradient of every parameter. Random operations draw a fixed pattern in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from fxpipe import random
from fxpipe.compiler.model_check.fixed_draws import FixedDraws, pattern
from fxpipe.compiler.model_check.gradients import Compare, compare_gradients
from fxpipe.compiler.model_check.serial import run_serially
from fxpipe.errors import TraceError
from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import AUTOCAST, Traced, Value
from fxpipe.kernels.graph import GraphKernel
from fxpipe.parts import Parts
from fxpipe.torchtools import source
from fxpipe.torchtools.pytrees import memory, taken_apart

_RELATIVE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""How much two runs of the same operations may differ, as a part of the greatest entry; a wrong
trace differs by far more."""

_NOISE = 4.0
"""How much a value may differ, in multiples of its own noise, where that is more."""

_CLOSE = 4.0
"""Differences up to this multiple of what is allowed may yet be rounding."""

_FEW = 0.05
"""So may differences in this part of the whole numbers of an output, such as the largest of close
numbers."""

_ROUNDING = 8
"""By how many last bits the sum of some thousand numbers may be off."""

_CACHED = 1 << 18
"""Of so many numbers, differences are taken at once: new memory for all would take longer."""

_CURE = (
    "have the submodule around it called as it is: compile(..., "
    "extensions=[fxpipe.LeafModules(its name)])"
)
"""What to do about an operation that the tracer misses."""

_WITHOUT_GRADIENTS = (
    "; or the model computes something else where gradients are off, as nn.TransformerEncoder does "
    "with padding: torch.backends.mha.set_fastpath_enabled(False)"
)


class CloseError(TraceError):
    """The plan and the model differ by more than is allowed, but by so little that it may yet be
    rounding."""


def check(
    traced: Traced,
    plan: Plan,
    values: Mapping[str, Any],
    state: Mapping[str, Tensor],
    call: Callable[[], tuple[Any, Tensor | None]],
    differentiated: bool,
    apart: bool = False,
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
        apart: whether the device has memory for one stage only. What the model saves for its
            backward, and its gradients, wait in the host's memory.

    Raises:
        TraceError: the plan and the model differ; names the output or parameter.
        CloseError: they differ, and nothing differs by much.
        InputError: the model fails where gradients are wanted; names its line.
    """
    narrow = _narrowest(traced, plan)
    cure = _CURE + ("" if differentiated else _WITHOUT_GRADIENTS)
    written = {write.target for stage in plan.stages for write in stage.writes}
    for norm in traced.deferred:
        written |= {norm.running_mean, norm.running_var, norm.tracked or norm.running_mean}
    before = {name: tensor.clone() for name, tensor in _buffers(state, written).items()}
    held = set(map(memory, state.values()))

    def pack(x: Tensor) -> tuple[Tensor, torch.device]:
        return x if memory(x) in held else x.cpu(), x.device

    on_host = saved_tensors_hooks(pack, lambda packed: packed[0].to(packed[1]))

    @contextmanager
    def draws() -> Iterator[None]:
        with ExitStack() as stack:
            if traced.seeded:
                stack.enter_context(FixedDraws())
            if any(node.target is random.attention for node in traced.graph.nodes):
                # fused kernels draw masks of their own
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            yield

    def run() -> tuple[dict[str, Tensor], Tensor | None]:
        """Run the model with the buffers of before. Returns its outputs and its loss."""
        for name in before.keys() & written:
            state[name].copy_(before[name])
        refusing = source.refusing_failures(gradients=differentiated)
        with torch.set_grad_enabled(differentiated), refusing, on_host if apart else nullcontext():
            output, loss = call()
        leaves = zip(traced.outputs, pytree.tree_leaves(taken_apart(output)), strict=False)
        return {
            out.name: leaf
            for out, leaf in leaves
            if isinstance(out, Value) and isinstance(leaf, Tensor)
        }, loss

    def run_both(compare: Compare) -> dict[str, Tensor]:
        """Run the model and the plan, and let all that they compute be compared. Returns the
        model's outputs."""
        with draws():
            outputs, loss = run()
            # before the backward, in which a checkpoint in the model writes its buffers again
            after = {name: state[name].clone() for name in written}
            for name in before.keys() - written:
                difference = _difference(before[name], state[name], _allowed(None, state[name]))
                if difference:
                    raise _refusal(_buffer(name), difference, cure)
            of_plan = {**state, **before}
            with torch.no_grad():
                result = run_serially(plan, values, of_plan)
            computed = {**values, **{a.name: state[a.target] for a in traced.parameters}}
            computed |= result.values
            for name, there in outputs.items():
                compare(f"output {name!r}", computed[name], there)
            roots = outputs
            if loss is not None and traced.loss is not None:
                compare("the loss", computed[traced.loss], loss)
                roots = {traced.loss: loss}
            writes: Mapping[str, Tensor] = result.written
            if traced.deferred:
                commit = Parts.commit_moments.find("deferred BatchNorm")
                writes = commit(traced.deferred, before, writes)
            for name, here in writes.items():
                compare(_buffer(name), here, after[name])
            if differentiated:
                compare_gradients(plan, result.values, state, of_plan, roots, compare, apart=apart)
        return outputs

    first: dict[str, _Pair] = {}

    def keep_unlike(what: str, here: Tensor, there: Tensor) -> None:
        if _difference(here, there, _allowed(narrow, there)):
            first[what] = here, there

    earlier = run_both(keep_unlike)
    if not first:
        return
    with draws():
        outputs, _ = run()
    if any(_difference(x, earlier[name], _allowed(narrow, x)) for name, x in outputs.items()):
        # the model computes something else in another run, so that nothing nearby is rounding
        what, pair = next(iter(first.items()))
        raise _refusal(what, _difference(*pair, 0.0), cure)
    moved = {a.target: state[a.target] for s in plan.stages for a in s.parameters}

    def once_more() -> dict[str, _Pair]:
        pairs: dict[str, _Pair] = {}

        def keep_those(what: str, here: Tensor, there: Tensor) -> None:
            if what in first:
                pairs[what] = here, there

        run_both(keep_those)
        return pairs

    nearby = _nearby(once_more, moved, narrow)
    found: list[tuple[str, str]] = []
    close = True
    for what, pair in first.items():
        every = [pair, *(other[what] for other in nearby)]
        noise = max(_apart(there, pair[1]) for _, there in every)
        bound = max(_allowed(narrow, pair[1]), _NOISE * noise)
        if all(_difference(*each, bound) for each in every):
            found.append((what, _difference(*pair, bound)))
            close &= not all(_difference(*each, _CLOSE * bound, _FEW) for each in every)
    if found:
        raise _doubt(*found[0]) if close else _refusal(*found[0], cure)


_Pair = tuple[Tensor, Tensor]
"""What the plan computes, and what the model computes."""


def _buffer(name: str) -> str:
    return f"what is written to the buffer {name!r}"


def _narrowest(traced: Traced, plan: Plan) -> torch.dtype | None:
    """The least precise floating-point type that a graph computes in, if any.

    Under autocast, that of its operations inside, whatever its inputs and outputs are. The plan may
    round to it in other places than the model: libraries do so less often.
    """
    graphs = [traced.graph]
    for stage in plan.stages:
        if isinstance(stage.kernel, GraphKernel):
            both = stage.kernel.forward_graph, stage.kernel.backward_graph
            graphs += [module.graph for module in both if module is not None]
    nodes = [node for graph in graphs for node in graph.nodes]
    values = pytree.tree_leaves([node.meta.get("val") for node in nodes])
    dtypes = {value.dtype for value in values if isinstance(value, Tensor)}
    dtypes |= {dtype for node in nodes for _, dtype in node.meta.get(AUTOCAST, ())}
    return max(dtypes & _RELATIVE.keys(), key=_RELATIVE.__getitem__, default=None)


def _nearby(
    run: Callable[[], dict[str, _Pair]], weights: Mapping[str, Tensor], narrow: torch.dtype | None
) -> list[dict[str, _Pair]]:
    """What the model and the plan compute at three other sets of weights, moved by as much as sums
    round.

    They show how large rounding errors are: the gradient of a bias before a BatchNorm, for example,
    is nothing else. And behind many BatchNorms, rounding decides on which side of zero a ReLU sees
    a number. At most of the other weights, the model and the plan then agree; a wrong trace is
    wrong at all of them.
    """
    nearby = []
    kept = {
        name: weight.detach().to("cpu", copy=True)
        for name, weight in weights.items()
        if weight.is_floating_point()
    }
    try:
        for times in (1, 3, 7):
            for name, weight in kept.items():
                signs = ((pattern(weight) * times).frac() < 0.5).to(weight) * 2 - 1
                off = _ROUNDING * torch.finfo(weight.dtype).eps
                off = max(off, torch.finfo(narrow).eps if narrow else 0.0)
                weights[name].detach().copy_(weight * (1 + signs * off))
            nearby.append(run())
    finally:
        for name, weight in kept.items():
            weights[name].detach().copy_(weight)
    return nearby


def _buffers(state: Mapping[str, Tensor], written: Collection[str]) -> dict[str, Tensor]:
    """The buffers, each once: under the name by which a graph writes it, or its first."""
    names: dict[int, str] = {}
    for name in (*sorted(written), *state):
        if not isinstance(state[name], nn.Parameter):
            names.setdefault(id(state[name]), name)
    return {name: state[name] for name in names.values()}


def _refusal(what: str, difference: str, cure: str) -> TraceError:
    return TraceError(
        "the traced graph does not compute what the model computes: "
        f"{what}: {difference}; some operation, such as an autograd function of its own, is "
        f"not seen by the tracer: {cure}. Or the loss reads a value that the model keeps elsewhere "
        "than in its output, as a forward hook does: return that value beside the output. Or the "
        "model's code depends on something that each run changes, such as a counter"
    )


def _doubt(what: str, difference: str) -> CloseError:
    return CloseError(
        f"the traced graph and the model differ by more than rounding should: {what}: "
        f"{difference}; to tell rounding from a wrong graph, compile model.double() with inputs in "
        "float64 and without autocast, where only a wrong graph is refused"
    )


def _allowed(narrow: torch.dtype | None, there: Tensor) -> float:
    """By how much what was computed in types no less precise than ``narrow`` may differ from what
    the model computes, ``there``."""
    relative = max(_RELATIVE.get(x, 1e-3) for x in (there.dtype, narrow) if x)
    return relative * max(_greatest(there), 1e-6)


def _apart(here: Tensor, there: Tensor) -> float:
    """How far two tensors differ; 0 if that is no number, as for other shapes, or whole numbers."""
    if here.shape != there.shape or not _rounds(here):
        return 0.0
    return _greatest(here.detach() - there.detach())


def _rounds(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _difference(here: Tensor, there: Tensor, allowed: float, few: float = 0.0) -> str:
    """How two tensors differ if it is by more than allowed, or in more than a part of ``few`` whole
    numbers; an empty string if they agree."""
    here, there = here.detach().to(there.device), there.detach()
    if here.shape != there.shape or here.dtype != there.dtype:
        return f"{tuple(here.shape)} {here.dtype}, not {tuple(there.shape)} {there.dtype}"
    if not _rounds(here):
        count = int((here != there).sum())
        return f"{count} of its entries differ" if count > few * here.numel() else ""
    pairs = zip(_parts(here), _parts(there), strict=True)
    if all(_extent(a - b) <= allowed for a, b in pairs):
        return ""
    if torch.allclose(here, there, rtol=0.0, atol=allowed, equal_nan=True):
        return ""
    return f"it differs by {float((here - there).abs().max()):.3g}, scale {_greatest(there):.3g}"


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """A tensor in parts whose differences stay in the cache, each of some rows; none if it is
    empty."""
    if not tensor.numel():
        return ()
    rows = tensor if tensor.dim() else tensor[None]
    parts: Sequence[Tensor] = rows.split(max(1, _CACHED * len(rows) // rows.numel()))
    return parts


def _greatest(tensor: Tensor) -> float:
    """The greatest absolute value among the finite entries."""
    if not _rounds(tensor):
        return 0.0
    tensor = tensor.detach()
    if tensor.numel() and math.isfinite(size := _extent(tensor)):
        return size
    sizes = tensor.abs()
    sizes = sizes.float() if sizes.element_size() < 4 else sizes
    return float(sizes.nan_to_num_(0.0, 0.0, 0.0).amax()) if tensor.numel() else 0.0


def _extent(tensor: Tensor) -> float:
    """The greatest absolute value among all entries, of which there is one; it reads them once."""
    if tensor.is_complex():
        return float(tensor.abs().amax())
    least, most = torch.aminmax(tensor)
    return max(abs(float(least)), abs(float(most)))

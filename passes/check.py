"""Check that what was compiled computes what the model computes, on an example.

A wrong trace that goes unnoticed is the worst fault that a compiler of models can have, so the
finished kernels, not an intermediate form, are held against the model itself: every output, the
buffers, and the gradient of every parameter. Random operations draw a fixed pattern in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.edge import HOST
from fxpipe.errors import TraceError
from fxpipe.plan import Plan
from fxpipe.serial import run_serially
from fxpipe.traced import Traced, Value

_RELATIVE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""By how much of the greatest entry two runs of the same operations may differ; a wrong trace
differs by far more."""


def check(
    traced: Traced,
    plan: Plan,
    values: Mapping[str, Any],
    state: Mapping[str, Tensor],
    call: Callable[[], tuple[Any, Tensor | None]],
    differentiated: bool,
) -> None:
    """Compare a differentiated plan with the model.

    Args:
        traced: the graph that the plan was cut from.
        plan: the plan with its kernels.
        values: the inputs of one micro-batch, by name.
        state: name in the model → parameter, buffer or constant.
        call: runs the model, and the loss if there is one → its output and the loss or None.
            The caller puts the model's state back.
        differentiated: whether gradients are compared as well.

    Raises:
        TraceError: they differ; names the output or parameter.
    """
    draws = traced.seeded or traced.leaves
    written = {write.target: state[write.target] for stage in plan.stages for write in stage.writes}
    before = {name: tensor.clone() for name, tensor in written.items()}
    with FixedDraws() if draws else nullcontext():  # type: ignore[no-untyped-call]
        with torch.enable_grad() if differentiated else torch.no_grad():
            output, loss = call()
        expected = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        names = [out.name for out in traced.outputs if isinstance(out, Value)]
        seeds: dict[str, Tensor] = {}
        theirs: dict[str, Tensor] = {}
        if differentiated:
            seeds, theirs = _gradients(plan, state, names, expected, traced.loss, loss)
        with torch.no_grad():
            ran = run_serially(plan, values, {**state, **before}, seeds)
    made = {**values, **{a.name: state[a.target] for a in traced.parameters}, **ran.values}
    tensors = [made[name] for name in names if isinstance(made.get(name), Tensor)]
    if len(tensors) == len(expected):
        for name, here, there in zip(names, tensors, expected, strict=False):
            _compare(f"output {name!r}", here, there)
    if loss is not None and traced.loss is not None:
        _compare("the loss", made[traced.loss], loss)
    for name, there in written.items():
        _compare(f"what is written to the buffer {name!r}", ran.state[name], there)
    for name, there in theirs.items():
        here = ran.gradients.get(name)
        _compare(
            f"the gradient of {name!r}",
            here if here is not None else torch.zeros_like(there),
            there,
        )


def _gradients(
    plan: Plan,
    state: Mapping[str, Tensor],
    names: Sequence[str],
    outputs: Sequence[Tensor],
    loss_name: str | None,
    loss: Tensor | None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients to start from, and the model's own for every parameter."""
    roots = {loss_name: loss} if loss is not None else dict(zip(names, outputs, strict=False))
    back = {edge.value for edge in plan.edges if edge.gradient and edge.target == HOST}
    started = {name: value for name, value in roots.items() if name in back and value is not None}
    seeds = {str(name): _pattern(value).to(value) + 0.5 for name, value in started.items()}
    trained = {
        argument.target: state[argument.target]
        for stage in plan.stages
        for argument in stage.parameters
        if state[argument.target].requires_grad
    }
    if not started or not trained:
        return seeds, {}
    parameters = list(trained.values())
    try:
        found = torch.autograd.grad(
            list(started.values()), parameters, list(seeds.values()), allow_unused=True
        )
    except RuntimeError as error:
        line = str(error).splitlines()[0]
        raise TraceError(
            f"the model's own backward fails without any pipeline ({line}); mend the model first"
        ) from error
    return seeds, {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(trained.items(), found, strict=True)
    }


def _compare(what: str, here: Tensor, there: Tensor) -> None:
    here, there = here.detach(), there.detach()
    if here.shape != there.shape or here.dtype != there.dtype:
        difference = f"{tuple(here.shape)} {here.dtype}, not {tuple(there.shape)} {there.dtype}"
    elif here.is_floating_point() or here.is_complex():
        scale = float(torch.nan_to_num(there.abs().double()).amax()) if there.numel() else 0.0
        bound = _RELATIVE.get(there.dtype, 1e-3) * max(scale, 1e-6)
        if torch.allclose(here, there, rtol=0.0, atol=bound, equal_nan=True):
            return
        difference = f"it differs by {float((here - there).abs().max()):.3g}, scale {scale:.3g}"
    else:
        if torch.equal(here, there):
            return
        difference = "its entries differ"
    raise TraceError(
        f"the traced graph does not compute what the model computes: {what}: {difference}; some "
        "operation, such as an autograd function of its own, is not seen by the tracer: use "
        'tracer="symbolic", which calls modules as they are'
    )


def _pattern(like: Tensor) -> Tensor:
    """Numbers in [0, 1) that depend on the place alone: the fractions of multiples of φ."""
    places = torch.arange(like.numel(), dtype=torch.float64, device=like.device)
    return ((places + 1) * 0.6180339887498949).frac().reshape(like.shape)


class FixedDraws(TorchDispatchMode):
    """Inside, every random operation draws the same fixed pattern, whoever calls it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2].rstrip("_")
        if name == "native_dropout" and args[2] is not False and 0 < args[1] < 1:
            mask = _pattern(args[0]) < 1 - args[1]
            return args[0] * mask * (1 / (1 - args[1])), mask
        if torch.Tag.nondeterministic_seeded in func.tags or func.namespace == "fxpipe":
            draw = _DRAWS.get(name)
            if draw is not None:
                out = func(*args, **kwargs)
                numbers = draw(_pattern(out), func, args, kwargs)
                return out.copy_(numbers) if not out.requires_grad else numbers.to(out)
        return func(*args, **kwargs)


def _given(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            if place < len(args):
                return args[place]
            return kwargs.get(name, argument.default_value)
    return None


def _less(numbers: Tensor, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    chance = _given(func, args, kwargs, "p")
    chances: Tensor | float = args[0].detach() if chance is None else chance
    return numbers < chances


def _between(numbers: Tensor, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    low = _given(func, args, kwargs, "from") or 0.0
    high = _given(func, args, kwargs, "to")
    return numbers * ((1.0 if high is None else high) - low) + low


def _centred(numbers: Tensor, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    mean, std = _given(func, args, kwargs, "mean"), _given(func, args, kwargs, "std")
    return (numbers * 2 - 1) * (1.0 if std is None else std) + (mean or 0.0)


def _whole(numbers: Tensor, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    low = _given(func, args, kwargs, "low") or 0
    high = _given(func, args, kwargs, "high")
    whole: Tensor = (numbers * (high - low)).floor() + low
    return whole


def _reversed(numbers: Tensor, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    return torch.arange(numbers.numel() - 1, -1, -1, device=numbers.device)


_DRAWS: dict[str, Callable[..., Tensor]] = {
    "bernoulli": _less,
    "uniform": _between,
    "rand": _between,
    "rand_like": _between,
    "normal": _centred,
    "randn": _centred,
    "randn_like": _centred,
    "randint": _whole,
    "randint_like": _whole,
    "integers": _whole,
    "randperm": _reversed,
    "permutation": _reversed,
}

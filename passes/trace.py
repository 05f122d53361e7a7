"""Trace a model with ``torch.export``: the front end's first pass, and the default tracer.

before:  class Net(nn.Module): forward(x) = relu_(bn(conv(x)))
after:   ExportedProgram of ATen operations over the very same Parameter objects
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from fxpipe import source
from fxpipe.errors import TraceError

_TORCH_LOG = logging.getLogger("torch.fx.experimental.symbolic_shapes")

_ON_VALUES = (
    "what it computes depends on the values of a tensor",
    "compute it with torch.where or masks",
)
_REASONS = {
    "DataDependent": _ON_VALUES,
    "data-dependent": _ON_VALUES,
    "constraint": (
        "it holds for one size alone",
        "make that line independent of the size, or give inputs of one size",
    ),
}
"""A word of PyTorch's error → what is wrong, and the cure."""


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    batch: int,
    fixed: bool = False,
) -> ExportedProgram:
    """Export the model in its present mode, dynamic in the batch dimension where it can be.

    Args:
        model: any module; its training flags decide what is traced, its state is left alone.
        args: positional inputs of one micro-batch.
        kwargs: keyword inputs of one micro-batch.
        batch: the size of dimension 0 that counts as the batch. A batch of 1 is traced as it is:
            its graph need not hold for another size, nor another graph for it.
        fixed: whether any batch is traced so.

    Raises:
        TraceError: the model cannot be traced; names its source line and the cure.
    """
    failure: Exception | None = None
    if batch > 1 and not fixed:
        try:
            return _export(model, args, kwargs, _dynamic_batch(model, args, kwargs, batch))
        except Exception as error:
            failure = error
    try:
        return _export(model, args, kwargs, None)
    except Exception as error:
        raise _explained(model, error) from (failure or error)


def accepts(
    program: ExportedProgram, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: int
) -> Callable[[int], bool]:
    """A test whether an exported program holds for another batch size.

    Args:
        program: what ``trace`` gave for the other arguments.
    """
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    symbolic = any(
        isinstance(size, torch.SymInt)
        for node in placeholders.values()
        if isinstance(node.meta.get("val"), torch.Tensor)
        for size in node.meta["val"].shape
    )
    if not symbolic:
        return lambda size: size == batch
    # the test is kept, the batch must not be: it needs the inputs' shapes alone
    given = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, dict(kwargs)))
    program.example_inputs = given
    leaves = pytree.tree_leaves(given)
    guards: list[nn.Module | None] = []

    def holds(size: int) -> bool:
        if size < 2:
            return False  # sizes of 1 broadcast: the dynamic graph assumes at least 2
        if not guards:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                guards.append(getattr(program.module(), "_guards_fn", None))
        if guards[0] is None:
            return True
        try:
            guards[0](*(_resized(leaf, batch, size) for leaf in leaves))
        except Exception:
            return False
        return True

    return holds


def _resized(leaf: Any, batch: int, size: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = (size, *leaf.shape[1:]) if leaf.dim() and leaf.shape[0] == batch else leaf.shape
    return torch.empty(shape, dtype=leaf.dtype, device="meta")


def _export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic: dict[str, Any] | None,
) -> ExportedProgram:
    level = _TORCH_LOG.level
    _TORCH_LOG.setLevel(logging.CRITICAL)  # what fails here is told once, by our own error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # notes on attributes that the model itself assigns
            return torch.export.export(
                model, args, dict(kwargs), dynamic_shapes=dynamic, strict=False
            )
    finally:
        _TORCH_LOG.setLevel(level)


def _dynamic_batch(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: int
) -> dict[str, Any]:
    def spec(leaf: Any) -> dict[int, Any] | None:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == batch:
            return {0: Dim.AUTO}
        return None

    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    return {name: pytree.tree_map(spec, value) for name, value in bound.items()}


def _explained(model: nn.Module, error: Exception) -> TraceError:
    name = model._get_name()
    where = source.of_exception(error) or name
    text = str(error).strip().splitlines()
    summary = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    reason, cure = next(
        (known for word, known in _REASONS.items() if word in f"{type(error).__name__} {error}"),
        (
            summary[:300],
            'rewrite that line, or give compile(..., tracer="symbolic"), which calls modules of '
            "torch.nn as they are",
        ),
    )
    return TraceError(f"{name} cannot be traced at {where} ({reason}); {cure}")

"""Explain why a model cannot be traced: the user's line, what is wrong there, and the way out."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence

import torch
from torch import nn

from fxpipe.errors import TraceError, told, way_out
from fxpipe.torchtools import source

aten = torch.ops.aten

_VALUES = "compute it with torch.where or masks"
_BEYOND_TORCH = "compute it with PyTorch's own operations"
_CONSTRUCTS: Sequence[tuple[str, str, str]] = (
    (r"\.item\(|\bfloat\(|\bint\(|\bbool\(", "a number read from a tensor's values", _VALUES),
    (r"\.tolist\(", "numbers read from a tensor's values", _VALUES),
    (r"\.numpy\(|\bnp\.|\bnumpy\.", "a NumPy array made of a tensor", _BEYOND_TORCH),
    (r"\bwhile\b", "a loop whose length depends on a tensor's values", _VALUES),
    (r"\bif\b|\bassert\b|\band\b|\bor\b|\bnot\b", "a branch on the values of a tensor", _VALUES),
    (r"\bfor\b", "a loop over the values of a tensor", _VALUES),
    (
        r"\[.*\]|nonzero|masked_select|unique|bincount",
        "a shape that depends on a tensor's values",
        _VALUES,
    ),
)
"""Pattern of a line whose outcome depends on values → what it is called, and the cure."""

_ON_VALUES = (
    "DataDependent",
    "data-dependent",
    "DynamicOutputShape",
    "cannot be used as inputs to control flow",
)
_OUTSIDE = (".numpy()", "np.ndarray")


class BackwardError(Exception):
    """A capture has failed in the backward of some submodules.

    Attributes:
        error: with this error.
        submodules: their names, outermost first.
    """

    def __init__(self, error: Exception, submodules: Sequence[str]) -> None:
        super().__init__(told(error))
        self.error, self.submodules = error, submodules


def untraceable(model: nn.Module, error: Exception) -> TraceError:
    """Return a TraceError that explains the exception of a tracer."""
    if isinstance(error, TraceError):
        return error
    around: Sequence[str] = ()
    if isinstance(error, BackwardError):
        around, error = error.submodules, error.error
    where = source.of_exception(error)
    whole = told(error)
    summary = whole.splitlines()[0]
    if on_values(error):
        construct, cure = _construct(where)
        reason = f"{construct}: what it computes depends on the values of a tensor"
    elif any(word in whole for word in _OUTSIDE):
        construct, cure = _construct(where)
        reason = f"{construct}: {summary[:200]}"
    elif "mutating a non-functional tensor" in whole:
        reason = "it writes into a tensor that is no buffer of the model"
        cure = "register it (register_buffer), and write the buffer in place"
    else:
        reason, cure = summary[:300], "rewrite that line"
    return _error(model, where, reason, cure, around or called(model, error))


def on_values(error: Exception) -> bool:
    """Whether a tracer has failed as what the model computes depends on the values of a tensor."""
    return any(word in told(error) for word in _ON_VALUES)


def called(model: nn.Module, error: BaseException) -> list[str]:
    """The submodules that were being called when an exception was raised, outermost first."""
    names = {id(vars(module)): name for name, module in model.named_modules()}
    calls = [
        names.get(id(vars(frame.f_locals["self"])), "")
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code is nn.Module._call_impl.__code__
    ]
    return [name for name in calls if name]


def _error(
    model: nn.Module, where: str, reason: str, cure: str, submodules: Sequence[str]
) -> TraceError:
    name = model._get_name()
    where = f"{where or name} ({reason})"
    out = way_out(submodules[-1] if submodules else "")
    return TraceError(f"{name} cannot be traced at {where}; {cure}, or {out}", where, submodules)


def _construct(where: str) -> tuple[str, str]:
    """What cannot be traced in a line, and what to do instead."""
    code = where.partition(": ")[2]
    for pattern, construct, cure in _CONSTRUCTS:
        if re.search(pattern, code):
            return construct, cure
    return "control flow that depends on data", _VALUES

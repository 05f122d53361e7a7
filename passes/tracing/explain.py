"""Explain why a model cannot be traced: the user's line, what is wrong there, and the way out."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from torch import nn

from fxpipe.errors import TraceError, told, way_out
from fxpipe.torchtools import source

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
    if any(word in whole for word in _ON_VALUES):
        reason = "what it computes depends on the values of a tensor"
        cure = "compute it with torch.where or masks"
    elif any(word in whole for word in _OUTSIDE):
        reason = f"it makes a NumPy array of a tensor: {summary[:200]}"
        cure = "compute it with PyTorch's own operations"
    elif "mutating a non-functional tensor" in whole:
        reason = "it writes into a tensor that is no buffer of the model"
        cure = "register it (register_buffer), and write the buffer in place"
    else:
        reason, cure = summary[:300], "rewrite that line"
    around = around or called(model, error)
    name = model._get_name()
    where = f"{where or name} ({reason})"
    out = way_out(around[-1] if around else "")
    return TraceError(f"{name} cannot be traced at {where}; {cure}, or {out}", where, around)


def called(model: nn.Module, error: BaseException) -> list[str]:
    """The submodules that were being called when an exception was raised, outermost first."""
    names = {id(vars(module)): name for name, module in model.named_modules()}
    calls = [
        names.get(id(vars(frame.f_locals["self"])), "")
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code is nn.Module._call_impl.__code__
    ]
    return [name for name in calls if name]

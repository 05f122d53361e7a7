"""Find the line of the user's own code that a node or an error comes from."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OperatorBase

from fxpipe.errors import FxpipeError, InputError, told

_TORCH = str(Path(torch.__file__).parent) + os.sep
_FXPIPE = Path(__file__).parents[1]
_OURS = tuple(
    str(path) + os.sep
    for path in (_FXPIPE, (_FXPIPE / "passes").resolve(), (_FXPIPE / "schedules").resolve())
)
_CONTEXTS = contextlib.__file__
# file names that Python, IPython, doctest and the code module give to code without a file
_TYPED = ("<stdin", "<python-input", "<ipython", "<doctest", "<console")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


@cache
def is_users(filename: str) -> bool:
    """Whether a file belongs to the user: not to PyTorch, not to this library, not generated."""
    if filename.startswith("<"):
        return filename.startswith(_TYPED)
    return not filename.startswith((_TORCH, _CONTEXTS, *_OURS))


def users_level() -> int:
    """The number of frames up from the caller to the user's own code, for ``warnings.warn``."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def of_node(node: fx.Node) -> str:
    """The line of the model that made a node, as ``file:line, in function: code``, or ""."""
    frames = [
        (match["file"], int(match["line"]), match["function"])
        for match in _FRAME.finditer(node.meta.get("stack_trace") or "")
    ]
    return _innermost(frames)


def module_paths(node: fx.Node) -> list[str]:
    """The submodules that a node belongs to, outermost first, without the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    return [path for path, _ in stack.values() if path]


def credit(graph: fx.Graph, function: Callable[..., Any]) -> None:
    """Give the line of a function to each node of a graph without a line of the user's code."""
    function = function.forward if isinstance(function, nn.Module) else function
    code = getattr(function, "__code__", None)
    if code is None or not is_users(code.co_filename):
        return
    frame = f'  File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}\n'
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and not of_node(node):
            node.meta["stack_trace"] = (node.meta.get("stack_trace") or "") + "\n" + frame


def of_exception(error: BaseException) -> str:
    """The innermost line of the user's own code in an exception's traceback, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    return _innermost([(frame.filename, frame.lineno or 0, frame.name) for frame in frames])


def _innermost(frames: list[tuple[str, int, str]]) -> str:
    for filename, line, function in reversed(frames):
        if is_users(filename):
            code = linecache.getline(filename, line).strip()
            return f"{filename}:{line}, in {function}" + (f": {code}" if code else "")
    return ""


def lacks_memory(cause: BaseException) -> bool:
    """Whether an error says that a device or the CPU has run out of memory."""
    return isinstance(cause, torch.OutOfMemoryError | MemoryError) or (
        isinstance(cause, RuntimeError) and "DefaultCPUAllocator: can't allocate" in told(cause)
    )


class Lack(MemoryError):
    """A device has no memory for a tensor that is to be on it."""

    def __init__(self, device: torch.device, error: BaseException) -> None:
        super().__init__(told(error))
        self.device = device


@contextlib.contextmanager
def bringing_to(device: torch.device) -> Iterator[None]:
    """Inside, where a tensor goes to a device, a lack of memory is raised as one of the device."""
    try:
        yield
    except Exception as error:
        if isinstance(error, Lack) or not lacks_memory(error):
            raise
        raise Lack(device, error) from error


@contextlib.contextmanager
def refusing_failures(what: str = "the model", gradients: bool = True) -> Iterator[None]:
    """Raise InputError, with the line of the model, for an error inside the block.

    The model has run before, so that it must be because there are gradients now, or because there
    are none, unless memory ran out.
    """
    try:
        yield
    except FxpipeError:
        raise
    except Exception as error:
        if lacks_memory(error):
            raise
        raise InputError(
            "the model fails on the first micro-batch "
            f"{'with gradients enabled' if gradients else 'without gradients'}, at "
            f"{of_exception(error) or what} ({told(error).splitlines()[0]}); correct that line"
        ) from error


def called_by_ours(tb: TracebackType | None) -> TracebackType | None:
    """Cut a traceback so that it starts at the first line of the user's own code. If there is none,
    it starts where this library calls PyTorch; if it does not, return all of it."""
    first, below = None, tb
    while below is not None:
        file = below.tb_frame.f_code.co_filename
        if not file.startswith((*_OURS, _CONTEXTS)):
            if is_users(file):
                return below
            first = first or below
        below = below.tb_next
    return first or tb


def of_frame(frame: FrameType, line: int) -> str:
    """A frame's line, in the form of ``of_node``; "" if it is not the user's own code."""
    return _innermost([(frame.f_code.co_filename, line, frame.f_code.co_name)])


def of_failure(error: BaseException) -> str:
    """The line of the model that an instruction's exception comes from, or "".

    This is the line that made the failing node, or a line inside the module that it calls.
    """
    frames = [*traceback.walk_tb(error.__traceback__)]
    for at, (frame, line) in enumerate(frames):
        module = frame.f_locals.get("self")
        if isinstance(module, fx.GraphModule) and frame.f_code.co_filename.startswith("<"):
            name = linecache.getline(frame.f_code.co_filename, line).split("=")[0].strip()
            node = next((node for node in module.graph.nodes if node.name == name), None)
            if node is not None and isinstance(node.target, OperatorBase):
                return of_node(node)  # the line that calls it, not one inside a custom operator
            if node is not None:
                inside = [(f.f_code.co_filename, n, f.f_code.co_name) for f, n in frames[at + 1 :]]
                return _innermost(inside) or of_node(node)
    return of_exception(error)

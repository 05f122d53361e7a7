"""Find, and keep, the line of the user's own code that a node or an error comes from."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import fx, nn

from fxpipe.errors import FxpipeError, InputError, told

_TORCH = str(Path(torch.__file__).parent) + os.sep
_FXPIPE = Path(__file__).parents[1]
_OURS = tuple(
    str(path) + os.sep
    for path in (_FXPIPE, (_FXPIPE / "passes").resolve(), (_FXPIPE / "schedules").resolve())
)
_CONTEXTS = contextlib.__file__
# what Python, IPython, doctest and the code module call code that has no file
_TYPED = ("<stdin", "<python-input", "<ipython", "<doctest", "<console")
# by what PyTorch calls a mode that watches operations, and that an operation
_ENTRIES = tuple(str(Path(_TORCH, part)) for part in ("_compile.py", "_dynamo"))
_EXITS = str(Path(_TORCH, "_ops.py"))
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def is_users(filename: str) -> bool:
    """Whether a file is the user's own: neither PyTorch's, nor this library's, nor generated."""
    if filename.startswith("<"):
        return filename.startswith(_TYPED)
    return not filename.startswith((_TORCH, *_OURS))


def users_level() -> int:
    """How many frames up from the caller the user's own code is, as ``warnings.warn`` counts."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def of_node(node: fx.Node) -> str:
    """The model's line that made a graph's node, as ``file:line, in function: code``, or ""."""
    frames = [
        (match["file"], int(match["line"]), match["function"])
        for match in _FRAME.finditer(node.meta.get("stack_trace") or "")
    ]
    return _innermost(frames)


def credit(graph: fx.Graph, function: Callable[..., Any]) -> None:
    """Give each node of a graph that has no line of the user's own code the line of a function."""
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
    """Whether an allocator, of a CUDA device or of the CPU, found no memory."""
    return isinstance(cause, torch.OutOfMemoryError | MemoryError) or (
        isinstance(cause, RuntimeError) and "DefaultCPUAllocator: can't allocate" in told(cause)
    )


@contextlib.contextmanager
def refusing_failures(what: str = "the model") -> Iterator[None]:
    """Raises InputError with the line where the model fails inside.

    It has run without gradients by then, so that they must be what it fails with, unless memory
    ran out.
    """
    try:
        yield
    except FxpipeError:
        raise
    except Exception as error:
        if lacks_memory(error):
            raise
        raise InputError(
            f"the model fails on the first micro-batch where gradients are wanted, at "
            f"{of_exception(error) or what} ({told(error).splitlines()[0]}); correct that line"
        ) from error


def called_by_ours(tb: TracebackType | None) -> TracebackType | None:
    """A traceback from the first line of the user's own code; where there is none, from where this
    library calls PyTorch; where it does not, all of it."""
    first, below = None, tb
    while below is not None:
        file = below.tb_frame.f_code.co_filename
        if not file.startswith((*_OURS, _CONTEXTS)):
            if is_users(file):
                return _without_ours(below)
            first = first or below
        below = below.tb_next
    return first or tb


def _without_ours(tb: TracebackType) -> TracebackType:
    """The rest of a traceback without the modes of this library that watch operations, and without
    what PyTorch calls these by, and they an operation."""
    kept: list[TracebackType] = []
    below: TracebackType | None = tb
    inside = False
    while below is not None:
        file = below.tb_frame.f_code.co_filename
        inside = file.startswith(_OURS) or (inside and file.startswith(_EXITS))
        if not inside:
            kept.append(below)
        while inside and kept and kept[-1].tb_frame.f_code.co_filename.startswith(_ENTRIES):
            kept.pop()
        below = below.tb_next
    made = None
    for each in reversed(kept):
        made = TracebackType(made, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return made or tb


def of_frame(frame: FrameType, line: int) -> str:
    """A line of the user's own code in the same form."""
    return _innermost([(frame.f_code.co_filename, line, frame.f_code.co_name)])


def of_failure(error: BaseException) -> str:
    """The model's line that an exception of an instruction comes from, or "".

    This is the line that made the failing node of the graph. If the node calls a leaf module, it is
    the line inside of that module.
    """
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, fx.GraphModule) and frame.f_code.co_filename.startswith("<"):
            name = linecache.getline(frame.f_code.co_filename, line).split("=")[0].strip()
            node = next((node for node in module.graph.nodes if node.name == name), None)
            if node is not None and node.op != "call_module":
                return of_node(node)
            if node is not None:
                return of_exception(error) or of_node(node)
    return of_exception(error)

"""Where in the user's own code something comes from, for messages."""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path
from types import TracebackType

import torch
from torch import fx

_TORCH = str(Path(torch.__file__).parent)
_OURS = tuple(
    str(path)
    for base in (Path(__file__).parent,)
    for path in (base, (base / "passes").resolve(), (base / "schedules").resolve())
)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def is_users(filename: str) -> bool:
    """Whether a file is the user's own: neither PyTorch's, nor this library's, nor generated."""
    if filename.startswith("<") and not filename.startswith(("<stdin", "<ipython")):
        return False
    return not (filename.startswith(_TORCH) or filename.startswith(_OURS))


def of_node(node: fx.Node) -> str:
    """``file:line, in function: code`` of the model's line that made a graph's node, or ""."""
    frames = [
        (match["file"], int(match["line"]), match["function"])
        for match in _FRAME.finditer(node.meta.get("stack_trace") or "")
    ]
    return _innermost(frames)


def of_exception(error: BaseException) -> str:
    """The user's innermost line on the way to an exception, or ""."""
    return of_traceback(error.__traceback__)


def of_traceback(tb: TracebackType | None) -> str:
    """The user's innermost line of a traceback, or ""."""
    return _innermost(
        [(frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(tb)]
    )


def _innermost(frames: list[tuple[str, int, str]]) -> str:
    for filename, line, function in reversed(frames):
        if is_users(filename):
            code = linecache.getline(filename, line).strip()
            return f"{filename}:{line}, in {function}" + (f": {code}" if code else "")
    return ""


def of_failure(error: BaseException) -> str:
    """The model's line for an exception that a stage's graph raised, or ""."""
    users = of_exception(error)
    if users:
        return users
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = frame.f_locals.get("self")
        if isinstance(module, fx.GraphModule) and not is_users(frame.f_code.co_filename):
            name = linecache.getline(frame.f_code.co_filename, line).split("=")[0].strip()
            node = next((node for node in module.graph.nodes if node.name == name), None)
            if node is not None:
                return of_node(node)
    return ""

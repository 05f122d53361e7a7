"""Refuse models that change Python state while they run: attributes, random generators.

A graph computes tensors from tensors. A counter or a list would silently stay for ever what it was
when the model was traced.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn

from fxpipe.errors import TraceError, way_out
from fxpipe.passes.tracing.leaf_calls import called_instead
from fxpipe.random.leaf_draws import other_states, put_back_others
from fxpipe.torchtools import source

_OWN = frozenset(vars(nn.Module()))
"""The attributes that every module has."""


def refuse_changes(
    model: nn.Module, leaves: Mapping[str, nn.Module], run: Callable[[], Any]
) -> Any:
    """Run a model, and check that it changes nothing that a graph cannot hold.

    An attribute that the first run sets and the second run leaves alone, such as a table that is
    made when it is first needed, does not count as changed.

    Args:
        model: the model.
        leaves: its leaf modules, which may change what they like; what they draw is undone.
        run: runs the model.

    Returns:
        What ``run`` returns.

    Raises:
        TraceError: it changes an attribute, or draws from Python's or NumPy's random generator;
            names the line, and in the latter case the submodules around it.
    """
    drawn = _Drawn(leaves, run)
    run = drawn.run
    own = [
        (name, module)
        for name, module in model.named_modules()
        if not any(name == leaf or name.startswith(f"{leaf}.") for leaf in leaves)
    ]
    watched: list[_Attribute | _Generator] = [
        *_attributes(own),
        *(_Generator(name, drawn) for name in other_states()),
    ]
    before = [each.look() for each in watched]
    names = {(each.module, each.name) for each in watched}
    output = run()
    late = [each for each in _attributes(own) if (each.module, each.name) not in names]
    pairs = zip(watched, before, strict=True)
    changed = [*(each for each, old in pairs if not _same(each.look(), old)), *late]
    if not changed:
        return output
    between = [each.look() for each in changed]
    run()
    for each, old in zip(changed, between, strict=True):
        if not _same(each.look(), old):
            line, around = _line_that_changes(each, model, run)
            for other, value in zip(watched, before, strict=True):
                other.put_back(value)
            where = f"{line or each.owner} ({each.construct})"
            raise TraceError(
                f"{type(model).__name__} cannot be traced at {where}; {each.cure}",
                where,
                around if isinstance(each, _Generator) else (),
            )
    return output


class _Drawn:
    """Runs a model so that its leaf modules change no generator but PyTorch's."""

    def __init__(self, leaves: Mapping[str, nn.Module], run: Callable[[], Any]) -> None:
        self._leaves = leaves
        self._run = run
        self._entered: list[dict[str, bytes]] = []

    def run(self) -> Any:
        with called_instead(self._leaves, self._call):
            return self._run()

    def state(self, name: str) -> bytes:
        """That of a generator; within a leaf module what it was before."""
        return (self._entered[0] if self._entered else other_states())[name]

    def _call(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._entered.append(other_states())
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            put_back_others(self._entered.pop())


@dataclass(frozen=True)
class _Attribute:
    """An attribute of a module that is neither a parameter nor a buffer nor a submodule."""

    module: str
    owner: str
    values: dict[str, Any]
    name: str

    @property
    def construct(self) -> str:
        return (
            f"a mutation of Python state: every call changes {self.owner}.{self.name}, which in a "
            "graph would stay as it is"
        )

    @property
    def cure(self) -> str:
        return (
            f"keep {self.name} in a buffer (register_buffer) that is written in place, or "
            f"{way_out(self.module)}"
        )

    def look(self) -> Any:
        value = self.values.get(self.name, _Missing)
        if isinstance(value, list | set):
            return (value, type(value)(value))
        if isinstance(value, dict):
            return (value, dict(value))
        return (value, value)

    def put_back(self, old: Any) -> None:
        value, content = old
        if isinstance(value, list):
            value[:] = content
        elif isinstance(value, set | dict):
            value.clear()
            value.update(content)
        self.values[self.name] = value


class _Missing:
    """Stands for the value of an attribute that does not exist."""


@dataclass(frozen=True)
class _Generator:
    """A random generator that is not PyTorch's."""

    name: str
    drawn: _Drawn
    module: str = ""
    owner: str = "the model"
    cure: str = f"draw with torch.rand, and choose with torch.where, or {way_out('')}"

    @property
    def construct(self) -> str:
        return f"the trace would not be deterministic: it draws from {self.name}"

    def look(self) -> Any:
        state = self.drawn.state(self.name)
        return state, state

    def put_back(self, old: Any) -> None:
        put_back_others({self.name: old[0]})


def _attributes(modules: list[tuple[str, nn.Module]]) -> list[_Attribute]:
    return [
        _Attribute(path, type(module).__name__, vars(module), name)
        for path, module in modules
        if not type(module).__module__.startswith("torch.nn.")
        for name in vars(module)
        if name not in _OWN
    ]


def _same(new: Any, old: Any) -> bool:
    """Whether an attribute is as it was; tensors and other objects are compared by identity."""
    (value, content), (before, content_before) = new, old
    if isinstance(value, dict):
        content, content_before = tuple(content.items()), tuple(content_before.items())
    elif isinstance(value, list):
        content, content_before = tuple(content), tuple(content_before)
    elif isinstance(value, set):
        return value is before and bool(content == content_before)
    else:
        return _equal(value, before)
    return value is before and _equal(content, content_before)


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    plain = isinstance(a, int | float | complex | str | bytes)
    return plain and type(a) is type(b) and bool(a == b)


def _line_that_changes(
    watched: _Attribute | _Generator, model: nn.Module, run: Callable[[], Any]
) -> tuple[str, list[str]]:
    """The user's line that changes an attribute or a generator, and the submodules that were being
    called there, outermost first; found by one more run."""
    before = watched.look()
    names = {id(vars(module)): name for name, module in model.named_modules() if name}
    last: list[tuple[FrameType, int]] = []
    found: list[str] = []
    around: list[str] = []

    def take() -> None:
        found.append(source.of_frame(*last[0]))
        frame: FrameType | None = last[0][0]
        while frame is not None:
            if frame.f_code is nn.Module._call_impl.__code__:
                name = names.get(id(vars(frame.f_locals["self"])))
                around[:0] = [] if name is None else [name]
            frame = frame.f_back

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not found and last and not _same(watched.look(), before):
            take()
        file = frame.f_code.co_filename
        if found or not source.is_users(file) or file == random.__file__:
            return None
        if event == "line":
            last[:] = [(frame, frame.f_lineno)]
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(previous)
    if not found and last and not _same(watched.look(), before):
        take()
    last.clear()  # frames hold all that was computed in them
    return "".join(found), around

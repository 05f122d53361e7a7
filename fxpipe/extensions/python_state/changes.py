"""Refuse models that change Python state while they run: attributes or random generators.

A graph computes tensors from tensors. A counter or a list would silently keep the value that it had
when the model was traced. Buffers that a model makes in its first run are no part of what is put
back after a trial run, so that running it must not change them further.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import TraceError, way_out
from fxpipe.random.others import other_states, put_back_others
from fxpipe.torchtools import source
from fxpipe.torchtools.state import called_instead

_OWN = frozenset(vars(nn.Module()))
"""The attributes that every module has."""
_MISSING = object()

Key = tuple[str | None, str]
"""A module and its attribute, by their names; None and the name of a random generator."""


@dataclass(frozen=True, eq=False)
class _Values:
    """The values of a buffer. They are compared up to rounding."""

    tensor: Tensor

    def same_as(self, other: _Values) -> bool:
        a, b = self.tensor, other.tensor
        alike = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        if not alike or a.is_meta or a.layout is not torch.strided:
            return alike
        return torch.allclose(a, b, rtol=1e-3, atol=1e-6, equal_nan=True)


def refuse_changes(
    model: nn.Module, leaves: Mapping[str, nn.Module], run: Callable[[], Any]
) -> Any:
    """Run a model, and check that it changes nothing that a graph cannot hold; returns the result
    of ``run``. Leaf modules may change anything, and what they draw from generators is undone.

    An attribute that only the first run sets, such as a table that is made when it is first needed,
    does not count as changed. Nor does a buffer that the first run makes, if a second one with the
    same inputs leaves it as it is.

    Raises:
        TraceError: the model changes an attribute, or draws from Python's or NumPy's random
            generator; names the line, and in the latter case the submodules around it.
    """
    watch = _Watch(model, leaves, run)
    before, drawn = watch.look(), torch.get_rng_state()
    output = watch.run()
    after = watch.look(before)
    changed = [key for key, now in after.items() if not _same(now, before.get(key))]
    if not changed:
        return output
    torch.set_rng_state(drawn)
    watch.run()
    for key in changed:
        if not _same(watch.at(key), after[key]):
            line, around = _line_that_changes(key, watch, model)
            owner, construct, cure = watch.told(key)
            watch.put_back(before)
            where = f"{line or owner} ({construct})"
            raise TraceError(
                f"{type(model).__name__} cannot be traced at {where}; {cure}",
                where,
                around if key[0] is None else (),
            )
    return output


class _Watch:
    """Watches Python state while a model runs: Python's and NumPy's random generators, the
    attributes of modules, except for leaf modules and PyTorch's own modules, and the buffers that
    modules do not have yet."""

    def __init__(
        self, model: nn.Module, leaves: Mapping[str, nn.Module], run: Callable[[], Any]
    ) -> None:
        self._modules = {
            path: module
            for path, module in model.named_modules()
            if not any(path == leaf or path.startswith(f"{leaf}.") for leaf in leaves)
            and not type(module).__module__.startswith("torch.nn.")
        }
        self._all = dict(model.named_modules())
        self._filled = {
            (path, name)
            for path, module in self._all.items()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        self._leaves = leaves
        self._run = run
        self._entered: list[dict[str, bytes]] = []

    def run(self) -> Any:
        """Run the model so that its leaf modules change no generator but PyTorch's."""
        with called_instead(self._leaves, self._call):
            return self._run()

    def _call(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._entered.append(other_states())
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            put_back_others(self._entered.pop())

    def look(self, more: Iterable[Key] = ()) -> dict[Key, Any]:
        """All of the state, and that of further keys, which may have been deleted."""
        attributes = (
            (path, name)
            for path, module in self._modules.items()
            for name in vars(module)
            if name not in _OWN
        )
        buffers = (
            (path, name)
            for path, module in self._all.items()
            for name in module._buffers
            if (path, name) not in self._filled
        )
        generators = ((None, name) for name in other_states())
        keys = dict.fromkeys((*attributes, *buffers, *generators, *more))
        return {key: self.at(key) for key in keys}

    def at(self, key: Key) -> tuple[Any, Any]:
        """A value, and a copy of its present content. Within a leaf module, a generator has the
        state that it had before."""
        path, name = key
        if path is None:
            state = (self._entered[0] if self._entered else other_states())[name]
            return state, state
        if self._makes(path, name):
            buffer = self._all[path]._buffers[name]
            return None, buffer if buffer is None else _Values(buffer.detach().clone())
        value = vars(self._all[path]).get(name, _MISSING)
        if isinstance(value, list | dict | deque):
            return value, tuple(value.items() if isinstance(value, dict) else value)
        package = type(value).__module__
        if type(value) is random.Random or package.startswith("numpy.random"):
            return value, pickle.dumps(value)
        if package == "numpy" and hasattr(value, "tobytes"):
            return value, value.tobytes()
        return value, frozenset(value) if isinstance(value, set) else value

    def _makes(self, path: str, name: str) -> bool:
        """Whether the model, not its constructor, gives a buffer its first values."""
        return name in self._all[path]._buffers and (path, name) not in self._filled

    def put_back(self, before: Mapping[Key, Any]) -> None:
        """Give everything the value that it had in an earlier look."""
        for (path, name), (value, content) in before.items():
            if path is None:
                put_back_others({name: value})
                continue
            if self._makes(path, name):
                self._all[path]._buffers[name] = None
                continue
            if isinstance(value, list | deque):
                value.clear()
                value.extend(content)
            elif isinstance(value, set | dict):
                value.clear()
                value.update(content)
            self._all[path].__dict__[name] = value

    def told(self, key: Key) -> tuple[str, str, str]:
        """For a message: the owner of the state, what is wrong with changing it, and what to do."""
        path, name = key
        if path is None:
            return (
                "the model",
                f"the trace would not be deterministic: it draws from {name}",
                f"draw with torch.rand, and choose with torch.where, or {way_out('')}",
            )
        owner = type(self._all[path]).__name__
        if self._makes(path, name):
            return (
                owner,
                f"a buffer that is made by the first call: every call changes {owner}.{name}, also "
                "those that only trace",
                f"let the constructor make it: register_buffer({name!r}, torch.zeros(...)), which "
                "forward writes in place; or run the model once before compile: model(example)",
            )
        returned = ""
        if isinstance(vars(self._all[path]).get(name), Tensor):
            returned = f"return {name} from forward, so that the loss can take it; if it is state, "
        return (
            owner,
            f"a mutation of Python state: every call changes {owner}.{name}, which in a graph "
            "would stay as it is",
            f"{returned}keep {name} in a buffer (register_buffer) that is written in place, or "
            f"{way_out(path)}",
        )


def _same(new: tuple[Any, Any], old: tuple[Any, Any] | None) -> bool:
    """Whether state is as it was; tensors and other objects are compared by identity."""
    if old is None or (isinstance(new[0], list | set | dict | deque) and new[0] is not old[0]):
        return False
    return _equal(new[1], old[1])


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, _Values) and isinstance(b, _Values):
        return a.same_as(b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    plain = isinstance(a, int | float | complex | str | bytes | frozenset)
    return plain and type(a) is type(b) and bool(a == b)


def _line_that_changes(key: Key, watch: _Watch, model: nn.Module) -> tuple[str, list[str]]:
    """Run the model once more to find the user's line that changes an attribute or a generator, and
    the submodules that were being called there, outermost first."""
    before = watch.at(key)
    names = {id(vars(module)): name for name, module in model.named_modules() if name}
    last: list[tuple[FrameType, int]] = []
    lines: list[str] = []
    around: list[str] = []

    def take() -> None:
        lines.append(source.of_frame(*last[0]))
        frame: FrameType | None = last[0][0]
        while frame is not None:
            if frame.f_code is nn.Module._call_impl.__code__:
                name = names.get(id(vars(frame.f_locals["self"])))
                around[:0] = [] if name is None else [name]
            frame = frame.f_back

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not lines and last and not _same(watch.at(key), before):
            take()
        if lines or _users(frame) is not frame:
            return None
        if event == "line":
            last[:] = [(frame, frame.f_lineno)]
        elif event == "return" and (caller := _users(frame.f_back)) is not None:
            last[:] = [(caller, caller.f_lineno)]  # the caller's line continues
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        watch.run()
    finally:
        sys.settrace(previous)
    if not lines and last and not _same(watch.at(key), before):
        take()
    last.clear()  # frames keep alive everything that was computed in them
    return "".join(lines), around


def _users(frame: FrameType | None) -> FrameType | None:
    """The innermost frame from this one outwards that runs the user's own code."""
    while frame is not None:
        file = frame.f_code.co_filename
        if source.is_users(file) and file != random.__file__:
            return frame
        frame = frame.f_back
    return None

"""What the passes make of models that tests compile again and again, remembered in a process.

Tests of what runs compile the same few models hundreds of times. Tracing one, measuring its nodes,
cutting it at given places and writing down its derivatives are functions of the model's structure
and of the batch's, and their results are frozen: inside ``remembering`` the lists of passes in
``LISTS`` run once for each. All else runs every time: the model and its loss as they are, with
their guards; the choice of the cut; the check of the plan against the model; schedules and
programs. Tests of the passes do not use it, nor those that are marked with ``traces``.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxpipe.compiler import front_end, passes, placement, plans, reads
from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import Traced
from fxpipe.passes.runner import Pass, run_all
from fxpipe.passes.tracing.any_size import AnySize
from fxpipe.passes.tracing.shapes import Dims

LISTS = (passes.CAPTURE, passes.SINGLE, passes.MEASURE, passes.PLAN)

PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, type, range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.Size, pytree.TreeSpec),
    *(types.BuiltinFunctionType, type(torch.ops.aten.add)),
)
"""Values that are their own keys."""

RESULTS = ("traced", "plan", "costs", "assignment", "values")
"""What is asked of those lists."""

BY_SHAPE = ("args", "kwargs", "targets", "numbers", "output", "real_targets", "values", "state")
"""Facts with tensors that are inputs of graphs; the data of all others may be part of a graph."""

_made: dict[Any, dict[str, Any]] = {}
_passes: list[Sequence[Pass]] = []  # so that none is at the address of an earlier one
_known: dict[int, Any] = {}  # what was made, and the graphs of it, by their identity


_of = AnySize.of
_at = AnySize.at


class _Unknown(Exception):
    """A value of which it is not known all that a trace may depend on."""


class _Asked(BaseException):
    """Tells the key of the facts that a list would run on, in place of running it."""

    key: Any = None


_asking: list[_Asked] = []


@contextmanager
def remembering() -> Iterator[None]:
    """Inside, compilers of this process take what was made for a like model before."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (front_end, placement, plans):
            patch.setattr(module, "run_all", run_once)
        patch.setattr(AnySize, "of", of_once)
        patch.setattr(AnySize, "at", at_once)
        yield


def run_once(given: Sequence[Pass], facts: Mapping[str, Any]) -> dict[str, Any]:
    """As ``run_all``, but a list of ``LISTS``, with what extensions put into it, does not run where
    it has run on like facts."""
    key: Any = None
    extends = any(set(map(id, each)) <= set(map(id, given)) for each in LISTS)
    if extends and not facts.get("called"):  # which graphs may call
        reads = {name for each in given for name in each.needs}
        reads |= {each.when.removeprefix("not ") for each in given}
        try:
            own = {name: _key(_shapes(name, facts[name])) for name in reads & facts.keys()}
            key = tuple(map(id, given)), tuple(sorted(own.items())), _around()
            hash(key)
        except (_Unknown, TypeError):
            key = None
    if _asking:
        _asking[-1].key = key
        raise _asking[-1]
    if key is None:
        return run_all(given, facts)
    if key not in _made:
        made = run_all(given, facts)
        _passes.append(given)
        names = [name for each in given for name in each.makes if name in RESULTS]
        _made[key] = {name: made[name] for name in names if name in made}
        for value in _made[key].values():
            _know(value.module if isinstance(value, Traced) else value)
    return {**facts, **_made[key]}


def of_once(
    free: Dims, leaves: Sequence[Any], capture: Callable[[Sequence[Any]], Traced]
) -> tuple[AnySize, Traced | None]:
    """As ``AnySize.of``, but what was captured for a like model and sizes is not captured anew."""
    asked = _Asked()
    _asking.append(asked)
    try:
        capture(leaves)
    except _Asked:
        pass
    finally:
        _asking.pop()
    if asked.key is None:
        return _of(free, leaves, capture)
    key = "any size", tuple(free), asked.key
    if key not in _made:
        graph, made = _of(free, leaves, capture)
        _know(graph)
        if made is not None:
            _know(made.module)
        _made[key] = {"any size": (graph, made)}
    found: tuple[AnySize, Traced | None] = _made[key]["any size"]
    return found


def at_once(graph: AnySize, leaves: Sequence[Any]) -> Traced | None:
    """As ``AnySize.at``, but a graph is put for the same sizes once."""
    try:
        key = "at", _same(graph), _key(_shapes("args", list(leaves)))
        hash(key)
    except (_Unknown, TypeError):
        return _at(graph, leaves)
    if key not in _made:
        made = _at(graph, leaves)
        if made is not None:
            _know(made.module)
        _made[key] = {"traced": made}
    found: Traced | None = _made[key]["traced"]
    return found


def _know(made: Any) -> None:
    """Let a value be its own key from now on."""
    _known[id(made)] = made


def _around() -> tuple[Any, ...]:
    """What is set for all of torch."""
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.are_deterministic_algorithms_enabled(),
    )


def _key(value: Any) -> Any:
    """Equal for values of which a trace cannot tell one from the other."""
    if isinstance(value, PLAIN):
        return type(value).__name__, value
    if isinstance(value, Traced) and value.calls:  # these are the model's own objects
        raise _Unknown
    if isinstance(value, Traced):  # its other fields come from its graph
        rest = value.outputs, value.writes, value.deferred, value.loss, value.logged
        return _same(value.module), _key(rest)
    if isinstance(value, Plan):
        return _same(value)
    if isinstance(value, nn.Module):
        return _module(value)
    if isinstance(value, types.FunctionType) and value.__module__ == reads.__name__:
        raise _Unknown  # what stands for the values of a call
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return value.__code__, _key(cells), _key(value.__defaults__), _key(value.__kwdefaults__)
    if isinstance(value, types.MethodType):
        return "method", value.__func__.__code__, _key(value.__self__)
    if isinstance(value, partial):
        return "partial", _key(value.func), _key(value.args), _key(value.keywords)
    if isinstance(value, Mapping):
        return "mapping", tuple((_key(k), _key(v)) for k, v in value.items())
    if isinstance(value, Set):
        return frozenset(map(_key, value))
    if type(value) in (list, tuple) or isinstance(value, type({}.values())):
        return "sequence", tuple(map(_key, value))
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple([_key(getattr(value, each.name)) for each in fields(value)])
    raise _Unknown


@dataclass(frozen=True)
class _Shape:
    """All of a tensor but its data."""

    of: Any


def _shapes(name: str, value: Any) -> Any:
    if name not in BY_SHAPE:
        return value
    return pytree.tree_map_only(Tensor, lambda tensor: _Shape(_tensor(tensor)), value)


def _same(value: object) -> int:
    """The identity of a value that was made here; another one may be at its address later."""
    if id(value) not in _known:
        raise _Unknown
    return id(value)


def _tensor(value: Tensor) -> Any:
    known = type(value) in (Tensor, nn.Parameter, nn.Buffer)
    if not known or value.layout is not torch.strided or vars(value):
        raise _Unknown
    shape = tuple(value.shape), value.stride(), value.dtype, str(value.device)
    return type(value), *shape, value.requires_grad, value.is_leaf, value.is_inference()


EMPTY = nn.Module()


def _module(model: nn.Module) -> Any:
    """The code of a module's parts, their attributes, and which of them and of the tensors are the
    same object."""
    places: dict[int, int] = {}

    def place(part: Any) -> int:
        return places.setdefault(id(part), len(places))

    found: list[Any] = []
    for name, part in model.named_modules(remove_duplicate=False):
        if "<locals>" in type(part).__qualname__:  # a class of its own in each test
            raise _Unknown
        own = vars(part)
        plain = [(key, _key(own[key])) for key in own if key not in vars(EMPTY)]
        if any(own[key] for key in own if "hook" in key and key in vars(EMPTY)):
            raise _Unknown
        tensors = [
            (key, tensor if tensor is None else (place(tensor), _tensor(tensor)))
            for key, tensor in (*part._parameters.items(), *part._buffers.items())
        ]
        kept = frozenset(part._non_persistent_buffers_set)
        code = type(part), _key(type(part).forward)  # a test may put another one there
        found.append((name, place(part), *code, part.training, kept, *plain, *tensors))
    return tuple(found)


__all__ = ["at_once", "of_once", "remembering", "run_once"]

"""What a trace read besides tensors; where it has changed since, a call is traced anew.

A graph holds numbers, flags and submodules as they were when the model ran: ``self.scale``, the
``p`` of a dropout, a weight of the loss in a closure. Each combination of their values that was met
is a variant, with graphs of its own. Only names count that stand in code which ran: what a trainer
keeps in a module for itself is no reason to trace anything.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxpipe import source
from fxpipe.signals import put_back
from fxpipe.telling import LOGGER

VARIANTS = 8
"""How many variants are kept, each with its graphs."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_APART = frozenset(vars(nn.Module())) - {*_HOOKS}
"""Attributes of every module that are looked at in another way, or not at all."""
_COLLECTIONS = (list, tuple, dict, set, frozenset)
_LONG = 1000
"""Collections of more entries are looked at as one object."""
_MISSING = object()

Key = tuple[str, str]


@dataclass
class _Variant:
    """One combination of values.

    Attributes:
        number: of all variants.
        values: of all attributes, in each state that is known to be this variant's.
    """

    number: int
    values: list[Mapping[Key, Any]]


@dataclass
class _Seen:
    """What was there when it was last looked at, to see quickly that nothing has changed.

    Attributes:
        dicts: a dictionary, its length or None where that does not count, and some of its items.
        lists: a list or a set, and a copy of it.
        cells: of closures, and their contents.
    """

    dicts: list[tuple[dict[str, Any], int | None, list[tuple[str, Any]]]] = field(
        default_factory=list
    )
    lists: list[tuple[Any, list[Any]]] = field(default_factory=list)
    cells: list[tuple[Any, Any]] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)

    def holds(self) -> bool:
        """Whether all is as it was."""
        for held, length, items in self.dicts:
            if length is not None and len(held) != length:
                return False
            for name, value in items:
                if held.get(name, _MISSING) is not value:
                    return False
        for held_list, copy in self.lists:
            if len(held_list) != len(copy) or any(
                a is not b for a, b in zip(held_list, copy, strict=True)
            ):
                return False
        if any(_content(cell) is not value for cell, value in self.cells):
            return False
        return not any(map(hooked, self.parameters))


class Guards:
    """The variants of a model and its loss.

    Attributes:
        kept: the numbers of the variants whose graphs are kept.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[..., Any] | None, leaves: Iterable[str]
    ) -> None:
        """Nothing has run yet.

        Args:
            model: the model.
            loss: its loss function, if there is one.
            leaves: names of submodules that are called as they are, which no trace looks into.
        """
        self._model = model
        self._loss = loss
        self._leaves = tuple(leaves)
        self._names: set[str] = set()
        self._owners: set[int] = set()
        self._every: set[str] = set()
        self._globals: dict[tuple[int, str], dict[str, Any]] = {}
        self._variants: list[_Variant] = []
        self._count = 0
        self._current: _Variant | None = None
        self._seen: _Seen | None = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """What runs inside, in this thread, is what a trace reads."""
        codes: set[CodeType] = set()

        def profile(frame: FrameType, event: str, arg: Any) -> None:
            if event == "call" and frame.f_code not in codes:
                codes.add(frame.f_code)
                if source.is_users(frame.f_code.co_filename):
                    self._read(frame.f_code, frame.f_globals, frame.f_locals.get("self"))

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            yield
        finally:
            put_back(before)
            for code in codes:
                if not source.is_ours(code.co_filename):
                    self._names.update(code.co_names)
                    self._names.update(_strings(code.co_consts))
            self._seen = None

    def _read(self, code: CodeType, module: dict[str, Any], owner: Any) -> None:
        """What code of the user's own reads, which may be a method."""
        if isinstance(owner, nn.Module) and _makes_names(code):
            self._owners.add(id(vars(owner)))
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                value = module.get(step.argval, _MISSING)
                if isinstance(value, (*_PLAIN, Tensor)):
                    self._globals[id(module), step.argval] = module

    def variant(self) -> int:
        """The number of the variant that is there now."""
        if self._seen is not None and self._current is not None and self._seen.holds():
            return self._current.number
        values, seen = self._look()
        found = next((v for v in self._variants if self._is(v, values)), None)
        if found is None:
            found = self._new(values)
        self._current, self._seen = found, seen
        return found.number

    def settle(self) -> None:
        """What has been set since the number was asked, as by a first run, is the same variant."""
        assert self._current is not None
        values, self._seen = self._look()
        if not self._is(self._current, values):
            self._current.values.append(values)

    def _new(self, values: Mapping[Key, Any]) -> _Variant:
        if self._current is not None:
            old = self._current.values[-1]
            changed = [key for key in values if self._counts(key) and not _equal(key, old, values)]
            what = ".".join(changed[0]) if changed else "a submodule"
            report = LOGGER.warning if self._count == VARIANTS else LOGGER.info
            report(
                "%s is traced anew, as %s has changed; a number that changes often belongs into a "
                "buffer that is written in place",
                type(self._model).__name__,
                what,
            )
        made = _Variant(self._count, [values])
        self._count += 1
        self._variants.append(made)
        del self._variants[:-VARIANTS]
        return made

    @property
    def kept(self) -> set[int]:
        return {variant.number for variant in self._variants}

    def _is(self, variant: _Variant, values: Mapping[Key, Any]) -> bool:
        return any(
            all(_equal(key, known, values) for key in {**known, **values} if self._counts(key))
            for known in variant.values
        )

    def _counts(self, key: Key) -> bool:
        """Whether code that ran may have read an attribute of that name."""
        path, name = key
        return name.startswith("(") or name in self._names or path in self._every

    # looking

    def _look(self) -> tuple[Mapping[Key, Any], _Seen]:
        values: dict[Key, Any] = {}
        seen = _Seen()
        known: set[int] = set()
        self._modules(self._model, "", values, seen, known)
        if self._loss is not None:
            self._function("loss", self._loss, values, seen, known)
        for (_, name), module in self._globals.items():
            value = module.get(name, _MISSING)
            seen.dicts.append((module, None, [(name, value)]))
            values[str(module.get("__name__")), f"(global) {name}"] = _plain(value)
        return values, seen

    def _modules(
        self,
        root: nn.Module,
        prefix: str,
        values: dict[Key, Any],
        seen: _Seen,
        known: set[int],
        lifted: bool = False,
    ) -> None:
        """What a module and its submodules read; with ``lifted`` graphs hold the very tensors."""
        for path, module in root.named_modules(prefix=prefix):
            if any(path == leaf or path.startswith(f"{leaf}.") for leaf in self._leaves):
                continue
            known.add(id(module))
            if id(vars(module)) in self._owners:
                self._every.add(path)
            values[path, "(class)"] = type(module)
            seen.dicts.append((module._modules, len(module._modules), [*module._modules.items()]))
            for held in (module._parameters, module._buffers):
                seen.dicts.append((held, len(held), [*held.items()]))
                for name, tensor in held.items():
                    values[path, f"(tensor) {name}"] = _Same(tensor) if lifted else _form(tensor)
                    if held is module._parameters and tensor is not None:
                        seen.parameters.append(tensor)
            for name in _HOOKS:
                hooks = vars(module).get(name, {})
                seen.dicts.append((hooks, len(hooks), [*hooks.items()]))
                values[path, f"(hooks) {name}"] = [_Same(hook) for hook in hooks.values()]
            self._attributes(path, vars(module), values, seen, known, _APART)

    def _attributes(
        self,
        path: str,
        held: dict[str, Any],
        values: dict[Key, Any],
        seen: _Seen,
        known: set[int],
        apart: frozenset[str] = frozenset(),
        deep: bool = True,
    ) -> None:
        items = []
        for name, value in held.items():
            if name in apart or not isinstance(name, str):
                continue
            values[path, name] = _plain(value)
            if not self._counts((path, name)):
                continue
            items.append((name, value))
            if isinstance(value, list | set | dict) and id(value) not in known:
                known.add(id(value))
                content = [*value, *value.values()] if isinstance(value, dict) else [*value]
                if isinstance(value, dict):
                    seen.dicts.append((value, len(value), [*value.items()]))
                else:
                    seen.lists.append((value, content))
            elif deep and _is_record(value) and id(value) not in known:
                known.add(id(value))
                inner = f"{path}.{name}" if path else name
                self._attributes(inner, vars(value), values, seen, known, deep=False)
        seen.dicts.append((held, len(held), items))

    def _function(
        self, path: str, function: Any, values: dict[Key, Any], seen: _Seen, known: set[int]
    ) -> None:
        """What a function reads besides its arguments."""
        if id(function) in known:
            return
        known.add(id(function))
        if isinstance(function, nn.Module):
            self._modules(function, path, values, seen, known, lifted=function is not self._model)
        elif isinstance(function, functools.partial):
            self._function(path, function.func, values, seen, known)
        elif isinstance(function, MethodType):
            self._function(path, function.__self__, values, seen, known)
            self._function(path, function.__func__, values, seen, known)
        elif isinstance(function, FunctionType):
            names = function.__code__.co_freevars
            for name, cell in zip(names, function.__closure__ or (), strict=True):
                content = _content(cell)
                seen.cells.append((cell, content))
                values[path, f"(closure) {name}"] = _plain(content)
                if callable(content):
                    self._function(f"{path}.{name}", content, values, seen, known)
        elif _is_record(function):
            self._attributes(path, vars(function), values, seen, known)


def hooked(parameter: Tensor) -> bool:
    """Whether hooks wait for a parameter's gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


@dataclass(frozen=True, eq=False)
class _Same:
    """Equal to the same object alone."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _plain(value: Any, depth: int = 3) -> Any:
    """A value that can be compared later: by what it holds where it is plain."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, _COLLECTIONS) and len(value) > _LONG:
        return _Same(value)
    if depth and isinstance(value, list | tuple):
        return type(value), [_plain(each, depth - 1) for each in value]
    if depth and isinstance(value, dict):
        return dict, [(_plain(key, 0), _plain(each, depth - 1)) for key, each in value.items()]
    if isinstance(value, set | frozenset):
        return set, {_plain(each, 0) for each in value}
    return _Same(value)


def _form(tensor: Tensor | None) -> Any:
    """What a graph holds of a parameter or buffer."""
    if tensor is None:
        return None
    if is_lazy(tensor):
        return _Same(tensor)  # it has no shape before the model has run
    hooks = isinstance(tensor, nn.Parameter) and hooked(tensor)
    return tensor.shape, tensor.dtype, tensor.layout, hooks


def _equal(key: Key, one: Mapping[Key, Any], other: Mapping[Key, Any]) -> bool:
    if key[1].startswith("(global)") and (key not in one or key not in other):
        return True  # nobody knew yet that it is read
    a, b = one.get(key, _MISSING), other.get(key, _MISSING)
    return a is b or (a is not _MISSING and b is not _MISSING and bool(a == b))


def _strings(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from _strings(constant)


def _is_record(value: Any) -> bool:
    """Whether a value is an object of some attributes, such as a model's configuration."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, Tensor | nn.Module | type | ModuleType | FunctionType)
        and not isinstance(value, MethodType)
        and type(value).__module__.partition(".")[0] != "torch"
    )


def _makes_names(code: CodeType) -> bool:
    """Whether code calls ``getattr`` with a name that does not stand in it."""
    arguments: list[dis.Instruction] | None = None
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval == "getattr":
            arguments = []
        elif arguments is not None and step.opname.startswith("CALL"):
            made = any(a.opname.startswith(("FORMAT", "BUILD")) for a in arguments)
            if made or not any(
                isinstance(a.argval, str) and "CONST" in a.opname for a in arguments
            ):
                return True
            arguments = None
        elif arguments is not None:
            arguments.append(step)
    return False


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return _MISSING

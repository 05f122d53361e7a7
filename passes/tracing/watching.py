"""Watch a model's own ``forward`` while it runs or is traced.

``Flow`` finds out which tensors it reads. ``ValueChecks`` leaves a model's own checks of values,
``assert`` or ``if`` with a ``raise``, out of its trace.

before:  if labels.max() >= self.classes: raise ValueError(…)
traced:  nothing, where the same line runs in every step all the same

``StateReads`` lets the symbolic tracer record what is computed of tensors that are no inputs.
``torch.fx`` records what is computed of inputs and parameters alone. What is computed of buffers,
and of tensors in attributes, lists and globals, would stay in the graph as it was.

before:  mul = 2 * self.gain, as it is when the model is traced;  return x * _tensor_constant0
after:   gain = self.gain;  mul = gain.mul(2);  return x * mul
"""

from __future__ import annotations

import ast
import functools
import linecache
import operator
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from fxpipe.random.leaf_draws import Draws
from fxpipe.torchtools import source
from fxpipe.torchtools.pytrees import taken_apart


class Flow(Draws):
    """Inside, track which of some source tensors each value depends on."""

    def __init__(self, sources: Mapping[Any, Any]) -> None:
        """Nothing has run yet; a source is a tensor, or a pytree of tensors."""
        super().__init__()
        self._origins: dict[int, set[Any]] = {}
        self._held: list[Tensor] = []  # so that each storage keeps its number
        self._asked: set[Any] = set()
        for key, value in sources.items():
            for leaf in tensors_of(value):
                self._add(leaf, {key})

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation returns inside."""
        origins = self._of((args, kwargs))
        made = func(*args, **kwargs)
        if origins:
            if any(not isinstance(x, Tensor | None) for x in pytree.tree_leaves(made)):
                self._asked |= origins
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for leaf in tensors_of(value):
                        self._add(leaf, origins)
            for leaf in tensors_of(made):
                self._add(leaf, origins)
        return made

    def origins(self, value: Any) -> set[Any]:
        """The keys of the sources that a value depends on, or whose numbers were read."""
        return self._of(value) | self._asked

    def _of(self, value: Any) -> set[Any]:
        found = (self._origins.get(storage_of(leaf), ()) for leaf in tensors_of(value))
        return set().union(*found)

    def _add(self, tensor: Tensor, origins: set[Any]) -> None:
        number = storage_of(tensor)
        if number not in self._origins:
            self._held.append(tensor)
        self._origins[number] = self._origins.get(number, set()) | origins


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a value, including those in objects that it holds."""
    return [leaf for leaf in pytree.tree_leaves(taken_apart(value)) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> int:
    """A number that identifies a tensor's storage."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    strided = tensor.layout is torch.strided
    return tensor.untyped_storage()._cdata if strided else id(tensor)


_ASKS = ("__bool__", "item", "__int__", "__float__", "__index__")


class ValueChecks(TorchFunctionMode):
    """Inside, record the numbers that such checks read, or answer them with recorded numbers.

    Attributes:
        open: whether it is recording or answering now.
        answers: file and line → the numbers, in their order.
    """

    def __init__(self, known: ValueChecks | None = None) -> None:
        """Answer with the ``known`` numbers; without them, record."""
        super().__init__()
        self.open = True
        self.answers: dict[tuple[str, int], list[Any]] = {}
        self._answering = known is not None
        if known is not None:
            self.answers = {place: list(numbers) for place, numbers in known.answers.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        asks = self.open and getattr(func, "__name__", "") in _ASKS
        place = _checked() if asks else None
        if place is None:
            return func(*args, **(kwargs or {}))
        if self._answering and self.answers.get(place):
            return self.answers[place].pop(0)
        made = func(*args, **(kwargs or {}))
        self.answers.setdefault(place, []).append(made)
        return made


def _checked() -> tuple[str, int] | None:
    """The user's line that runs now, if it is in a check."""
    frame = sys._getframe(2)
    while frame is not None and not source.is_users(frame.f_code.co_filename):
        if frame.f_back is None:
            return None
        frame = frame.f_back
    place = frame.f_code.co_filename, frame.f_lineno
    return place if place[1] in _lines(place[0]) else None


@functools.lru_cache(maxsize=64)
def _lines(filename: str) -> frozenset[int]:
    """The lines of the checks in a file."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return frozenset()
    tests = [
        node.test
        for node in ast.walk(tree)
        if isinstance(node, ast.If | ast.Assert) and _raises(node)
    ]
    return frozenset(
        line for test in tests for line in range(test.lineno, (test.end_lineno or 0) + 1)
    )


def _raises(node: ast.If | ast.Assert) -> bool:
    if isinstance(node, ast.Assert):
        return True
    return not node.orelse and all(isinstance(each, ast.Raise) for each in node.body)


_VALUES = frozenset(
    (
        *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__"),
        *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__"),
    )
)
"""What makes plain numbers of a tensor's values."""
_WRITES = frozenset(
    (
        *("__setitem__", "__delitem__", "__set__"),
        *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")),
        *(f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift", "div")),
    )
)
"""What writes into a tensor, besides methods whose names end so."""
_KNOWN = frozenset(
    (
        *("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_cuda", "is_sparse"),
        *("size", "dim", "numel", "nelement", "stride", "is_floating_point", "is_complex"),
    )
)
"""What does not depend on a tensor's values."""


class StateReads(TorchFunctionMode):
    """Inside, operations on tensors that were there before are nodes of a tracer's graph.

    A number that is made of the values of a parameter or buffer is refused; that of any other
    tensor is watched by the model's guards.
    """

    def __init__(self, tracer: fx.Tracer, model: nn.Module) -> None:
        super().__init__()
        self._tracer = tracer
        self._owned = {id(each) for each in (*model.parameters(), *model.buffers())}
        self._made = WeakIdKeyDictionary()  # the tensors that do not depend on such ones

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = pytree.tree_leaves((args, kwargs))
        if any(isinstance(each, fx.Proxy) for each in given):
            return func(*args, **kwargs)
        read = [each for each in given if isinstance(each, Tensor) and each not in self._made]
        if any(isinstance(each, nn.Parameter) and id(each) not in self._owned for each in read):
            return func(*args, **kwargs)  # it is refused by its shape after the trace
        name = getattr(func, "__name__", "")
        if read and writes(name, kwargs):
            raise RuntimeError("it writes into a tensor that the model keeps")
        if name in _VALUES and any(id(each) in self._owned for each in read):
            raise RuntimeError("values of tensors cannot be used as inputs to control flow")
        made = func(*args, **kwargs)
        tensors = [each for each in pytree.tree_leaves(made) if isinstance(each, Tensor)]
        if not read:
            self._made.update(dict.fromkeys(tensors))
        if not (read and tensors):
            return made
        return self._known(self._recorded(func, args, kwargs), made)

    def _recorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Proxy:
        name = func.__name__
        if name == "__get__":  # of a property, such as Tensor.T
            return self._tracer.create_proxy(
                "call_function", getattr, (args[0], func.__self__.__name__), {}
            )
        if name == "__getitem__":
            return self._tracer.create_proxy("call_function", operator.getitem, args, kwargs)
        if is_tensor_method_or_property(func):
            return self._tracer.create_proxy("call_method", name, args, kwargs)
        return self._tracer.create_proxy("call_function", func, args, kwargs)

    def _known(self, proxy: fx.Proxy, made: Any) -> Any:
        """A proxy that tells the form of the value that it stands for."""
        if isinstance(made, Tensor):
            return _Known(proxy.node, self._tracer, made)
        if isinstance(made, list | tuple):
            return tuple(
                self._known(
                    self._tracer.create_proxy("call_function", operator.getitem, (proxy, at), {}),
                    each,
                )
                for at, each in enumerate(made)
            )
        return proxy


class _Known(fx.Proxy):
    """Stands for a tensor whose shape, type and the like are known."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, like: Tensor) -> None:
        super().__init__(node, tracer)
        self._like = like

    def __getattr__(self, name: str) -> Any:
        return getattr(self._like, name) if name in _KNOWN else super().__getattr__(name)

    def __len__(self) -> int:
        return len(self._like)


def writes(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a function writes into one of its arguments."""
    method = name.endswith("_") and not name.endswith("__")
    asked = isinstance(kwargs.get("out"), Tensor) or bool(kwargs.get("inplace"))
    return method or asked or name in _WRITES

"""Record what a model computes from tensors that are no inputs.

``torch.fx`` itself records what is computed from inputs and parameters. What is computed from
buffers, or from tensors in attributes, lists and globals, would become a constant of the graph.

before:  return x * _tensor_constant0       which is 2 * self.gain, as it was during the trace
after:   gain = self.gain;  mul = gain.mul(2);  return x * mul
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

_VALUES = frozenset(
    (
        *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__"),
        *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__"),
    )
)
"""Functions that make plain numbers of a tensor's values."""

_WRITES = frozenset(
    (
        *("__setitem__", "__delitem__", "__set__"),
        *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")),
        *(f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift", "div")),
    )
)
"""Functions that write into a tensor, besides methods whose names end in ``_``."""

_KNOWN = frozenset(
    (
        *("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_cuda", "is_sparse"),
        *("size", "dim", "numel", "nelement", "stride", "is_floating_point", "is_complex"),
    )
)
"""Attributes and methods that do not depend on a tensor's values."""


class StateReads(TorchFunctionMode):
    """Inside, operations on tensors that existed before become nodes of a tracer's graph.

    Numbers made from the values of a parameter or buffer are refused. Numbers from other tensors
    are left to the model's guards.
    """

    def __init__(self, tracer: fx.Tracer, model: nn.Module) -> None:
        super().__init__()
        self._tracer = tracer
        self._owned = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._made = WeakIdKeyDictionary()  # tensors made inside, of no tensor from outside

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = pytree.tree_leaves((args, kwargs))
        if any(isinstance(x, fx.Proxy) for x in operands):
            return func(*args, **kwargs)
        read = [x for x in operands if isinstance(x, Tensor) and x not in self._made]
        if any(isinstance(x, nn.Parameter) and id(x) not in self._owned for x in read):
            return func(*args, **kwargs)  # a later check refuses foreign parameters
        name = getattr(func, "__name__", "")
        if read and writes(name, kwargs):
            raise RuntimeError("it writes into a tensor that the model keeps")
        if name in _VALUES and any(id(x) in self._owned for x in read):
            raise RuntimeError("values of tensors cannot be used as inputs to control flow")
        result = func(*args, **kwargs)
        tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        if not read:
            self._made.update(dict.fromkeys(tensors))
        if not (read and tensors):
            return result
        return self._stand_in(self._recorded(func, args, kwargs), result)

    def _recorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Proxy:
        name = func.__name__
        if name == "__get__":  # of a property, such as Tensor.T
            return self._function(getattr, (args[0], func.__self__.__name__), {})
        if name == "__getitem__":
            return self._function(operator.getitem, args, kwargs)
        if is_tensor_method_or_property(func):
            return self._tracer.create_proxy("call_method", name, args, kwargs)
        return self._function(func, args, kwargs)

    def _function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Proxy:
        return self._tracer.create_proxy("call_function", func, args, kwargs)

    def _stand_in(self, proxy: fx.Proxy, value: Any) -> Any:
        """A proxy that knows the shape and type of the value that it stands for."""
        if isinstance(value, Tensor):
            return _TypedProxy(proxy.node, self._tracer, value)
        if isinstance(value, list | tuple):
            return tuple(
                self._stand_in(self._function(operator.getitem, (proxy, index), {}), item)
                for index, item in enumerate(value)
            )
        return proxy


class _TypedProxy(fx.Proxy):
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

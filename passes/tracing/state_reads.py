"""Let the symbolic tracer record what ``forward`` computes of tensors that are no inputs.

before:  mul = 2 * self.gain, as it is when the model is traced;  return x * _tensor_constant0
after:   gain = self.gain;  mul = gain.mul(2);  return x * mul

``torch.fx`` records what is computed of inputs and parameters alone. What is computed of buffers,
and of tensors in attributes, lists and globals, would stay in the graph as it was.
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
        if read and _writes(name, kwargs):
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


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a function writes into one of its arguments."""
    method = name.endswith("_") and not name.endswith("__")
    asked = isinstance(kwargs.get("out"), Tensor) or bool(kwargs.get("inplace"))
    return method or asked or name in _WRITES

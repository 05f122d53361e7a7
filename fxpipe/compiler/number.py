"""Numbers that change from call to call: inputs of a graph, not constants in it.

before:  loss = mse + 0.3 * kl          traced anew when 0.3 becomes 0.4
after:   loss = mse + beta * kl         with an input ``beta``, a tensor without dimensions

While a model is traced, a ``Number`` stands for each of them. Arithmetic on it becomes part of the
graph. Where the code compares it, the answer is that for its present value, and the question is
kept: the graph holds as long as the answers are the same. All else, such as ``math.cos(beta)`` or
a dropout's rate, needs the number itself, which is then a constant of the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Values = Sequence[float]
"""The present values of all numbers that are inputs."""

Question = Callable[[Values], bool]
"""A comparison of numbers, which a branch of the model's code has asked."""


class NumberPlace(NamedTuple):
    """Where a number is that is in no argument of a call: ``holder[key]``, or the only content of
    a closure's cell, whose key is None."""

    holder: Any
    key: Any

    def get(self) -> Any:
        """What is there now; None if nothing is."""
        try:
            return self.holder.cell_contents if self.key is None else self.holder[self.key]
        except (KeyError, IndexError, ValueError):
            return None

    def set(self, value: Any) -> None:
        if self.key is None:
            self.holder.cell_contents = value
        else:
            self.holder[self.key] = value


class ConstantError(Exception):
    """The code needs the value of a number, which can be no input of the graph."""


class Number:
    """Stands for a number while a model is traced.

    Attributes:
        value: its present value.
        tensor: the number in the graph, of type float64 and without dimensions.
    """

    __slots__ = ("__weakref__", "_asked", "_made", "_name", "_of", "tensor", "value")

    def __init__(
        self,
        value: float,
        tensor: Tensor,
        of: Callable[[Values], float],
        name: str,
        asked: dict[str, Question],
        made: list[ReferenceType[Number]],
    ) -> None:
        """Args:
        of: computes the number from all numbers that are inputs.
        name: the expression that it is of these.
        asked: expression → question; gets what is asked of the number.
        made: gets a reference to the number, and to all that are computed from it.
        """
        self.value, self.tensor = value, tensor
        self._of, self._name, self._asked, self._made = of, name, asked, made
        made.append(ref(self))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance(x, float)
        return type(self.value)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call an operation with the numbers as tensors, whose types do not change its result's."""
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors:
            raise ConstantError(f"{function.__name__} of a number")
        inexact = (x for x in tensors if x.is_floating_point() or x.is_complex())
        first = next(inexact, None)
        dtype = torch.get_default_dtype() if first is None else first.dtype
        if first is not None and first.dim():  # kernels compute with a number as with a float32
            dtype = torch.promote_types(dtype, torch.float32)
        leaves = [leaf.tensor.to(dtype) if type(leaf) is Number else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return function(*args, **kwargs)

    def _computed(self, name: str, *operands: Any) -> Any:
        """The number that an operator makes of its operands."""
        if (made := self._applied(name, operands)) is None:
            return NotImplemented
        function, value, of, text = made
        tensor = function(*(x.tensor if type(x) is Number else x for x in operands))
        return Number(value, tensor, of, text, self._asked, self._made)

    def _answered(self, name: str, *operands: Any) -> Any:
        """The answer to a comparison, which is asked again at each call."""
        if (made := self._applied(name, operands)) is None:
            return NotImplemented
        _, value, of, text = made
        self._asked.setdefault(text, lambda values: bool(of(values)))
        return bool(value)

    def _applied(self, name: str, operands: Sequence[Any]) -> Any:
        """An operator, its result, the function that computes the result from all numbers that are
        inputs, and the result's name; None if some operand is neither a number nor made of some."""
        if not all(type(x) is Number or isinstance(x, int | float) for x in operands):
            return None
        function = getattr(operator, name)
        value = function(*(x.value if type(x) is Number else x for x in operands))
        of = [x._of if type(x) is Number else _constant(x) for x in operands]
        text = ", ".join(x._name if type(x) is Number else repr(x) for x in operands)
        return function, value, lambda v: function(*(each(v) for each in of)), f"{name}({text})"

    def __bool__(self) -> bool:
        return bool(self._answered("truth", self))

    def __hash__(self) -> int:
        raise ConstantError("the hash of a number")

    def __getattr__(self, name: str) -> Any:
        raise ConstantError(f"the attribute {name} of a number")


def _constant(value: float) -> Callable[[Values], float]:
    return lambda values: value


def _method(method: Callable[..., Any], name: str, *, swapped: bool = False) -> Any:
    def call(self: Number, *others: Any) -> Any:
        return method(self, name, *(*others, self) if swapped else (self, *others))

    return call


def _refused(name: str) -> Any:
    def refuse(self: Number, *others: Any) -> Any:
        raise ConstantError(f"{name} of a number")

    return refuse


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Number, f"__{_name}__", _method(Number._computed, _name))
    setattr(Number, f"__r{_name}__", _method(Number._computed, _name, swapped=True))
for _name in ("neg", "pos", "abs"):
    setattr(Number, f"__{_name}__", _method(Number._computed, _name))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Number, f"__{_name}__", _method(Number._answered, _name))
for _name in ("float", "int", "index", "complex", "round", "trunc", "floor", "ceil", "divmod"):
    setattr(Number, f"__{_name}__", _refused(_name))
for _name in ("repr", "str", "format"):
    setattr(Number, f"__{_name}__", _refused(_name))


def answers(asked: Mapping[str, Question], values: Values) -> tuple[bool | None, ...]:
    """What is answered to each question for these values; None if it cannot be computed."""
    return tuple(_answer(question, values) for question in asked.values())


def _answer(question: Question, values: Values) -> bool | None:
    try:
        return question(values)
    except ArithmeticError:
        return None

"""What stands for a number is computed with as Python does, and asks again where it is compared."""

from __future__ import annotations

import math
import operator
from operator import itemgetter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.compiler.number import ConstantError, Number, NumberPlace, Question, answers

FLOATS = st.floats(-100, 100, allow_nan=False).filter(lambda x: abs(x) > 1e-3)
NUMBERS = st.one_of(st.integers(1, 50), FLOATS)
COMPUTES = ["add", "sub", "mul", "truediv", "floordiv", "mod"]
COMPARES = ["lt", "le", "gt", "ge", "eq", "ne"]


def _number(value: float, asked: dict[str, Question], at: int = 0) -> Any:
    tensor = torch.tensor(value, dtype=torch.float64)
    return Number(value, tensor, itemgetter(at), f"v{at}", asked, [])


@given(st.sampled_from(COMPUTES), NUMBERS, NUMBERS, st.sampled_from(["left", "right", "both"]))
def test_arithmetic_is_pythons_in_value_and_tensor(
    name: str, left: float, right: float, which: str
) -> None:
    function = getattr(operator, name)
    a: Any = _number(left, {}) if which != "right" else left
    b: Any = _number(right, {}, 1) if which != "left" else right
    made = function(a, b)
    expected = function(left, right)
    assert type(made) is Number
    assert made.value == expected
    assert made.tensor.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert isinstance(made, type(expected))


@given(st.sampled_from(COMPARES), NUMBERS, NUMBERS, NUMBERS)
def test_a_comparison_is_asked_again_for_other_values(
    name: str, first: float, later: float, limit: float
) -> None:
    asked: dict[str, Question] = {}
    function = getattr(operator, name)
    number = _number(first, asked)
    assert function(number * 2 + 1, limit) == function(first * 2 + 1, limit)
    assert answers(asked, [first]) == (function(first * 2 + 1, limit),)
    assert answers(asked, [later]) == (function(later * 2 + 1, limit),)


def test_each_comparison_is_asked_again() -> None:
    asked: dict[str, Question] = {}
    number = _number(2.0, asked)
    assert number > 1
    assert not number > 3
    assert [*map(answers, [asked] * 3, ([2.0], [0.5], [4.0]))] == [
        (True, False),
        (False, False),
        (True, True),
    ]


def test_what_cannot_be_answered_for_other_values_is_told_apart() -> None:
    asked: dict[str, Question] = {}
    assert min(1.0, 1 / _number(2.0, asked)).value == 0.5
    assert answers(asked, [2.0]) != answers(asked, [0.5])
    assert answers(asked, [0.0]) == (None,)


def test_the_same_question_is_kept_once() -> None:
    asked: dict[str, Question] = {}
    number = _number(0.5, asked)
    for _ in range(3):
        assert number > 0
    assert len(asked) == 1
    assert number
    assert len(asked) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (5,)])
@given(value=FLOATS)
def test_operations_on_tensors_give_the_bits_that_they_give_with_the_number(
    dtype: torch.dtype, shape: tuple[int, ...], value: float
) -> None:
    x = torch.linspace(0.1, 3, 5, dtype=dtype)[0 if shape == () else slice(None)]
    number = _number(value, {})
    for with_number, plain in [
        (x * number, x * value),
        (number * x, value * x),
        (x + number, x + value),
        (number - x, value - x),
        (x / number, x / value),
        (torch.sub(x, number), torch.sub(x, value)),
        (x.clone().mul_(number), x.clone().mul_(value)),
    ]:
        assert with_number.dtype == plain.dtype
        assert torch.equal(with_number, plain)
    assert torch.equal(x < number, x < value)


@pytest.mark.parametrize(
    "need",
    [
        float,
        int,
        hash,
        str,
        round,
        math.cos,
        lambda x: f"{x:.2f}",
        lambda x: [0, 1][x],
        lambda x: x.is_integer(),
        lambda x: torch.sigmoid(x),
    ],
)
def test_what_needs_the_value_itself_is_refused(need: Any) -> None:
    with pytest.raises(ConstantError):
        need(_number(1.0, {}))


def test_numbers_are_of_the_class_of_their_value() -> None:
    assert isinstance(_number(1.0, {}), float)
    assert isinstance(_number(1, {}), int)
    assert not isinstance(_number(1.0, {}), int | str | torch.Tensor)


def test_a_place_is_read_and_written_where_it_is() -> None:
    count = 1

    def reads() -> int:
        return count

    held: list[Any] = [{"a": 1}, [1], *reads.__closure__]  # type: ignore[misc]
    for place in (NumberPlace(held[0], "a"), NumberPlace(held[1], 0), NumberPlace(held[2], None)):
        assert place.get() == 1
        place.set(2)
        assert place.get() == 2
    assert (held[0], held[1], reads()) == ({"a": 2}, [2], 2)
    assert NumberPlace({}, "a").get() is None

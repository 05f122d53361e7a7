"""Whatever reads a value is noticed; what only asks for its class, or hands it on, is not."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterable
from datetime import date
from enum import StrEnum
from numbers import Number
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from fxpipe.compiler.unread import ReadError, may_be_unread, unread

READS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "compared": ("a", lambda x: x == "a"),
    "compared from the left": ("a", lambda x: "a" == x),  # noqa: SIM300
    "hashed": ("a", lambda x: {"a": 1}.get(x)),
    "in a list": ("a", lambda x: x in ["b", "a"]),
    "formatted": ("a", lambda x: f"{x}"),
    "shown": ("a", repr),
    "joined": ("a", lambda x: "b" + x),
    "percent": ("a", lambda x: "%s" % x),  # noqa: UP031
    "a truth": ("a", bool),
    "its length": ("a", len),
    "gone through": ("a", list),
    "a method": ("a", lambda x: x.startswith("a")),
    "indexed": ("a", operator.itemgetter(0)),
    "copied": ("a", copy.deepcopy),
    "added to a tensor": (2.0, lambda x: torch.ones(3) * x),
    "before a tensor": (2.0, lambda x: x - torch.ones(3)),
    "an option of an operation": (2, lambda x: torch.ones(3).add(torch.ones(3), alpha=x)),
    "a float": (2, float),
    "an index": (1, lambda x: [1, 2][x]),
    "of mathematics": (2.0, math.sqrt),
    "less than": (2, lambda x: x < 3),
    "a range": (2, range),
    "negated": (2, operator.neg),
    "of NumPy": (numpy.float64(2.0), lambda x: x.item()),
}


ERRORS = ("joined",)


@pytest.mark.parametrize("how", READS)
def test_a_read_is_noticed_or_an_error(how: str) -> None:
    value, read = READS[how]
    noted: list[int] = []
    with pytest.raises((ReadError, TypeError, RuntimeError)):
        read(unread(value, lambda: noted.append(1)))
    # what only the value itself can be given to raises: then all values count as read
    assert bool(noted) == (how not in ERRORS)


@pytest.mark.parametrize("value", ["train", 3, 0.5, b"x"])
def test_its_class_is_that_of_the_value(value: Any) -> None:
    noted: list[int] = []
    stands = unread(value, lambda: noted.append(1))
    for kind in (str, int, float, bytes, bool, list, torch.Tensor, Number, Iterable, dict):
        assert isinstance(stands, kind) == isinstance(value, kind), kind
    for name in ("to", "keys", "__iter__", "__array__", "startswith_"):
        assert hasattr(value, name) or not hasattr(stands, name), name
    assert stands is not None
    assert [stands][0] is stands
    assert not noted


def test_code_may_ask_for_flags_and_members_of_enumerations_by_is() -> None:
    class Mode(StrEnum):
        TRAIN = "train"

    assert all(map(may_be_unread, ("a", b"a", 1, 2.5, numpy.float32(1), Path("a"), date.max)))
    assert not any(map(may_be_unread, (None, True, Mode.TRAIN, torch.ones(1), print, int)))

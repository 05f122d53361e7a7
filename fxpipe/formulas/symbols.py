"""The letters that formulas are written in."""

from __future__ import annotations

from sympy import Symbol

p = Symbol("p", integer=True, positive=True)
"""Devices."""

m = Symbol("m", integer=True, positive=True)
"""Micro-batches a step."""

v = Symbol("v", integer=True, positive=True)
"""Stages a device."""

s = Symbol("s", integer=True, nonnegative=True)
"""A stage, from 0."""

T = Symbol("T", integer=True, positive=True)
"""Steps in a row, where batches overlap."""


def time(letter: str) -> Symbol:
    """The time of a task, such as ``T_F`` of a forward."""
    return Symbol(f"T_{letter}", nonnegative=True)

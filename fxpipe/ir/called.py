"""Functions of graphs that call a part of the model as it is, instead of computing it in nodes.

before:  the model calls ``self.experts(x)``, which no graph can hold
after:   forward:   experts = called experts([x], [weight]);  y = experts[0];  held = experts[1]
         backward:  d = called experts backward([gradient of y], held, [x], [weight])

What its backward needs is one value between the two nodes, ``held``: some object.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import fx


class Called:
    """The function of such a node.

    Attributes:
        name: the part of the model, for messages.
        parts: the ids of the objects that must not run in two threads at once.
        fresh: whether its results are in memory that nothing else refers to.
    """

    name: str
    parts: frozenset[int] = frozenset()
    fresh = False

    def __call__(self, *args: Any) -> Any:
        """Call it."""
        raise NotImplementedError

    def refusing(self) -> AbstractContextManager[None]:
        """Inside, it runs on an example, and InputError is raised for an error in it."""
        return nullcontext()

    def without_backward(self) -> Called:
        """The same function for calls that no backward follows."""
        return self

    def adding(self, results: Collection[int]) -> Called:
        """The same function for a stage that only adds these of its results to sums, so that they
        may be None instead of zeros."""
        return self


def calls_in(nodes: Iterable[fx.Node]) -> dict[fx.Node, Called]:
    """The nodes, among some, that call a part of the model as it is, with their functions."""
    pairs: list[tuple[fx.Node, Any]] = [(node, node.target) for node in nodes]
    return {node: target for node, target in pairs if isinstance(target, Called)}

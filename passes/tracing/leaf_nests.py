"""What leaf modules are given and return: nests in which each tensor is its place among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxpipe.errors import TraceError, told

REST = "fxpipe_rest"
"""What the rest of the model's own ``forward`` is called among leaf modules."""


def leaf_called(name: str) -> str:
    """What messages call a leaf module."""
    return "the rest of forward" if name == REST else f"leaf module {name!r}"


class UnfitLeaf(TraceError):
    """A submodule cannot be called as it is; maybe one around it can.

    Attributes:
        name: of the submodule.
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{leaf_called(name)} {why}")
        self.name = name


@dataclass(frozen=True)
class Place:
    """Stands for a tensor in a nest.

    Attributes:
        index: the how-manieth it is.
    """

    index: int


_PLAIN = (Place, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def with_places(name: str, what: str, values: Any) -> Any:
    """What a leaf module is given or returns, each tensor replaced by its place among them.

    Raises:
        TraceError: an object of it cannot be made of places.
    """
    flat, spec = pytree.tree_flatten(values)
    count = iter(range(len(flat)))
    placed = [Place(next(count)) if isinstance(leaf, Tensor) else leaf for leaf in flat]
    try:
        return pytree.tree_unflatten(placed, spec)
    except Exception as error:
        kinds = sorted({type(each).__name__ for each in _nodes(values)}) or ["nest"]
        raise UnfitLeaf(
            name,
            f"{what} a {' and a '.join(kinds)}, which cannot be taken apart and put together "
            f"({told(error)}); mark a module around it as the leaf, one that "
            "takes tensors and returns tensors",
        ) from error


def can_be_given(placed: Any, recorded: Any) -> bool:
    """Whether a leaf module can be given what it is while the model is traced.

    A model may well give it a mask then that it leaves out when it runs, or the other way round;
    what holds tensors of the trace would be wrong in every step.
    """
    leaves, known = pytree.tree_leaves(placed), pytree.tree_leaves(recorded)
    if all(isinstance(x, _PLAIN) or any(x is y for y in known) for x in leaves):
        return True
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return not any(isinstance(x, symbols) for x in leaves) and bool(placed == recorded)


def _nodes(values: Any) -> Iterator[Any]:
    """The containers in a nest that are of a class of their own."""
    if isinstance(values, dict):
        inner: Iterable[Any] = values.values()
    elif isinstance(values, (tuple, list)):
        inner = values
    else:
        return
    if type(values) not in (dict, tuple, list):
        yield values
    for each in inner:
        yield from _nodes(each)


def indices(name: str, output: Any, path: Sequence[Any]) -> tuple[Any, ...]:
    """A path into a nest as the indices on the way."""
    found: list[Any] = []
    for key in path:
        index = getattr(key, "idx", getattr(key, "key", None))
        if index is None and hasattr(output, "_fields"):  # a named tuple
            index = output._fields.index(key.name)
        try:
            output = output[index]
        except Exception as error:
            raise UnfitLeaf(
                name,
                f"returns an object with {pytree.keystr((key,))}; return tensors, tuples, lists "
                "or dicts of them",
            ) from error
        found.append(index)
    return tuple(found)

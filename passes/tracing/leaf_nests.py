"""Inputs and results of leaf modules: pytrees in which a ``Place`` stands for each tensor."""

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
    """How messages refer to a leaf module."""
    return "the rest of forward" if name == REST else f"leaf module {name!r}"


class UnfitLeaf(TraceError):
    """A submodule cannot be a leaf module; a submodule around it may be one.

    Attributes:
        name: the submodule's name.
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{leaf_called(name)} {why}")
        self.name = name


@dataclass(frozen=True)
class Place:
    """Stands for a tensor in a pytree.

    Attributes:
        index: the tensor's index among the tensors of the pytree.
    """

    index: int


_PLAIN = (Place, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def with_places(name: str, what: str, values: Any) -> Any:
    """The inputs or results of a leaf module, with a ``Place`` instead of each tensor.

    Raises:
        UnfitLeaf: an object cannot be made with a ``Place`` in it.
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
    """Whether a leaf module can be called with the inputs that it gets while the model is traced.

    They may differ from the recorded ones in a mask that is given or left out. But inputs that hold
    tensors of the trace in an object would be wrong in every step.
    """
    leaves, known = pytree.tree_leaves(placed), pytree.tree_leaves(recorded)
    if all(isinstance(x, _PLAIN) or any(x is y for y in known) for x in leaves):
        return True
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return not any(isinstance(x, symbols) for x in leaves) and bool(placed == recorded)


def _nodes(values: Any) -> Iterator[Any]:
    """The containers of a pytree that are neither plain lists nor tuples nor dicts."""
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
    """A path into a pytree, as indices."""
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

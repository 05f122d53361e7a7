"""Inputs and results of leaf modules: pytrees in which a ``TensorPlace`` stands for each tensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxpipe.errors import TraceError, told


class UnfitLeaf(TraceError):
    """A submodule that cannot be a leaf module; one around it may be.

    Attributes:
        name: the submodule's name.
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"leaf module {name!r} {why}")
        self.name = name


@dataclass(frozen=True)
class TensorPlace:
    """Stands for a tensor in a pytree.

    Attributes:
        index: the tensor's index among the tensors of the pytree.
    """

    index: int


_PLAIN = (TensorPlace, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def refuse_objects(name: str, given: Any) -> None:
    """Check that a leaf module is given tensors in tuples, lists and dicts only: a graph makes no
    objects of other classes.

    Raises:
        UnfitLeaf: it is given another container.
    """
    if type(given) in (tuple, list, dict):
        for part in given.values() if isinstance(given, dict) else given:
            refuse_objects(name, part)
    elif [*map(id, pytree.tree_leaves(given))] != [id(given)]:
        raise UnfitLeaf(
            name,
            f"is given a {type(given).__name__}, which no graph makes; mark a module around it "
            "as the leaf, or give it tensors, tuples, lists or dicts of them",
        )


def with_places(name: str, what: str, values: Any) -> Any:
    """The inputs or results of a leaf module, with a ``TensorPlace`` instead of each tensor.

    Raises:
        UnfitLeaf: an object cannot be made with a ``TensorPlace`` in it.
    """
    places = map(TensorPlace, itertools.count())
    try:
        return pytree.tree_map_only(Tensor, lambda _: next(places), values)
    except Exception as error:
        raise UnfitLeaf(
            name,
            f"{what} an object that cannot be taken apart and put together ({told(error)}); mark a "
            "module around it as the leaf, one that takes tensors and returns tensors",
        ) from error


def can_be_given(placed: Any, recorded: Any) -> bool:
    """Whether a step can call a leaf module with the inputs that it got while it was traced.

    They may differ from the recorded ones, for example by a mask that is left out. But an object
    that hides tensors of the trace would be wrong in every step.
    """
    leaves, old = pytree.tree_leaves(placed), pytree.tree_leaves(recorded)
    if all(isinstance(x, _PLAIN) or any(x is y for y in old) for x in leaves):
        return True
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return not any(isinstance(x, symbols) for x in leaves) and bool(placed == recorded)


def indices(name: str, output: Any, path: Sequence[Any]) -> tuple[Any, ...]:
    """Return a pytree's key path as indices into the output of the leaf module ``name``.

    Raises:
        UnfitLeaf: an object on the path has no indices.
    """
    path_of_indices: list[Any] = []
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
        path_of_indices.append(index)
    return tuple(path_of_indices)

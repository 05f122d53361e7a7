"""How values nest: dataclasses become known to PyTorch's pytrees as they are met."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxpipe.errors import InputError


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of a value and how they nest, in dataclasses as in lists and dicts.

    Raises:
        InputError: a dataclass cannot be made again from its fields.
    """
    leaves, spec = pytree.tree_flatten(value)
    strange = {type(x): x for x in leaves if _is_made_of_fields(x)}
    if not strange:
        return leaves, spec
    for kind, example in strange.items():
        try:
            torch.export.register_dataclass(kind)
            pytree.tree_map(lambda x: x, example)
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{kind.__name__} is a dataclass that cannot be made from its fields "
                f"({error}); give it all fields as arguments, or use a dict"
            ) from error
    return flatten(value)


def _is_made_of_fields(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def bytes_of(value: Any) -> int:
    """The bytes of a tensor, or of all tensors in a nest of values."""
    return sum(
        leaf.numel() * leaf.element_size()
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, torch.Tensor)
    )

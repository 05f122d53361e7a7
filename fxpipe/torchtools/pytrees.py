"""Take values apart into their tensors.

``torch.utils._pytree`` knows tuples, lists, dicts and registered classes. A model may also return
objects of other classes with tensors in their attributes, such as a cache of keys and values: these
objects are taken apart, and dataclasses are registered.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor
from torch.utils import _pytree as pytree

from fxpipe.errors import InputError

_WHOLE = (Tensor, nn.Module, type, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Classes that are never taken apart: a symbolic size refers to the whole state of its tracer."""

_OF_PYTHON = 1 << 9
"""The flag of classes written in Python. Objects must be made by ``__new__`` of the first class in
their MRO without this flag, which is written in C."""


@dataclass(frozen=True)
class TakenApart:
    """An object that was taken apart: a pytree node, registered with PyTorch.

    Attributes:
        kind: the object's class.
        tensors: the attributes that contain tensors, at any depth.
        others: all other attributes, unchanged.
    """

    kind: type
    tensors: Mapping[str, Any]
    others: Mapping[str, Any]


pytree.register_pytree_node(
    TakenApart,
    lambda parts: (list(parts.tensors.values()), (parts.kind, tuple(parts.tensors), parts.others)),
    lambda values, context: TakenApart(
        context[0], dict(zip(context[1], values, strict=True)), context[2]
    ),
    serialized_type_name="fxpipe.torchtools.pytrees.Parts",
    flatten_with_keys_fn=lambda parts: (
        [(pytree.GetAttrKey(name), value) for name, value in parts.tensors.items()],
        (parts.kind, tuple(parts.tensors), parts.others),
    ),
)


def taken_apart(value: Any) -> Any:
    """Replace each object in a value that has tensors, and is no pytree, by its ``TakenApart``."""
    return pytree.tree_map(_Walk(), value)


def together(leaves: Sequence[Any], spec: pytree.TreeSpec) -> Any:
    """Return the value of these leaves, with objects in place of ``TakenApart``."""
    return _objects(pytree.tree_unflatten(list(leaves), spec))


def detached(value: Any) -> Any:
    """The same value; if one of its tensors has a graph of autograd, without these graphs."""
    leaves, spec = pytree.tree_flatten(taken_apart(value))
    if not any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in leaves):
        return value
    return together(pytree.tree_map_only(Tensor, Tensor.detach, leaves), spec)


class _Walk:
    """Takes objects apart, each only once: they may share parts or contain themselves."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, Any]] = {}
        """Id → the object, kept alive so that its id stays unique, and its ``TakenApart``."""

    def __call__(self, leaf: Any) -> Any:
        if isinstance(leaf, _WHOLE) or not hasattr(leaf, "__dict__"):
            return leaf
        if id(leaf) not in self._seen:
            self._seen[id(leaf)] = leaf, leaf  # in case it contains itself
            self._seen[id(leaf)] = leaf, self._parts(leaf)
        return self._seen[id(leaf)][1]

    def _parts(self, leaf: Any) -> Any:
        attributes = {name: pytree.tree_map(self, value) for name, value in vars(leaf).items()}
        tensors = {
            name: value
            for name, value in attributes.items()
            if any(isinstance(part, Tensor) for part in pytree.tree_leaves(value))
        }
        if not tensors:
            return leaf
        others = {name: value for name, value in vars(leaf).items() if name not in tensors}
        return TakenApart(type(leaf), tensors, others)


def _objects(value: Any) -> Any:
    def restored(parts: Any) -> Any:
        if not isinstance(parts, TakenApart):
            return parts
        base: Any = next(kind for kind in parts.kind.__mro__ if not kind.__flags__ & _OF_PYTHON)
        new = base.__new__(parts.kind)
        new.__dict__.update(parts.others)
        new.__dict__.update({name: _objects(inner) for name, inner in parts.tensors.items()})
        return new

    return pytree.tree_map(restored, value, is_leaf=lambda node: isinstance(node, TakenApart))


class _Others(dict[str, Any]):
    """Attributes of an object that are no part of it, in the context of its pytree."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a value and its spec, as ``tree_flatten``, but also of dataclasses, and
    of objects that are mappings, such as the batches of tokenizers.

    Raises:
        InputError: a dataclass cannot be made from its fields, or another object holds tensors.
    """
    leaves, spec = pytree.tree_flatten(value)
    unknown = {type(x): x for x in leaves if hasattr(x, "__dict__") and not isinstance(x, _WHOLE)}
    registered = False
    for kind, example in unknown.items():
        if dataclasses.is_dataclass(kind):
            _register_dataclass(kind, example)
        elif isinstance(example, UserDict):
            _register_mapping(kind)
        else:
            _refuse_tensors(example)
            continue
        registered = True
    return flatten(value) if registered else (leaves, spec)


def _register_dataclass(kind: type, example: Any) -> None:
    try:
        torch.export.register_dataclass(kind)
        pytree.tree_map(lambda x: x, example)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{kind.__name__} is a dataclass that cannot be made from its fields "
            f"({error}); give it all fields as arguments, or use a dict"
        ) from error


def _register_mapping(kind: type[UserDict[Any, Any]]) -> None:
    """Let PyTorch know a class of mappings: their entries are parts, other attributes are not."""

    def taken(mapping: UserDict[Any, Any]) -> tuple[list[Any], Any]:
        others = {name: value for name, value in vars(mapping).items() if name != "data"}
        return [*mapping.data.values()], (tuple(mapping.data), _Others(others))

    def made(values: Iterable[Any], context: Any) -> UserDict[Any, Any]:
        mapping = kind.__new__(kind)
        vars(mapping).update(context[1], data=dict(zip(context[0], values, strict=True)))
        return mapping

    pytree.register_pytree_node(
        kind,
        taken,
        made,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=lambda mapping: (
            [(pytree.MappingKey(name), value) for name, value in mapping.data.items()],
            taken(mapping)[1],
        ),
    )


def _refuse_tensors(value: Any) -> None:
    """Raise InputError if an object holds tensors, of which each micro-batch would get all."""
    parts = taken_apart(value)
    if isinstance(parts, TakenApart):
        kind, names = type(value).__name__, ", ".join(parts.tensors)
        raise InputError(
            f"the batch has a {kind}, which holds tensors ({names}) and cannot be split into "
            "micro-batches; give these tensors as arguments, or in a dict or a dataclass, and let "
            f"the model's forward make the {kind}; where it is a cache of keys and values, leave "
            "it out (use_cache=False)"
        )


def bytes_of(value: Any) -> int:
    """The bytes of all tensors in a pytree."""
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    return sum(map(size_in_bytes, tensors))


def memory(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage, and is the same for its views. Inside
    ``vmap`` it is the storage of the whole batch."""
    while is_batchedtensor(tensor):
        tensor = get_unwrapped(tensor)
    return int(tensor.untyped_storage()._cdata)


BLOCK = 512
"""The bytes of which devices with memory of their own hand out multiples, as CUDA's allocator."""


def size_in_bytes(tensor: Tensor) -> int:
    """The bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def in_blocks(size: int, block: int) -> int:
    """The least multiple of ``block`` that is not below ``size``."""
    return -(-size // block) * block

"""A call's inputs split into micro-batches, and its outputs joined again."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxpipe.errors import InputError


@dataclass(frozen=True)
class Batch:
    """The inputs of one call, flat.

    Attributes:
        leaves: all tensors and other values in order: positional, keyword (by name), targets.
        spec: how they nest: ``(args, kwargs, targets)``.
        names: what each leaf is called in messages.
        size: the batch size: dimension 0 of every tensor that is split.
        inputs: how many of the leaves are inputs of the model; the rest are targets.
    """

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    names: tuple[str, ...]
    size: int
    inputs: int

    @staticmethod
    def of(
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        targets: Sequence[Any] = (),
    ) -> Batch:
        """Flatten a call.

        Raises:
            InputError: the arguments do not fit the model, no tensor has a batch dimension, or
                batch sizes disagree.
        """
        try:
            inspect.signature(model.forward).bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(
                f"the inputs do not fit {type(model).__name__}.forward: {error}"
            ) from None
        ordered = {name: kwargs[name] for name in sorted(kwargs)}
        with_paths, spec = pytree.tree_flatten_with_path((tuple(args), ordered, tuple(targets)))
        names = tuple(_name(model, path, len(targets)) for path, _ in with_paths)
        leaves = tuple(leaf for _, leaf in with_paths)
        count = len(pytree.tree_leaves((tuple(args), ordered)))
        return Batch(leaves, spec, names, _batch_size(leaves, names), count)

    @property
    def key(self) -> tuple[Any, ...]:
        """What a trace depends on besides the batch size."""
        return (str(self.spec), self.inputs, tuple(map(self._leaf_key, self.leaves)))

    def split(self, microbatches: int) -> list[list[Any]]:
        """The leaves of each micro-batch: sizes differ by at most one, the larger first.

        Raises:
            InputError: there are more micro-batches than samples.
        """
        if microbatches > self.size:
            raise InputError(
                f"microbatches is {microbatches} and the batch has {self.size} samples; give at "
                f"most {self.size} micro-batches or a larger batch"
            )
        parts = [
            leaf.detach().tensor_split(microbatches)
            if self.is_split(leaf)
            else [leaf.detach() if isinstance(leaf, Tensor) else leaf] * microbatches
            for leaf in self.leaves
        ]
        return [list(microbatch) for microbatch in zip(*parts, strict=True)]

    def sizes(self, microbatches: int) -> list[int]:
        """Samples in each micro-batch."""
        base, more = divmod(self.size, microbatches)
        return [base + (i < more) for i in range(microbatches)]

    def is_split(self, leaf: Any) -> bool:
        """Whether a leaf is a tensor whose dimension 0 is the batch; others are repeated."""
        return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == self.size

    def unflatten(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """``(args, kwargs, targets)`` of a micro-batch's leaves."""
        args, kwargs, targets = pytree.tree_unflatten(list(leaves), self.spec)
        return args, kwargs, targets

    def _leaf_key(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return type(leaf), repr(leaf)
        shape = tuple(leaf.shape[1:]) if self.is_split(leaf) else tuple(leaf.shape)
        return self.is_split(leaf), leaf.dtype, leaf.device, shape


def _batch_size(leaves: Sequence[Any], names: Sequence[str]) -> int:
    found = {
        name: leaf.shape[0]
        for name, leaf in zip(names, leaves, strict=True)
        if isinstance(leaf, Tensor) and leaf.dim() > 0
    }
    if not found:
        raise InputError("no input is a tensor with a batch dimension; give at least one")
    if 0 in found.values():
        name = next(name for name, size in found.items() if size == 0)
        raise InputError(f"{name} has no samples (dimension 0 is 0); give a batch that has some")
    sizes = {size for size in found.values() if size != 1}  # a single row is for every sample
    if len(sizes) > 1:
        shown = ", ".join(f"{name} has {size}" for name, size in found.items())
        raise InputError(
            f"the inputs disagree about the batch size (dimension 0): {shown}; give tensors of "
            "one batch size, or of size 1 where every sample shares them"
        )
    return sizes.pop() if sizes else 1


def _name(model: nn.Module, path: Sequence[Any], targets: int) -> str:
    """``x``, ``mask['left']``, ``target[0]``: how a user would write a leaf."""
    part, *rest = path
    which = getattr(part, "idx", 0)
    if which == 0:
        names = [
            p.name
            for p in inspect.signature(model.forward).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        index = rest[0].idx
        head = names[index] if index < len(names) else f"argument {index}"
        rest = rest[1:]
    elif which == 1:
        head, rest = str(rest[0].key), rest[1:]
    else:
        head, rest = "target", rest if targets > 1 else rest[1:]
    return head + pytree.keystr(tuple(rest))


def join(parts: Sequence[Any], sizes: Sequence[int], batched: bool | None, name: str) -> Any:
    """One output of the whole batch from those of its micro-batches.

    Tensors whose dimension 0 is the batch are concatenated, numbers without dimension averaged
    by samples; anything else must be the same in every micro-batch.

    Args:
        parts: the output of each micro-batch.
        sizes: samples in each.
        batched: whether dimension 0 is the batch; None to tell by the sizes.
        name: what the output is called in the error.

    Raises:
        InputError: the parts differ and cannot be joined.
    """
    first = parts[0]
    if not isinstance(first, Tensor):
        if all(part == first for part in parts):
            return first
    elif first.dim() == 0 and (first.is_floating_point() or first.is_complex()):
        total = sum(size for size in sizes)
        weighted = [part * (size / total) for part, size in zip(parts, sizes, strict=True)]
        return sum(weighted[1:], start=weighted[0])
    else:
        by_size = first.dim() > 0 and all(
            part.shape[0] == size for part, size in zip(parts, sizes, strict=True)
        )
        if by_size and batched is not False:
            return torch.cat(list(parts))
        if all(torch.equal(part, first) for part in parts):
            return first
    raise InputError(
        f"{name} differs between micro-batches and has no batch dimension to join it along; "
        "return it per sample, or only the mean as a scalar"
    )

"""The plain training loop on one device, without fxpipe, that every pipeline must equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Looped:
    """The results of the loop over the micro-batches.

    Attributes:
        loss: the sum of the micro-batches' losses, each weighted by its share of the batch.
        sizes: micro-batch → its number of samples.
        outputs: micro-batch → the model's output, detached.
    """

    loss: Tensor
    sizes: list[int]
    outputs: list[Any]

    @property
    def output(self) -> Any:
        """The concatenated outputs of the micro-batches, which must be tensors with rows."""
        return pytree.tree_map(lambda *parts: torch.cat(parts), *self.outputs)


def train(
    model: nn.Module,
    microbatches: int,
    *args: Any,
    loss: Callable[..., Tensor] | None = None,
    target: Any = None,
    weight: Callable[..., Any] | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    order: Sequence[int] | None = None,
    **kwargs: Any,
) -> Looped:
    """Run forward and backward of one batch; adds the gradients to ``.grad``.

    Args:
        model: the model.
        microbatches: how many micro-batches the batch is split into.
        *args: inputs; tensors with as many rows as the first one are split.
        loss: ``loss(output, *targets)``; None if the model returns ``{"loss": …}``.
        target: a tensor or a tuple of tensors.
        weight: targets of a micro-batch → the weight of its loss, by default its rows.
            Micro-batches of weight 0 are left out.
        order: the micro-batches in the order of their backwards, after all forwards; by default
            each backward follows its forward.
        around: context for forward and loss, but not backward, such as autocast.
        **kwargs: keyword inputs.
    """
    targets = () if target is None else target if isinstance(target, tuple) else (target,)
    rows = _rows((args, kwargs))
    total: Tensor | None = None
    losses: list[Tensor] = []
    sizes: list[int] = []
    outputs: list[Any] = []
    parts = split((args, kwargs, targets), rows, microbatches)
    counts = [_rows(part[:2]) if weight is None else float(weight(*part[2])) for part in parts]
    every = rows if weight is None else sum(counts)
    for (part_args, part_kwargs, part_targets), count in zip(parts, counts, strict=True):
        with around():
            output = model(*part_args, **part_kwargs)
            part = output["loss"] if loss is None else loss(output, *part_targets)
        sizes.append(_rows((part_args, part_kwargs)))
        if count:
            part = part * (count / every)
            if order is None:
                part.backward()
            total = part.detach() if total is None else total + part.detach()
        losses.append(part)
        outputs.append(pytree.tree_map_only(Tensor, torch.detach, output))
    for i in order or ():
        losses[i].backward()
    assert total is not None
    return Looped(total, sizes, outputs)


def split(inputs: Any, rows: int, microbatches: int) -> list[Any]:
    """Split the inputs into micro-batches; tensors without ``rows`` rows are repeated."""
    leaves, spec = pytree.tree_flatten(inputs)
    columns = [
        leaf.tensor_split(microbatches)
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == rows
        else [leaf] * microbatches
        for leaf in leaves
    ]
    return [pytree.tree_unflatten(list(row), spec) for row in zip(*columns, strict=True)]


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Name of a parameter → a copy of its ``.grad``."""
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def clear(*models: nn.Module) -> None:
    """Set all gradients to None."""
    for model in models:
        model.zero_grad(set_to_none=True)


def assert_same(
    ours: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], bound: float = 0.0
) -> None:
    """Check that both have the same names, with None for the same ones, and the same tensors.

    Args:
        ours: the results of fxpipe.
        expected: the results of the loop.
        bound: how far entries may differ, relative to the largest; 0 requires the same bits.
    """
    assert list(ours) == list(expected)
    wrong = [name for name in ours if not _alike(ours[name], expected[name], bound)]
    assert not wrong, "; ".join(
        f"{name}: {_shown(ours[name])}, expected {_shown(expected[name])}" for name in wrong
    )


def _alike(ours: Tensor | None, expected: Tensor | None, bound: float) -> bool:
    if ours is None or expected is None:
        return ours is expected
    if ours.shape != expected.shape or ours.dtype != expected.dtype:
        return False
    if not bound or not expected.is_floating_point():
        return torch.equal(ours, expected)
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return torch.allclose(ours, expected, rtol=0.0, atol=bound * max(scale, 1.0))


def _shown(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {tensor.tolist()!r:.300}"


def _rows(inputs: Any) -> int:
    return max(len(x) for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor) and x.dim())

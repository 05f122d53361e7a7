"""What has to be the same for a call on all ranks, as text that they compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fxpipe.compiler.compiled import Kind
from fxpipe.runtime.batch import MicroBatches
from fxpipe.runtime.ranks.message import digest


def described(
    micro: MicroBatches,
    kind: Kind,
    state: ModelState,
    batches: int,
    *,
    compiles: bool,
    first: bool,
) -> tuple[str, str]:
    """What must be the same for a call on all ranks, and on those of a replica.

    Args:
        micro: its micro-batches.
        kind: what it is for.
        state: the state that the model is in.
        batches: how many batches were trained on.
        compiles: whether it is compiled anew; then the values of its inputs count, too.
        first: whether no call was before; then the shapes are the same in all replicas.
    """
    batch = micro.batch
    shown = [
        f"{tuple(leaf.shape)} {leaf.dtype}" + ", requires grad" * leaf.requires_grad
        if isinstance(leaf, torch.Tensor)
        else repr(leaf)
        for leaf in batch.leaves
    ]
    common = [
        f"{kind.purpose} in {len(micro)} micro-batches",
        f"batch number {batches}",
        f"updates: {kind.updates}",
        f"outputs: {kind.outputs}",
        *state.common,
    ]
    shapes = [
        f"a batch of {batch.size} samples",
        *(f"{name}: {leaf}" for name, leaf in zip(batch.names, shown, strict=True)),
    ]
    values = [
        "it is compiled anew" if compiles else "it is compiled already",
        *(
            f"{name}: {tuple(leaf.shape)} {leaf.dtype}, {digest(leaf)}"
            for name, leaf in zip(batch.names, batch.leaves, strict=True)
            if compiles and isinstance(leaf, torch.Tensor)
        ),
        state.own,
    ]
    if first:
        common += shapes
    return "\n".join(common), "\n".join([*shapes, *values])


class ModelState(NamedTuple):
    """What a call depends on besides its inputs, as text.

    Attributes:
        common: lines that have to be the same on all ranks.
        own: a line that has to be the same on the ranks of a replica.
    """

    common: Sequence[str]
    own: str


def state_told(model: nn.Module, state: tuple[Any, ...]) -> ModelState:
    """The state of a model's guards as text.

    Args:
        model: the model.
        state: what ``Guards.state`` gave.
    """
    variant, flags, trained, cast, number = state
    mode = "training" if model.training else "evaluation"
    if any(flag != model.training for flag in flags):
        others = [name for name, each in model.named_modules() if each.training != model.training]
        mode += f" mode, but for {', '.join(others)}"
    else:
        mode += " mode"
    frozen: list[str] = []
    if not all(trained):
        frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
    common = [
        f"the pipe is in {mode}",
        f"parameters without gradients: {', '.join(frozen) or 'none'}",
        f"autocast: {cast or 'none'}",
        f"the default type of numbers: {number}",
    ]
    # replicas with batches of other shapes may know other states
    return ModelState(common, f"attributes, globals and hooks that its code reads: state {variant}")


__all__ = ["ModelState", "described", "state_told"]

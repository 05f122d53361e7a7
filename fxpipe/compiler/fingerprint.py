"""What has to be the same for a call on all ranks, as text that they compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fxpipe.compiler.compiled import Kind
from fxpipe.runtime.batch import MicroBatches
from fxpipe.runtime.ranks.message import digest


def fingerprint(
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
    since = "new" if state.since is None else f"those of call {state.since}"
    values = [
        "it is compiled anew" if compiles else "it is compiled already",
        *(
            f"{name}: {tuple(leaf.shape)} {leaf.dtype}, {digest(leaf)}"
            for name, leaf in zip(batch.names, batch.leaves, strict=True)
            if compiles and isinstance(leaf, torch.Tensor)
        ),
        f"attributes, globals and hooks that its code reads: {since}",
    ]
    if first:
        common += shapes
    return "\n".join(common), "\n".join([*shapes, *values])


class ModelState(NamedTuple):
    """What a call depends on besides its inputs, as text.

    Attributes:
        common: lines that have to be the same on all ranks.
        since: the number of the call in which it was compiled; None if it was not. It has to be the
            same on the ranks of a replica, and tells apart states of what the model's code reads.
            Replicas whose batches have other shapes may have compiled in other calls.
    """

    common: Sequence[str]
    since: int | None


def state_text(model: nn.Module, state: tuple[Any, ...]) -> list[str]:
    """The state of a model's guards as lines of text, but for the values that its code reads.

    Args:
        model: the model.
        state: what ``Guards.state`` gave.
    """
    _, flags, trained, _, cast, number = state
    mode = "training" if model.training else "evaluation"
    if any(flag != model.training for flag in flags):
        others = [name for name, each in model.named_modules() if each.training != model.training]
        mode += f" mode, but for {', '.join(others)}"
    else:
        mode += " mode"
    frozen: list[str] = []
    if not all(trained):
        frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
    return [
        f"the pipe is in {mode}",
        f"parameters without gradients: {', '.join(frozen) or 'none'}",
        f"autocast: {cast or 'none'}",
        f"the default type of numbers: {number}",
    ]

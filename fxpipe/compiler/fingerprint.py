"""Describe a call as text, so that ranks can check that all of them make the same call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fxpipe.compiler.compiled import Kind
from fxpipe.formatting import without_addresses
from fxpipe.runtime.batch import MicroBatches
from fxpipe.torchtools.pytrees import digest


def fingerprint(
    micro: MicroBatches,
    kind: Kind,
    state: ModelState,
    batches: int,
    *,
    compiles: bool,
    first: bool,
) -> tuple[str, str]:
    """Return two texts: what must be the same for a call on all ranks, and on those of a replica.

    Args:
        batches: the number of batches that were trained on.
        compiles: whether the call is compiled anew; then the values of its inputs count, too.
        first: whether it is the first call; then shapes must be the same in all replicas.
    """
    batch = micro.batch
    leaves = [
        f"{tuple(leaf.shape)} {leaf.dtype}" + ", requires grad" * leaf.requires_grad
        if isinstance(leaf, torch.Tensor)
        else without_addresses(repr(leaf))
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
        *(f"{name}: {leaf}" for name, leaf in zip(batch.names, leaves, strict=True)),
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
    """The state of the model that a call depends on.

    Attributes:
        common: lines of text that have to be the same on all ranks.
        since: the number of the call in which this call was compiled; None if it was not. It stands
            for the Python state that the model's code reads, and has to be the same on the ranks of
            a replica. Replicas whose batches have other shapes may have compiled in other calls.
    """

    common: Sequence[str]
    since: int | None


def state_text(model: nn.Module, state: tuple[Any, ...]) -> list[str]:
    """The state that ``Guard.state`` returned as lines of text, without the values that the
    model's code reads."""
    _, flags, trained, _, cast, dtype = state
    mode = f"{'training' if model.training else 'evaluation'} mode"
    if any(flag != model.training for flag in flags):
        others = [name for name, each in model.named_modules() if each.training != model.training]
        mode += f", but for {', '.join(others)}"
    frozen: list[str] = []
    if not all(trained):
        frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
    return [
        f"the pipe is in {mode}",
        f"parameters without gradients: {', '.join(frozen) or 'none'}",
        f"autocast: {cast or 'none'}",
        f"the default type of numbers: {dtype}",
    ]

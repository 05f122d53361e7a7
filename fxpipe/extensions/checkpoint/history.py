"""The older versions of the weights that later batches may read, where batches overlap."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fxpipe.extensions.checkpoint.content import History
from fxpipe.extensions.overlapping.stage_weights import StageWeights, copy_of
from fxpipe.extensions.overlapping.versions import VersionedWeights

Targets = Mapping[str, str]
"""Each name of a parameter in the model → its first name."""


def history_of(versions: VersionedWeights, targets: Targets, *, changed: bool) -> History:
    """The versions for a checkpoint, while no batch is in flight. If the user ``changed``
    parameters since the last batch, the next batch reads no older version."""
    newest, kept = versions.slowest, dict[int, dict[str, Tensor]]()
    if changed:
        return History(newest, newest)
    for stage in versions.stages:
        for version, tensors in stage.live.items():
            if stage.optimizer is not None and 0 < stage.newest - version <= stage.delay:
                kept.setdefault(version, {}).update(
                    (targets[name], tensor)
                    for name, tensor in tensors.items()
                    if tensor.requires_grad and name in targets
                )
    return History(newest, versions.base, kept)


def resume(versions: VersionedWeights, history: History, targets: Targets) -> None:
    """Give the versions their values; the parameters have those of the newest one already.

    A parameter may lack older versions, as the stage that it was on needed fewer. Its oldest value
    then stands for them.
    """
    versions.restart(history.newest)
    versions.base = max(history.base, min(history.older, default=history.newest))
    for stage in versions.stages:
        stage.oldest = max(versions.base, stage.newest - stage.delay)
        for version in range(stage.oldest, stage.newest):
            stage.live[version] = _restored(stage, version, history, targets)


def _restored(
    stage: StageWeights, version: int, history: History, targets: Targets
) -> dict[str, Tensor]:
    """A copy of a known version, or of the newest where it lacks a parameter."""
    tensors = copy_of(stage.live[stage.newest], {})
    with torch.no_grad():
        for name, tensor in tensors.items():
            value = _since(history, version, targets[name])
            if tensor.requires_grad and value is not None:
                tensor.copy_(value)
    return tensors


def _since(history: History, version: int, name: str) -> Tensor | None:
    """A parameter's value in a version, or in the oldest later version that has one."""
    later = [v for v, tensors in history.older.items() if v >= version and name in tensors]
    return history.older[min(later)][name] if later else None

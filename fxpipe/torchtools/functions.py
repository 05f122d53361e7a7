"""Let reentrant checkpoints just compute their content: graphs leave checkpoints out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction


@contextmanager
def checkpoints_opened() -> Iterator[None]:
    """Let reentrant checkpoints inside the block, which runs while no pipe does, just compute their
    content. Their own backward calls autograd, which ``torch.autograd.grad`` refuses."""
    around = "apply" in vars(CheckpointFunction)
    setattr(CheckpointFunction, "apply", staticmethod(_computed))  # noqa: B010
    try:
        yield
    finally:
        if not around:
            delattr(CheckpointFunction, "apply")  # that of its base class again


def _computed(run: Any, _: bool, *args: Any) -> Any:
    # without an input that requires a gradient, a checkpoint has no backward
    needed = any(isinstance(value, Tensor) and value.requires_grad for value in args)
    with torch.set_grad_enabled(torch.is_grad_enabled() and needed):
        return run(*args)

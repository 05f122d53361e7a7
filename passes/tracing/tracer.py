"""What stands for submodules that are called as they are while a model is traced."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn


class UntracedCalls(Protocol):
    """The calls, in a run of a model, of submodules that its graph is to call as they are."""

    def opaque(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, each of these calls is one operation, for the model to be traced."""

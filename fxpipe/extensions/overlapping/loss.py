"""The loss of a batch that is in flight."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fxpipe.runtime.loss import StepLoss


class PendingLoss(StepLoss):
    """A scalar tensor whose value comes later.

    Every operation on it, by PyTorch or by Python, first waits for the value and then uses a plain
    tensor. So a training loop that does not read its losses never waits for them.
    """

    _wait: Callable[[], None] | None
    _value: Tensor

    @staticmethod
    def __new__(cls, dtype: torch.dtype, wait: Callable[[], None]) -> PendingLoss:
        """Make a loss without a value. ``wait`` returns once ``come`` was called, or raises the
        error that prevents the value."""
        pending: PendingLoss = torch.Tensor._make_subclass(cls, torch.zeros((), dtype=dtype))
        with torch._C.DisableTorchFunctionSubclass():
            pending._value = torch.zeros((), dtype=dtype)
            pending._wait = wait
        return pending

    def come(self, value: Tensor) -> None:
        """Set the value."""
        with torch._C.DisableTorchFunctionSubclass():
            self._value = value
            self._wait = None  # last: a thread that sees None reads the value

    def read(self) -> Tensor:
        """The value, as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            wait = self._wait  # read once: another thread may clear it meanwhile
            if wait is not None:
                wait()
            return self._value

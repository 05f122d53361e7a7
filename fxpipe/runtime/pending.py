"""A loss that is still on its way: a tensor that is waited for when it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class PendingLoss(Tensor):
    """A scalar whose value comes later, as that of a tensor on a CUDA device does.

    Whatever is done with it, by PyTorch or by Python, waits for the value first and goes on with
    a plain tensor. So a training loop that reads its losses seldom never waits for them.
    """

    _wait: Callable[[], None] | None
    _value: Tensor

    @staticmethod
    def __new__(cls, dtype: torch.dtype, wait: Callable[[], None]) -> PendingLoss:
        """A loss that has not come.

        Args:
            dtype: of the value.
            wait: returns once ``come`` was called, or raises what keeps it from coming.
        """
        pending: PendingLoss = torch.Tensor._make_subclass(cls, torch.zeros((), dtype=dtype))
        with torch._C.DisableTorchFunctionSubclass():
            pending._value = torch.zeros((), dtype=dtype)
            pending._wait = wait
        return pending

    def come(self, value: Tensor) -> None:
        """This is the value."""
        with torch._C.DisableTorchFunctionSubclass():
            self._value = value
            self._wait = None  # last: whoever sees it reads the value

    def read(self) -> Tensor:
        """The value, as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            wait = self._wait  # the value may come in another thread
            if wait is not None:
                wait()
            return self._value

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        def plain(value: Any) -> Any:
            return value.read() if isinstance(value, PendingLoss) else value

        return func(*pytree.tree_map(plain, args), **pytree.tree_map(plain, dict(kwargs or {})))

"""The loss that a step returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxpipe.errors import InputError


class StepLoss(Tensor):
    """A scalar whose ``backward`` says that the step has run it. In every other operation, by
    PyTorch or by Python, it is a plain tensor, and so is the result."""

    def read(self) -> Tensor:
        """The value, as a plain tensor in the same memory."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise InputError."""
        raise InputError(
            "step(...) has already run backward, and with an optimizer the update, too; leave out "
            "backward(), or, to compute a loss of your own, call the pipe: "
            "loss(pipe(x), y).backward()"
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        def plain(value: Any) -> Any:
            return value.read() if isinstance(value, StepLoss) else value

        return func(*pytree.tree_map(plain, args), **pytree.tree_map(plain, dict(kwargs or {})))

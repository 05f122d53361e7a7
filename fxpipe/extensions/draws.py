"""A dispatch mode that sees every operation that PyTorch runs, to change or watch its draws."""

from __future__ import annotations

from typing import Any

from torch._higher_order_ops import utils
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode


class Draws(TorchDispatchMode):
    """A dispatch mode that calls ``operation`` in place of every PyTorch operation.

    Attributes:
        traced: whether a higher-order operator such as ``torch.cond`` ran: it makes PyTorch trace.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traced = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.cond compile its branches; the mode still sees their operations."""
        return getattr(utils, "_in_hop_compile", bool)()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if isinstance(func, HigherOrderOperator):  # the functions that it calls may draw, too
            self.traced = True
            return func(*map(self._inside, args), **(kwargs or {}))
        return self.operation(func, args, dict(kwargs or {}))

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation."""
        return func(*args, **kwargs)

    def _inside(self, argument: Any) -> Any:
        """Wrap a higher-order operator's argument to run inside this mode, if it is a function."""
        if not callable(argument):
            return argument

        def called(*args: Any) -> Any:
            with self:
                return argument(*args)

        return called

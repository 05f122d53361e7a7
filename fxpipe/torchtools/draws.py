"""A dispatch mode that sees every operation that PyTorch runs, to change or watch its draws."""

from __future__ import annotations

from typing import Any

from torch._higher_order_ops import utils
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.errors import TraceError

_CONTROL_FLOW = ("cond", "while_loop", "map_impl", "scan", "associative_scan")


class Draws(TorchDispatchMode):
    """A dispatch mode that calls ``operation`` in place of every PyTorch operation."""

    supports_higher_order_operators = True  # such as attention that PyTorch makes of functions

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let such an operator compile what it calls."""
        return getattr(utils, "_in_hop_compile", bool)()

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if isinstance(func, HigherOrderOperator):
            if func.name() in _CONTROL_FLOW:  # threads that trace see each other's unfinished state
                raise TraceError(
                    f"a module that is called as it is calls torch's own {func.name()!r}, which "
                    "PyTorch traces anew in every step; write an if or a loop of Python instead"
                )
            return func(*args, **(kwargs or {}))
        return self.operation(func, args, dict(kwargs or {}))

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation."""
        return func(*args, **kwargs)

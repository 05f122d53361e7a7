"""Run a model whose parameters are on several devices, as it is.

before:  y = linear(x, w)            x on cuda:0, w on cuda:1
after:   y = linear(x.to("cuda:1"), w)

Parameters and buffers stay where they are, and values go to them. Autograd records each such move,
so that a backward goes the same way back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxpipe.torchtools.source import lacks_memory
from fxpipe.torchtools.state import brought

_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
"""How functions that are written in Python ask whether a mode takes their calls."""

_ON_SEVERAL = ("same device", "expected device", "different devices")

_UPDATING = ("batch_norm", "instance_norm")
"""Functions that write to buffers that they read, though their names do not say so."""

_BACKWARDS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


class Following(TorchFunctionMode):
    """Inside, operations run on the device of the parameters and buffers that they read; others,
    if their operands are on several devices, where the last of those ran.

    Args:
        model: the model.
        called: submodules that run as a whole on the device of their parameters and buffers.
    """

    def __init__(self, model: nn.Module, called: Collection[nn.Module] = ()) -> None:
        super().__init__()
        self._held = {id(x) for x in (*model.parameters(), *model.buffers())}
        self._last: torch.device | None = None
        self._called = called
        self._outside = ExitStack()

    def __enter__(self) -> Following:
        with ExitStack() as stack:
            # so that functions written in Python, which may read weights of several devices, are
            # taken apart into their operations
            stack.enter_context(_taken_apart())
            for module in self._called:
                homes = [x.device for x in (*module.parameters(), *module.buffers())]
                if homes:
                    bring = _bringing(homes[0])
                    hook = module.register_forward_pre_hook(bring, with_kwargs=True)
                    stack.callback(hook.remove)
            super().__enter__()  # type: ignore[no-untyped-call]
            self._outside = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._outside.close()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        places = {x.device for x in tensors if not x.is_cpu}
        read = [x for x in tensors if id(x) in self._held and not x.is_cpu]
        if read:
            self._last = max(read, key=Tensor.numel).device
        name = getattr(func, "__name__", "")
        if len(places) < 2 or func in _BACKWARDS or name == "__set__":
            return func(*args, **kwargs)
        target = self._last if self._last in places else tensors[-1].device
        assert target is not None
        written = kwargs.get("out", args[0] if _writes(name) else None)
        if not isinstance(written, Tensor) or written.device == target:
            given = args, kwargs
            args, kwargs = _on(given, target)
            result = func(*args, **kwargs)
            if name in _UPDATING:
                self._put_back(given, (args, kwargs))
            return result
        if not read:  # a value is written where it is
            args, kwargs = _on((args, kwargs), written.device)
            return func(*args, **kwargs)
        args, kwargs = _on((args, kwargs), target)
        func(*args, **kwargs)
        return written.copy_(kwargs.get("out", args[0]))

    def _put_back(self, given: Any, moved: Any) -> None:
        """Copy to the model's buffers what was written to their copies."""
        pairs = zip(pytree.tree_leaves(given), pytree.tree_leaves(moved), strict=True)
        with torch.no_grad():
            for here, there in pairs:
                if here is not there and id(here) in self._held and not here.requires_grad:
                    here.copy_(there)


def is_of_devices(error: BaseException) -> bool:
    """Whether an error inside came of operands on several devices, as custom operations may read
    them, or of a device's memory."""
    return lacks_memory(error) or any(text in str(error) for text in _ON_SEVERAL)


def _writes(name: str) -> bool:
    """Whether the method of a tensor with this name writes into it."""
    if name.startswith("__"):
        return name == "__setitem__" or (name[:3] == "__i" and hasattr(Tensor, f"__{name[3:]}"))
    return name.endswith("_")


def _on(values: Any, device: torch.device) -> Any:
    """The same values, but all tensors that are not on the CPU are on a device."""

    def move(value: Tensor) -> Tensor:
        return value if value.is_cpu else brought(value, device)

    return pytree.tree_map_only(Tensor, move, values)


def _bringing(device: torch.device) -> Callable[..., Any]:
    def bring(module: nn.Module, args: Sequence[Any], kwargs: Any) -> Any:
        return _on((tuple(args), kwargs), device)

    return bring


@contextmanager
def _taken_apart() -> Iterator[None]:
    """Inside, for this thread the functions in ``torch.nn.functional`` that are written in Python
    leave it to the operations that they call to ask for modes."""
    names, thread = vars(functional), threading.get_ident()
    before = {name: names[name] for name in _ASKS}

    def asking(ask: Callable[..., bool]) -> Callable[..., bool]:
        return lambda *args: threading.get_ident() != thread and ask(*args)

    names.update((name, asking(ask)) for name, ask in before.items())
    try:
        yield
    finally:
        names.update(before)

"""Count the bytes that operations take, by storage."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.torchtools.pytrees import BLOCK, in_blocks


class Counting(TorchDispatchMode):
    """Counts the bytes of the results of operations, by storage, until they are freed.

    Torch's CPU allocator has no counters. Use this for measurements only: it slows every operation
    down. A storage counts once, in full, however many views share it. Memory that an operation
    allocates and frees before it returns is not seen.

    Attributes:
        alive: the bytes that are alive now.
        peak: the most bytes that were alive at once; the caller may reset it.
    """

    supports_higher_order_operators = True  # such as torch.cond, counted by its results

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled is compiled inside, too; dynamo would never compile a function again
        that it has once met in a mode."""
        return True

    def __init__(self, *, meta: int = 0) -> None:
        """``meta`` tells whether tensors on the meta device count, as if they had data, and of how
        many bytes their memory is a multiple: 0 if they do not count."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._meta = meta
        self.alive = 0
        self.peak = 0
        # storage → a weak reference to it, and whether it counts
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._lock = threading.RLock()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if func is not torch.ops.aten.lift_fresh.default:  # its argument is new, from torch.tensor
            self.adopt((args, named), counted=False)
        result = func(*args, **named)
        self.adopt(result)
        return result

    def adopt(self, values: Any, *, counted: bool = True) -> None:
        """Register the tensors in nested containers until they are freed, unless they are
        registered already. ``counted`` tells whether they count."""
        for leaf in (values,) if isinstance(values, Tensor) else pytree.tree_leaves(values):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:  # others have no storage
                if self._meta or not leaf.is_meta:
                    self._adopt(leaf.untyped_storage(), counted)

    def _adopt(self, storage: torch.UntypedStorage, counted: bool) -> None:
        key = storage._cdata
        block = {"cpu": 1, "meta": self._meta}.get(storage.device.type, BLOCK)
        size = in_blocks(storage.nbytes(), block) if counted else 0

        def forget(_: object) -> None:
            with self._lock:
                self._known.pop(key, None)
                self.alive -= size

        with self._lock:
            if key not in self._known:
                self._known[key] = weakref.ref(storage, forget)
                self.alive += size
                self.peak = max(self.peak, self.alive)

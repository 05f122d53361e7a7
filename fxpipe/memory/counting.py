"""Counts the bytes of the tensors that are alive, by storage, on any device.

It is needed as torch's CPU allocator has no counters. Use it for measurements only, as it slows
every operation down.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.torchtools.pieces import pieces


class Counting(TorchDispatchMode):
    """While this mode is active, each result of an operation is counted until it is freed.

    A view shares its base's storage, which counts once, with its full size. Memory that an
    operation allocates and frees before it returns is not seen.

    Attributes:
        alive: the bytes that are alive now.
        peak: the most bytes that were alive at once; the caller may reset it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
        if func is not torch.ops.aten.lift_fresh.default:  # what torch.tensor has just made
            self.adopt((args, named), counted=False)
        made = func(*args, **named)
        self.adopt(made)
        return made

    def adopt(self, values: Any, *, counted: bool = True) -> None:
        """Register existing tensors until they are freed.

        Args:
            values: tensors in nested containers; tensors that are registered already do not
                change.
            counted: whether they count.
        """
        for leaf in pytree.tree_leaves(values):
            if isinstance(leaf, Tensor):
                for piece in pieces(leaf):
                    self._adopt(piece.untyped_storage(), counted)

    def _adopt(self, storage: torch.UntypedStorage, counted: bool) -> None:
        key = storage._cdata
        size = storage.nbytes() if counted else 0

        def forget(_: object) -> None:
            with self._lock:
                self._known.pop(key, None)
                self.alive -= size

        with self._lock:
            if key not in self._known:
                self._known[key] = weakref.ref(storage, forget)
                self.alive += size
                self.peak = max(self.peak, self.alive)

"""Count the bytes of the tensors that are alive, by storage, on any device.

The CPU's allocator counts nothing. For measurements alone: it slows every operation down.
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
    """While it is active, what operations make is counted from then until it is freed.

    Views lie in the storage of what they show, which counts once and whole. What an operation
    allocates for itself and frees before it returns is not seen.

    Attributes:
        alive: bytes now.
        peak: the most at once; may be set back.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = 0
        self.peak = 0
        # storage → itself, weakly, and whether it counts
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
        """Know the tensors in something, from now on and until they are freed.

        Args:
            values: tensors, in any nest of containers; those that are known already stay as they
                are.
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

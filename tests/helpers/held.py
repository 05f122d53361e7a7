"""Count the memory of what operations make."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Held(TorchDispatchMode):
    """Counts the memory of what operations make, as long as it lives; nothing for tensors without
    data.

    Attributes:
        most: the most bytes at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._sizes: dict[int, int] = {}
        self._alive = Counter[int]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        taken = pytree.tree_leaves((args, kwargs))
        given = {x.data_ptr() for x in taken if isinstance(x, Tensor) and not _hollow(x)}
        for made in pytree.tree_leaves(result):
            if not isinstance(made, Tensor) or _hollow(made):
                continue
            if made.data_ptr() not in given:
                storage = made.untyped_storage()
                self._sizes[storage.data_ptr()] = storage.nbytes()
                self._alive[storage.data_ptr()] += 1
                weakref.finalize(storage, self._drop, storage.data_ptr())
        self.most = max(self.most, sum(self._sizes[x] for x in self._alive))
        return result

    def _drop(self, place: int) -> None:
        self._alive[place] -= 1
        self._alive += Counter[int]()


def _hollow(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta

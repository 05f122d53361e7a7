"""CUDA graphs on the CPU: operations are recorded with the memory that they use, and done again.

It is as unforgiving as the real ones. A capture computes nothing: what it has made is garbage until
it is replayed. A replay reads and writes where the capture did, and never looks at Python again.
What was made in it and is held by nobody is garbage after every replay, as other captures of
the pool may use that memory. So is, before it, all that later captures of the pool have made, held
or not: they may have found room where this one needs it for a moment. To ask the device something
fails; so does a second capture at a time. A pool cannot be used again when its only graph is gone,
or while a broken capture still allocates in it, as before torch 2.12.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.runtime.devices.lanes import ALONE

REFUSED = "CUDA error: operation not permitted when stream is capturing"


class Recorder(TorchDispatchMode):
    """Does what it is given, and notes it with the memory of all tensors."""

    def __init__(self, refuses: Mapping[str, Exception]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refuses = refuses
        self.operations: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []
        self.fresh: dict[int, list[Tensor]] = {}
        self.seen: list[tuple[int, weakref.ref[Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            raise torch.AcceleratorError(REFUSED)
        name = func._schema.name.partition("::")[2].rstrip("_")
        if name in self.refuses:
            raise self.refuses[name]
        kwargs = kwargs or {}
        used = pytree.tree_map_only(Tensor, _alias, (args, kwargs))
        known = {_storage(x) for x in pytree.tree_leaves(used) if isinstance(x, Tensor)}
        made = func(*args, **kwargs)
        results = []
        for place, value in enumerate(pytree.tree_leaves(made)):
            if isinstance(value, Tensor):
                self.seen.append((_storage(value), weakref.ref(value)))
                if _storage(value) not in known:
                    results.append((place, _alias(value)))
                    self.fresh.setdefault(_storage(value), []).append(_alias(value))
        if results or func._schema.is_mutable:
            self.operations.append((func, *used, results))
        return made

    def replay(self) -> None:
        for func, args, kwargs, results in self.operations:
            again = pytree.tree_leaves(func(*args, **kwargs))
            for place, mine in results:
                mine.copy_(again[place])
        self.forget(unheld=True)

    def forget(self, *, unheld: bool) -> None:
        """Overwrite what was made; if asked, only what nobody has."""
        held = {storage for storage, tensor in self.seen if unheld and tensor() is not None}
        for storage, tensors in self.fresh.items():
            for tensor in tensors if storage not in held else ():
                tensor.fill_(float("nan") if tensor.is_floating_point() else 113)


def _alias(tensor: Tensor) -> Tensor:
    """The same memory, whatever becomes of the tensor."""
    return tensor.detach()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Graphs:
    """What a test can look at.

    Attributes:
        captures: how many captures were done.
        refuses: operation's name → what it raises inside a capture.
        replays: how many replays.
        pools: pool → its captures, in order; None when it cannot be used again.
        capturing: whether one goes on.
        allocating: the pools in which a capture allocates.
    """

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0
        self.pools: dict[Any, Any] = {}
        self.capturing = False
        self.allocating: set[Any] = set()
        self.refuses: dict[str, Exception] = {}


def install(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Put them in place of those of torch.cuda."""
    counted = Graphs()
    numbers = itertools.count(1)

    class CUDAGraph:
        def __init__(self) -> None:
            self.recorder = Recorder(counted.refuses)
            self.pool: Any = None

        def replay(self) -> None:
            counted.replays += 1
            own = counted.pools[self.pool]
            with torch.no_grad():
                for later in own[own.index(self.recorder) + 1 :]:
                    later.forget(unheld=False)
                self.recorder.replay()

    class Capture:
        def __init__(
            self, graph: CUDAGraph, pool: Any, stream: Any, capture_error_mode: str
        ) -> None:
            assert capture_error_mode == "thread_local"
            assert stream != torch.cuda.default_stream()
            self.graph = graph
            graph.pool = pool

        def __enter__(self) -> None:
            assert not counted.capturing, "two captures at a time"
            assert not counted.allocating, "a broken capture goes on to allocate"
            assert counted.pools.setdefault(self.graph.pool, []) is not None, "the pool is gone"
            counted.allocating.add(self.graph.pool)
            assert ALONE._is_owned()  # type: ignore[attr-defined]
            counted.capturing = True
            self.graph.recorder.__enter__()  # type: ignore[no-untyped-call]

        def __exit__(self, *error: Any) -> None:
            self.graph.recorder.__exit__(*error)  # type: ignore[no-untyped-call]
            counted.capturing = False
            counted.captures += 1
            if error[0] is not None and not issubclass(error[0], torch.OutOfMemoryError):
                if torch.__version__ >= (2, 12):  # type: ignore[operator]
                    counted.allocating.clear()
                raise torch.AcceleratorError("CUDA error: the capture was invalidated")
            counted.allocating.clear()
            if error[0] is not None:  # the capture was ended; its graph is about to go
                counted.pools[self.graph.pool] = counted.pools[self.graph.pool] or None
                return
            self.graph.recorder.forget(unheld=False)
            counted.pools[self.graph.pool].append(self.graph.recorder)

    for name, value in {
        "CUDAGraph": CUDAGraph,
        "graph": Capture,
        "graph_pool_handle": lambda: (0, next(numbers)),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def end_allocate(device: int, pool: Any) -> None:
        if pool not in counted.allocating:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        counted.allocating.discard(pool)

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocate, raising=False)
    return counted

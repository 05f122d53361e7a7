"""NCCL between processes that have simulated devices.

``install`` makes it the process group for CUDA tensors, both by its name in
``torch.distributed.Backend`` and as ``ProcessGroupNCCL``, which a torch without CUDA lacks.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from tests.simcuda.cuda import sim

NAME = "simulated_nccl"


class Options:
    """See ``torch.distributed.ProcessGroupNCCL.Options``. Nothing here depends on them."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=None)
        self._timeout = timedelta(minutes=10)


class ProcessGroupNCCL:
    """See ``torch.distributed.ProcessGroupNCCL``."""

    Options = Options

    def __new__(cls, store: Any, rank: int, size: int, options: Any = None) -> Any:
        return sim.nccl(store, rank, size)


def install() -> None:
    """Use it for CUDA tensors in this process."""
    made: Any = dist
    made.ProcessGroupNCCL = ProcessGroupNCCL
    made.is_nccl_available = lambda: True
    dist.Backend.register_backend(
        NAME, lambda store, rank, size, timeout: sim.nccl(store, rank, size), devices=["cuda"]
    )
    dist.Backend.default_device_backend_map["cuda"] = NAME

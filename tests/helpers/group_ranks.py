"""Ranks with CUDA devices, on CPUs: gloo's groups for NCCL's, and a fake ``torch.cuda``."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fxpipe
from fxpipe.runtime.ranks.devices import CudaRanks
from fxpipe.runtime.ranks.group import RankGroup
from fxpipe.runtime.ranks.pairs import PairGroups
from tests.helpers import eager_lanes, fake_cuda

CPU = torch.device("cpu")


class Gloo(PairGroups):
    """Groups of gloo's. A wait there ends only by an error, such as that of a wait beside it that
    takes too long."""

    def make(self, store: Any, member: int) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        return gloo(store, member, 2, timedelta(seconds=60))

    def abort(self, group: Any) -> None:
        with suppress(RuntimeError):
            waits = group.recv([torch.empty(1)], 1 - group.rank(), 9)
            waits.wait(timedelta(milliseconds=1))


def use(pipe: fxpipe.Pipeline) -> CudaRanks:
    """Let a pipe over ranks, which has run nothing yet, run on such devices, and return what runs
    them. From then on this process has the fake ``torch.cuda``."""
    fake_cuda.install(pytest.MonkeyPatch())
    group: RankGroup = pipe._options.group
    backend = CudaRanks(group, CPU)
    backend._pairs = Gloo(group, CPU)
    eager_lanes.use(pipe, backend)
    return backend

"""Ranks with streams on CPUs: gloo groups in the place of NCCL's, and streams that are never behind.

All else is what runs on CUDA devices.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import fxpipe
from fxpipe.runtime.devices.backend import DeviceMemory, Unfinished
from fxpipe.runtime.ranks.channels import RankBackend
from fxpipe.runtime.ranks.devices import DeviceRanks
from fxpipe.runtime.ranks.pairs import PairGroups
from tests.helpers import eager_lanes

CPU = torch.device("cpu")


class Gloo(PairGroups):
    """Groups of gloo's. A wait there ends only by an error: that of another wait's timeout."""

    def make(self, store: dist.Store, member: int) -> Any:
        gloo: Any = dist.ProcessGroupGloo  # type: ignore[attr-defined]
        return gloo(store, member, 2, timedelta(seconds=60))

    def abort(self, made: Any) -> None:
        with suppress(RuntimeError):
            waits = made.recv([torch.empty(1)], 1 - made.rank(), 9)
            waits.wait(timedelta(milliseconds=1))


class Backend(DeviceRanks):
    """This rank's device, on the CPU."""

    def __init__(self, group: Any, pairs: PairGroups | None = None) -> None:
        RankBackend.__init__(self, group)
        self.lanes = eager_lanes.Lanes(group.rank)
        super(RankBackend, self).__init__([self.lanes], [f"fake:{group.rank}"], group.rank)
        self._pairs = Gloo(group, CPU) if pairs is None else pairs

    def nanoseconds(self, device: int, times: Any) -> list[int]:
        return list(times)

    def memory(self, device: int) -> DeviceMemory:
        return DeviceMemory(f"fake:{device}", 5 << 20, 6 << 20)

    def unfinished(self, error: BaseException) -> list[Unfinished]:
        return self.left() if isinstance(error, eager_lanes.LateError) else []


def use(pipe: fxpipe.Pipeline) -> fxpipe.Pipeline:
    """Let a pipe over ranks, which has run nothing yet, run on such devices."""
    eager_lanes.use(pipe, Backend(pipe._options.group))
    return pipe



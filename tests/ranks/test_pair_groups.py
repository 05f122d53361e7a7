"""What is asked of NCCL for a pair of ranks, which no machine without GPUs has."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fxpipe.runtime.ranks.pairs import BLOCKS, PairGroups


class Options:
    """See ``torch.distributed.ProcessGroupNCCL.Options``."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=None)
        self._timeout: timedelta | None = None


class Nccl:
    """Keeps what it was made with."""

    Options = Options

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.rank, self.size, self.options = rank, size, options


def test_communicators_share_no_stream_with_computations_and_few_multiprocessors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Our streams have the default priority, and torch's pool keeps those of high priority apart;
    a receive that is posted early must leave the device to computations."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    ranks: Any = SimpleNamespace(members=SimpleNamespace(timeout=7), epoch=0)
    made = PairGroups(ranks, torch.device("cuda:0")).make(None, 1)
    assert (made.rank, made.size) == (1, 2)
    assert made.options.is_high_priority_stream
    assert made.options.config.max_ctas == BLOCKS < 132 / 8
    assert made.options._timeout == timedelta(seconds=7)

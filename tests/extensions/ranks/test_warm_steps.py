"""What a step like earlier ones tells other ranks, and what it asks of the store."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxpipe
from tests.extensions.ranks.control import counting
from tests.helpers.ranks import DeviceMesh, on_ranks


def warm(mesh: DeviceMesh, cases: list[tuple[str, int]]) -> list[Counter[str]]:
    """What two warm steps of each schedule and number of micro-batches tell and ask."""
    found = []
    for schedule, microbatches in cases:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Dropout(0.1))
        options: dict[str, Any] = {"schedule": schedule, "microbatches": microbatches}
        options["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        x = torch.ones(8, 4)
        with fxpipe.compile(
            model, mesh, loss=nn.functional.mse_loss, partition=["2"], **options
        ) as pipe:
            for _ in range(2):
                pipe.step(x, target=x)
            begin = time.monotonic()
            with counting() as counted:
                for _ in range(2):
                    pipe.step(x, target=x)
            dist.barrier()  # no rank closes its pipe while others count
            assert counted.pop("looks", 0) <= 1 + time.monotonic() - begin
            with counting() as known:
                group: Any = pipe._group
                group.store.check(["-"])
            assert known["store"] == 1
        found.append(counted)
    return found


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_warm_step_asks_nothing_of_the_store_and_exchanges_the_call_and_its_outcome(
    replicas: int,
) -> None:
    """As much for any number of micro-batches, with dropout, and for replicas. The loss and the
    barrier are messages beside these."""
    cases = [("1f1b", 4), ("1f1b", 8), ("zb-h1", 4)]
    for first, *others in on_ranks(2 * replicas, warm, cases, replicas=replicas):
        assert others == [first] * len(others)
        assert first.pop("messages") <= 2 * 5 * 2 * replicas
        assert first == {"the call": 2, "end": 2}

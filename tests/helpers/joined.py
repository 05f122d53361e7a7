"""Process groups of two ranks each, between ranks that live in one process."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def joined(size: int) -> list[dict[int, Any]]:
    """Rank → other rank → their group, as a rendezvous makes them."""
    groups: list[dict[int, Any]] = [{} for _ in range(size)]
    with ThreadPoolExecutor(2) as pool:
        for pair in itertools.combinations(range(size), 2):
            store = dist.HashStore()  # type: ignore[attr-defined]

            def join(member: int, store: Any = store) -> Any:
                return dist.ProcessGroupGloo(store, member, 2, timedelta(seconds=60))

            for rank, other, group in zip(pair, pair[::-1], pool.map(join, (0, 1)), strict=True):
                groups[rank][other] = group
    return groups

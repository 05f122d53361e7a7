"""Counts what a rank tells others, and what it asks of torch.distributed's stores."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from fxpipe.extensions.ranks.group import RankGroup
from fxpipe.extensions.ranks.tree import Neighbour

REQUESTS: tuple[str, ...] = (
    "add",
    "append",
    "check",
    "compare_set",
    "delete_key",
    "get",
    "multi_get",
    "set",
)
REQUESTS += ("multi_set", "num_keys", "wait")


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts inside: "messages" to neighbours, and each exchange by what it is about; requests to
    any "store" or, by the thread that looks whether it is there, "looks"."""
    found = Counter[str]()
    stores: Any = dist.Store, dist.TCPStore, dist.PrefixStore  # type: ignore[attr-defined]
    send, exchange = Neighbour.send, RankGroup._exchange

    def sending(own: Neighbour, message: Any = b"") -> None:
        found["messages"] += bool(message)
        send(own, message)

    def exchanging(own: RankGroup, number: int, said: Any, *args: Any, **more: Any) -> Any:
        found[said.about] += 1
        return exchange(own, number, said, *args, **more)

    def asking(ask: Any) -> Any:
        def asked(*args: Any) -> Any:
            looks = threading.current_thread().name == "fxpipe-tree"
            found["looks" if looks else "store"] += 1
            return ask(*args)

        return asked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Neighbour, "send", sending)
        patch.setattr(RankGroup, "_exchange", exchanging)
        for kind in stores:
            for name in REQUESTS:
                if name in vars(kind):
                    patch.setattr(kind, name, asking(vars(kind)[name]))
        yield found

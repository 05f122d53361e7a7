"""Run a model without a trace of it: buffers and random generators are put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fxpipe.signals import SignalsAtOperations


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Whatever runs inside, the model's buffers and the random generators are as before after.

    Ctrl-C ends it at the next operation.
    """
    with SignalsAtOperations():
        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
        try:
            with torch.random.fork_rng(devices=sorted(devices)):
                yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Run with so many intra-op threads in this thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Run a model without lasting effects: buffers and random generators are restored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fxpipe.errors import TraceError
from fxpipe.random import others
from fxpipe.signals import SignalsAtOperations


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Afterwards the model's buffers and all random generators are as they were before; so are
    the weights of embeddings with ``max_norm``, which scale them when they run.

    Ctrl-C takes effect at the next operation.
    """
    with SignalsAtOperations():
        written = [*model.buffers(), *_scaled(model)]
        buffers = [(buffer, buffer.detach().clone()) for buffer in written]
        devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
        try:
            with (
                assigned_in_place(model),
                torch.random.fork_rng(devices=sorted(devices)),
                others.kept(),
            ):
                yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    if buffer.shape != before.shape:
                        buffer.resize_(before.shape)
                    buffer.copy_(before)


def _scaled(model: nn.Module) -> list[Tensor]:
    """The weights of embeddings with ``max_norm``."""
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return [module.weight for module in embeddings if module.max_norm is not None]


@contextmanager
def same_sizes(model: nn.Module) -> Iterator[None]:
    """Check that the model's buffers keep their shapes while it runs inside.

    Raises:
        TraceError: the shape of a buffer changes, so that it cannot be written in place.
    """
    before = {name: buffer.shape for name, buffer in model.named_buffers()}
    yield
    for name, buffer in model.named_buffers():
        if name in before and buffer.shape != before[name]:
            old, new = (list(shape) for shape in (before[name], buffer.shape))
            raise TraceError(
                f"buffer {name!r} has the shape {old} and gets {new} when the model runs; run it "
                "once before compile, so that its buffers have their shapes: model(example)"
            )


@contextmanager
def assigned_in_place(model: nn.Module) -> Iterator[None]:
    """If the model replaces a buffer inside, ``self.mean = …``, put the old tensor back afterwards,
    with the new tensor's values."""
    held = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module, name, buffer in held:
            new = module._buffers.get(name)
            module._buffers[name] = buffer
            if new is not None and new is not buffer and new.shape == buffer.shape:
                with torch.no_grad():
                    buffer.copy_(new)


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Run with so many intra-op threads in this thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Run code with a model, PyTorch or Python in another state, and put the former one back; and what
a process sets once."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _autograd

from fxpipe.errors import TraceError
from fxpipe.random.leaf_draws import others_kept
from fxpipe.signals import SignalsAtOperations


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Afterwards the model's buffers and all random generators are as they were before; so are
    the weights of embeddings with ``max_norm``, which scale them when they run.

    Ctrl-C takes effect at the next operation.
    """
    with SignalsAtOperations():
        # one that repeats its elements, as ``expand`` makes it, cannot be written at all
        written = [x for x in model.buffers() if not _repeats(x)] + _scaled(model)
        buffers = [(buffer, buffer.detach().clone()) for buffer in written]
        devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
        try:
            with (
                assigned_in_place(model),
                torch.random.fork_rng(devices=sorted(devices)),
                others_kept(),
            ):
                yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    if buffer.shape != before.shape:
                        buffer.resize_(before.shape)
                    buffer.copy_(before)


@contextmanager
def put_back(tensors: Mapping[str, Any]) -> Iterator[list[str]]:
    """Afterwards the tensors among these have their values of before. The list then has the names
    of those that were written; of tensors of inference mode, those that have other values."""
    held = [
        (name, x, 0 if x.is_inference() else x._version, x.detach().clone())
        for name, x in tensors.items()
        if isinstance(x, Tensor) and x.layout is torch.strided
    ]
    written: list[str] = []
    try:
        yield written
    finally:
        for name, x, version, before in held:
            if torch.equal(x, before) if x.is_inference() else x._version == version:
                continue
            with torch.no_grad():
                x.copy_(before)
            written.append(name)


def _repeats(buffer: Tensor) -> bool:
    strided = buffer.layout is torch.strided
    return strided and any(
        n > 1 and not s for n, s in zip(buffer.shape, buffer.stride(), strict=True)
    )


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
def without_saved_tensor_hooks() -> Iterator[None]:
    """Inside, this thread's hooks on tensors that are saved for a backward are off.

    ``torch.utils.checkpoint`` sets such hooks around what it calls. They would take what a trace
    saves for what they count, and run real operations in the middle of a trace.
    """
    found: list[Any] = []
    while (hooks := _autograd._top_saved_tensors_default_hooks(False)) is not None:
        found.append(hooks)
        _autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(found):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)


def processors() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Run with so many intra-op threads in this thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def without_collection() -> Iterator[None]:
    """Inside, Python's cyclic garbage collector is off; also a decorator.

    For code that makes many objects without reference cycles, such as instructions and buffers. The
    collector visits all of them again and again, which took half the time of lowering and
    verifying, and a growing share for larger programs.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def on_device(model: nn.Module, others: Iterable[Tensor], device: torch.device) -> Iterator[None]:
    """Inside, the whole model and other tensors are on one device, to be called and traced."""
    tensors = [*model.parameters(), *model.buffers(), *others]
    before = [tensor.device for tensor in tensors]
    try:
        for tensor in tensors:
            move(tensor, device)
        yield
    finally:
        for tensor, home in zip(tensors, before, strict=True):
            move(tensor, home)


def move(tensor: Tensor, device: torch.device) -> None:
    """Move a tensor and its gradient to a device. It stays the same object."""
    if tensor.device == device:
        return
    with torch.no_grad():
        gradient = tensor.grad
        tensor.grad = None
        tensor.data = tensor.data.to(device)
        if gradient is not None:
            tensor.grad = gradient.to(device)


def to_device(leaves: Iterable[Any], device: torch.device) -> list[Any]:
    """Copies of the inputs on a device; those that require gradients still do."""
    return [
        leaf.detach().to(device).requires_grad_(leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in leaves
    ]


def keep_memory() -> None:
    """Let glibc keep the memory of freed activations for the next ones.

    By default glibc returns free memory above a threshold to the system, and every step faults the
    same pages in again (a tenth of a small U-Net's step). The threshold rises when a large block
    that was mapped separately is freed, up to blocks of 32 MiB; see mallopt(3), M_MMAP_THRESHOLD.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


Autocasts = tuple[tuple[str, torch.dtype], ...]
"""Each kind of device for which autocast is on, and to which dtype."""

_KINDS = ("cpu", "cuda")
_LOCK = threading.Lock()
_inside = 0
"""How many threads are inside of ``under``. PyTorch keeps what autocast has cast for all threads
together: whoever leaves first must not take it from the others, as the gradients of a weight that
is cast twice are added in another order."""


def autocasts() -> Autocasts:
    """Those of this thread."""
    on = filter(torch.is_autocast_enabled, _KINDS)
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in on)


@contextmanager
def under(casts: Autocasts) -> Iterator[None]:
    """Inside, this thread has these, and no others."""
    global _inside
    before, wanted = autocasts(), dict(casts)
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in _KINDS}
    with _LOCK:
        _inside += 1
    torch.autocast_increment_nesting()
    try:
        _set({**dtypes, **wanted}, wanted)
        yield
    finally:
        _set(dtypes, dict(before))
        outermost = torch.autocast_decrement_nesting() == 0
        with _LOCK:
            _inside -= 1
            if outermost and not _inside:
                torch.clear_autocast_cache()


def uncached(value: Any) -> Any:
    """The same value, which autocast casts once for each use, as any activation. It casts a leaf of
    autograd's, such as a parameter, once for all uses, so that gradients are added before they are
    cast back."""
    leaf = isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
    return value.view_as(value) if leaf else value


def called_under(casts: Autocasts, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which runs under these."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with under(casts):
            return function(*args, **kwargs)

    return called


def _set(dtypes: dict[str, torch.dtype], on: dict[str, torch.dtype]) -> None:
    for kind, dtype in dtypes.items():
        torch.set_autocast_enabled(kind, kind in on)
        torch.set_autocast_dtype(kind, dtype)

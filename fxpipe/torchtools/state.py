"""Set the state of a model, of PyTorch or of Python for a block of code, and restore it after."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch._subclasses import fake_tensor
from torch.nn.utils.stateless import _reparametrize_module

from fxpipe.errors import TraceError
from fxpipe.signals import HeldSignals
from fxpipe.torchtools.accelerator import kind_here, random_kept
from fxpipe.torchtools.source import bringing_to, lacks_memory

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The attributes in which a module keeps its hooks."""
OF_EACH = frozenset(vars(nn.Module()))
"""The attributes that every module has."""

_PYTHON, _NUMPY = "Python's random", "numpy.random"


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers and all random generators after the block; also the weights of
    embeddings with ``max_norm``, which rescale them when they run.

    Ctrl-C takes effect after the block.
    """
    with HeldSignals():
        # buffers that repeat their elements, as ``expand`` makes them, cannot be written at all
        writable = [x for x in model.buffers() if not _repeats(x)] + _rescaled(model)
        before = [(tensor, tensor.detach().clone()) for tensor in writable]
        try:
            with assigned_in_place(model), random_kept(model.parameters()), others_kept():
                yield
        finally:
            with torch.no_grad():
                for tensor, value in before:
                    if tensor.shape != value.shape:
                        tensor.resize_(value.shape)
                    tensor.copy_(value)


def reparametrized(module: nn.Module, tensors: dict[str, Tensor]) -> AbstractContextManager[None]:
    """Inside, a module has these parameters and buffers, by the first of their names; after it, its
    own, and ``tensors`` those that it has assigned. A submodule that occurs twice would keep them
    after ``torch.func.functional_call``."""
    inside = _reparametrize_module(module, tensors, tie_weights=True, stack_weights=True)
    return cast(AbstractContextManager[None], inside)


@contextmanager
def on_fakes(model: nn.Module) -> Iterator[None]:
    """For runs of a model on fakes. After the block, modules have the attributes that they had, and
    dicts and lists among these the items: as those of such a run have no data. PyTorch logs no
    operation that fails: callers raise its error, or find another way."""
    spaces = [vars(module) for module in model.modules()]
    values = [value for space in spaces for name, value in space.items() if name not in OF_EACH]
    dicts = [(each, each.copy()) for each in (*spaces, *(x for x in values if type(x) is dict))]
    lists = [(each, each.copy()) for each in values if type(each) is list]
    log = logging.getLogger(fake_tensor.__name__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
        for own, had in dicts:
            for key in own.keys() - had.keys():
                del own[key]
            own.update(had)
        for items, kept in lists:
            items[:] = kept


@contextmanager
def put_back(tensors: Mapping[str, Any]) -> Iterator[list[str]]:
    """Restore the tensors among these values after the block.

    Yields:
        A list, which gets the names of the tensors that were written; of tensors of inference mode,
        of those that were changed.
    """
    tensors_before = [
        (name, x, 0 if x.is_inference() else x._version, x.detach().clone())
        for name, x in tensors.items()
        if isinstance(x, Tensor)
    ]
    written: list[str] = []
    try:
        yield written
    finally:
        for name, x, version, before in tensors_before:
            if torch.equal(x, before) if x.is_inference() else x._version == version:
                continue
            with torch.no_grad():
                x.copy_(before)
            written.append(name)


def _repeats(buffer: Tensor) -> bool:
    return any(n > 1 and not s for n, s in zip(buffer.shape, buffer.stride(), strict=True))


def _rescaled(model: nn.Module) -> list[Tensor]:
    """The weights of embeddings with ``max_norm``."""
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return [module.weight for module in embeddings if module.max_norm is not None]


T = TypeVar("T")


def tried(run: Callable[[], T]) -> T:
    """Run a part of a model once: without gradients, so that no activations are kept; if that
    fails, with gradients, without which a hook on the gradient of a value cannot be registered."""
    try:
        with torch.no_grad():
            return run()
    except RuntimeError as error:
        if lacks_memory(error):
            raise
    with torch.enable_grad():
        return run()


@contextmanager
def same_sizes(model: nn.Module) -> Iterator[None]:
    """Check that the model's buffers have the same shapes after the block.

    Raises:
        TraceError: a buffer has another shape, so that it cannot be written in place.
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
    """If the model replaces a buffer inside the block (``self.mean = …``), put the old tensor back
    after it, with the values of the new one."""
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module, name, buffer in buffers:
            new = module._buffers.get(name)
            module._buffers[name] = buffer
            if new is not None and new is not buffer and new.shape == buffer.shape:
                with torch.no_grad():
                    buffer.copy_(new)


def other_states() -> dict[str, bytes]:
    """Name of a random generator that is not torch's, Python's or NumPy's, which all threads share
    → its state; without NumPy's if NumPy has not been imported."""
    states = {_PYTHON: pickle.dumps(random.getstate())}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states[_NUMPY] = pickle.dumps(numpy.random.get_state(legacy=False))
    return states


@contextmanager
def others_kept() -> Iterator[None]:
    """Restore the ``other_states`` after the block."""
    before = other_states()
    try:
        yield
    finally:
        random.setstate(pickle.loads(before[_PYTHON]))
        if _NUMPY in before:
            sys.modules["numpy"].random.set_state(pickle.loads(before[_NUMPY]))


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Disable this thread's hooks on tensors saved for a backward, inside the block.

    ``torch.utils.checkpoint`` sets such hooks around the functions that it calls. During a trace
    they would count the tensors that the trace saves, and run real operations.
    """
    removed: list[Any] = []
    while (hooks := _autograd._top_saved_tensors_default_hooks(False)) is not None:
        removed.append(hooks)
        _autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(removed):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)


def processors() -> int:
    """The number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Use ``count`` intra-op threads for this thread's operations inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable Python's cyclic garbage collector inside the block; also a decorator.

    For code that makes many objects without reference cycles, such as instructions and buffers: the
    collector visits all of them repeatedly, which took half of the time of lowering and verifying.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def collect() -> None:
    """Free what was dropped since ``without_collection`` began, graphs among it, whose nodes refer
    to each other; what is older is not visited, so that this takes milliseconds."""
    gc.collect(1)


def move(tensor: Tensor, device: torch.device) -> None:
    """Move a tensor and its gradient to a device. It stays the same object."""
    if tensor.device == device:
        return
    with torch.no_grad():
        gradient = tensor.grad
        tensor.grad = None
        with bringing_to(device):
            tensor.data = tensor.data.to(device)
        torch.clear_autocast_cache()  # it may have a cast of the old data
        if gradient is not None:
            with bringing_to(device):
                tensor.grad = gradient.to(device)


def to_device(leaves: Iterable[Any], device: torch.device) -> list[Any]:
    """Copy inputs to a device; the copies require gradients if the inputs do."""
    return [
        leaf.detach().to(device).requires_grad_(leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in leaves
    ]


Autocasts = tuple[tuple[str, torch.dtype], ...]
"""Device type and dtype for each device type with autocast."""

_LOCK = threading.Lock()
_inside = 0
"""How many threads are inside ``under``. PyTorch has one cache of cast weights for all threads, and
only the last thread may clear it: if a weight is cast twice, its gradients are added in another
order."""


def autocasts() -> Autocasts:
    """The autocasts of this thread."""
    on = filter(torch.is_autocast_enabled, ("cpu", kind_here()))
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in on)


@contextmanager
def under(casts: Autocasts) -> Iterator[None]:
    """Set this thread's autocasts inside the block."""
    global _inside
    before, wanted = autocasts(), dict(casts)
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", kind_here())}
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
    """Return the value such that autocast casts it for each use, like any activation. A leaf of
    autograd, such as a parameter, would be cast once for all uses, so that its gradients would be
    added before they are cast back."""
    leaf = isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
    return value.view_as(value) if leaf else value


def _set(dtypes: dict[str, torch.dtype], on: dict[str, torch.dtype]) -> None:
    for kind, dtype in dtypes.items():
        torch.set_autocast_enabled(kind, kind in on)
        torch.set_autocast_dtype(kind, dtype)


def hooked(parameter: Tensor) -> bool:
    """Whether a parameter has hooks on its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)

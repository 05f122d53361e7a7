"""Models on the meta device, whose parameters and buffers have no data yet."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _to_dlpack
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils.dlpack import from_dlpack

from fxpipe.errors import InputError
from fxpipe.torchtools.part import state_in_part
from fxpipe.torchtools.pytrees import size_in_bytes
from fxpipe.torchtools.source import bringing_to


def bytes_if_hollow(model: nn.Module) -> int:
    """Return the bytes that all parameters and buffers of a model will take if some of them are on
    the meta device, else 0.

    Raises:
        InputError: a tensor is on the meta device for which a pipe cannot allocate memory.
    """
    tensors = [*model.parameters(), *model.buffers()]
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise InputError(
                    f"{attribute!r} of {name or 'the model'} is a tensor on the meta device but no "
                    "buffer, so nothing can give it values; make it on a real device "
                    '(device="cpu"), or register_buffer it'
                )
    return sum(map(size_in_bytes, tensors)) if any(x.is_meta for x in tensors) else 0


T = TypeVar("T")


def with_zeros(tree: T) -> T:
    """The same with zeros in place of tensors without data. Memory of zeros takes none before it is
    written."""

    def zeros(x: Tensor) -> Tensor:
        if not (x.is_meta or isinstance(x, FakeTensor)):
            return x
        with unset_fake_temporarily():
            return torch.zeros(x.shape, dtype=x.dtype, device="cpu")

    made: T = pytree.tree_map_only(Tensor, zeros, tree)
    return made


class Scratch:
    """Memory shared by many tensors whose values do not matter.

    PyTorch does not know that they share it: each has a storage of its own.

    Args:
        device: where the memory is.
        turns: how many memories of a dtype take turns, so that operands of an operation seldom
            share one.
        least: how many numbers a memory of a floating-point type has at least.
        signed: whether its numbers have both signs.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        turns: int = 1,
        *,
        least: int = 0,
        signed: bool = False,
    ) -> None:
        self._device, self._least, self._signed = device, least, signed
        self._memories: dict[torch.dtype, deque[Tensor]] = defaultdict(deque)
        self._turns = turns

    def like(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same shape, strides and dtype."""
        shape, strides, dtype = tensor.shape, tensor.stride(), tensor.dtype
        if 0 in shape:
            return torch.empty_strided(shape, strides, dtype=dtype, device=self._device)
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        memories = self._memories[dtype]
        memory = memories.popleft() if len(memories) == self._turns else None
        if memory is None or len(memory) < span:
            least = self._least if dtype.is_floating_point else 0
            room = max(span, least, 2 * len(memory) if memory is not None else 0)
            del memory
            memory = _memory(room, dtype, self._signed).to(self._device)
        memories.append(memory)
        part = memory.view(torch.uint8)[: span * tensor.element_size()]
        # with a storage of its own; through a capsule on whichever device is the current one
        own = from_dlpack(_to_dlpack(part))
        return own.view(dtype).as_strided(shape, strides)


_DRAWN = 1 << 16
"""How many numbers are drawn for a memory, which repeats them: to draw all takes long."""


def _memory(room: int, dtype: torch.dtype, signed: bool) -> Tensor:
    """Memory for so many small numbers, see ``_numbers``."""
    if not dtype.is_floating_point or dtype.itemsize == 1:
        return torch.zeros(room, dtype=dtype)  # the system has such memory, untouched
    some = _numbers(torch.empty(min(room, _DRAWN), dtype=dtype), signed)
    return some if room <= _DRAWN else some.repeat(-(-room // _DRAWN))[:room]


def _numbers(tensor: Tensor, signed: bool = False) -> Tensor:
    """Fill a tensor with small numbers, all positive unless ``signed``; or with zeros if its dtype
    is integral or one byte."""
    if tensor.is_floating_point() and tensor.element_size() > 1:
        low = -0.05 if signed else 0.0
        return tensor.uniform_(low, low + 0.1, generator=torch.Generator().manual_seed(0))
    return tensor.zero_()


@contextmanager
def standing_in(model: nn.Module, share: Callable[[Tensor], bool]) -> Iterator[list[Tensor]]:
    """Inside the block, replace parameters and buffers on the meta device by ones with data.

    Args:
        model: the model.
        share: says whether the stand-in for a tensor may share memory with other stand-ins, so that
            its values change with theirs.

    Yields:
        The stand-ins.
    """
    places = [
        (module, name, tensor)
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None and tensor.is_meta
    ]
    scratch = Scratch()
    stand_ins: dict[Tensor, Tensor] = {}
    with torch.no_grad():
        for _, _, tensor in sorted(places, key=lambda place: -place[2].numel()):
            if tensor not in stand_ins:
                stand_ins[tensor] = _like(tensor, scratch if share(tensor) else None)
    try:
        for module, name, tensor in places:
            setattr(module, name, stand_ins[tensor])
        yield [*stand_ins.values()]
    finally:
        for module, name, tensor in places:
            setattr(module, name, tensor)


def _like(tensor: Tensor, scratch: Scratch | None) -> Tensor:
    if scratch is not None:
        values = scratch.like(tensor)
    else:
        signed = isinstance(tensor, nn.Parameter)
        values = _numbers(torch.empty_like(tensor, device="cpu"), signed)
    if not isinstance(tensor, nn.Parameter):
        return values
    parameter = nn.Parameter(values, tensor.requires_grad)
    parameter._backward_hooks = tensor._backward_hooks
    parameter._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks
    return parameter


@contextmanager
def lent(
    model: nn.Module, others: Iterable[Tensor], device: torch.device, *, apart: bool
) -> Iterator[None]:
    """Inside the block, the buffers of a model, and other tensors, hold copies of their values in
    memory of ``device``. So do its parameters, or, if stages are ``apart``, numbers in memory that
    all of them share, as much as the largest needs. After it all hold their own data again, which
    nothing has moved: who compares memory and versions does not take them for changed."""
    scratch = Scratch(device, signed=True)
    parameters = sorted(model.parameters(), key=size_in_bytes, reverse=True)
    copied = [*model.buffers(), *others]
    before = [(tensor, tensor.data, tensor.grad) for tensor in (*parameters, *copied)]
    try:
        for parameter in parameters:
            parameter.grad = None
            parameter.data = scratch.like(parameter) if apart else parameter.data.to(device)
        for tensor in copied:
            tensor.data = tensor.data.to(device, copy=apart)
        torch.clear_autocast_cache()  # it has casts of the data
        yield
    finally:
        for tensor, data, gradient in before:
            tensor.grad = None
            tensor.data = data
            tensor.grad = gradient
        torch.clear_autocast_cache()


@contextmanager
def allocated(
    tensors: Iterable[Tensor], homes: Mapping[Tensor, torch.device] | None = None
) -> Iterator[list[Tensor]]:
    """Give uninitialised memory to the tensors on the meta device, which stay the same objects. If
    the block fails, they lose it again.

    Args:
        tensors: the tensors, others of which keep their memory.
        homes: tensor → the device of its memory; the CPU for all others.

    Yields:
        The tensors that were on the meta device.
    """
    changed = [tensor for tensor in tensors if tensor.is_meta]
    for tensor in changed:
        device = (homes or {}).get(tensor, torch.device("cpu"))
        with bringing_to(device):
            become(tensor, torch.empty_like(tensor, device=device))
    try:
        yield changed
    except BaseException:
        for tensor in changed:
            become(tensor, torch.empty_like(tensor, device="meta"))
        raise


def become(tensor: Tensor, other: Tensor) -> None:
    """Make a tensor hold the data of another; it stays the same object, with its attributes.

    ``torch.utils.swap_tensors`` does the same, but refuses tensors with weak references, which
    PyTorch's tracers leave. A graph of autograd that has the tensor keeps the old data.
    """
    new = other.detach().requires_grad_(tensor.requires_grad)
    torch.clear_autocast_cache()  # which has weak references to weights, and casts of them
    torch._C._swap_tensor_impl(tensor, new)


def load_part(
    model: nn.Module,
    used: Mapping[int, Tensor],
    homes: Mapping[Tensor, torch.device],
    state: Mapping[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Load of a state dict the tensors that this process uses; all others keep their values. Those
    without data get memory on their devices, see ``allocated``."""
    with state_in_part():
        kept = model.state_dict(keep_vars=True)
    others = {n: v for n, v in kept.items() if isinstance(v, Tensor) and id(v) not in used}
    loaded = [used[id(v)] for name, v in kept.items() if name in state and id(v) in used]
    with allocated(loaded, homes):
        return model.load_state_dict(state_like(state, {**state, **others}), *args, **kwargs)


def state_like(state: Mapping[str, Any], values: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """A state dict of these values with the module versions of another one, which tell modules
    whether to convert older values."""
    result = OrderedDict(values)
    if hasattr(state, "_metadata"):
        vars(result)["_metadata"] = state._metadata
    return result

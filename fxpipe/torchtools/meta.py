"""Models on the meta device, whose parameters and buffers have no data yet."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fxpipe.errors import InputError
from fxpipe.torchtools.pytrees import size_in_bytes


def bytes_without_data(model: nn.Module, place: torch.device) -> int:
    """The bytes that a model's parameters and buffers on the meta device will take.

    Args:
        model: the model.
        place: the first device of its pipe.

    Raises:
        InputError: there are some, and a stage cannot get memory for them, or for another tensor.
    """
    named = (*model.named_parameters(), *model.named_buffers())
    hollow = {name: tensor for name, tensor in named if tensor.is_meta}
    for name in hollow if place.type != "cpu" else ():
        raise InputError(
            f"{name!r} is on the meta device, which only pipes over CPU devices take so far; give "
            'the model memory first (model.to_empty(device="cpu"))'
        )
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise InputError(
                    f"{attribute!r} of {name or 'the model'} is a tensor on the meta device and no "
                    "buffer, so that nothing can give it values; make it on a real device "
                    '(device="cpu"), or register_buffer it'
                )
    return sum(map(size_in_bytes, hollow.values()))


class Scratch:
    """Memory that many tensors share, whose values do not matter.

    For PyTorch they share nothing: each has a storage of its own.
    """

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, Tensor] = {}

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor with the shape, strides and dtype of this one; a sparse one is returned."""
        if tensor.layout is not torch.strided:
            return tensor
        shape, strides = tensor.shape, tensor.stride()
        if 0 in shape:
            return torch.empty_strided(shape, strides, dtype=tensor.dtype)
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        memory = self._memory.get(tensor.dtype)
        if memory is None or len(memory) < span:
            room = max(span, 2 * len(memory)) if memory is not None else span
            memory = self._memory[tensor.dtype] = _numbers(torch.empty(room, dtype=tensor.dtype))
        held = (ctypes.c_char * (span * tensor.element_size())).from_address(memory.data_ptr())
        vars(held)["memory"] = memory  # which lives as long as its parts
        return torch.frombuffer(held, dtype=tensor.dtype, count=span).as_strided(shape, strides)


def _numbers(tensor: Tensor) -> Tensor:
    """The tensor, filled with small positive numbers, or with zeros where they are whole."""
    if tensor.is_floating_point() and tensor.element_size() > 1:
        return tensor.uniform_(0.0, 0.1, generator=torch.Generator().manual_seed(0))
    return tensor.zero_()


@contextmanager
def standing_in(model: nn.Module, share: Callable[[Tensor], bool]) -> Iterator[list[Tensor]]:
    """Inside, other tensors stand for the parameters and buffers without data; they have numbers.

    Args:
        model: the model.
        share: whether what stands for a tensor shares the memory of the largest such one. Then its
            values do not matter, as they change with those of others.

    Yields:
        These other tensors.
    """
    places = [
        (module, name, tensor)
        for module in model.modules()
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None and tensor.is_meta
    ]
    scratch = Scratch()
    made: dict[Tensor, Tensor] = {}
    with torch.no_grad():
        for _, _, tensor in sorted(places, key=lambda place: -place[2].numel()):
            if tensor not in made:
                made[tensor] = _like(tensor, scratch if share(tensor) else None)
    try:
        for module, name, tensor in places:
            setattr(module, name, made[tensor])
        yield [*made.values()]
    finally:
        for module, name, tensor in places:
            setattr(module, name, tensor)


def _like(tensor: Tensor, scratch: Scratch | None) -> Tensor:
    if scratch is not None:
        made = scratch.like(tensor)
    else:
        made = _numbers(torch.empty_like(tensor, device="cpu"))
    if not isinstance(tensor, nn.Parameter):
        return made
    if scratch is None and made.is_floating_point() and made.element_size() > 1:
        made -= 0.05  # of both signs
    parameter = nn.Parameter(made, tensor.requires_grad)
    parameter._backward_hooks = tensor._backward_hooks
    parameter._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks
    return parameter


@contextmanager
def allocated(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Give memory to those tensors that have none; they stay the same objects.

    Their values are whatever is in the memory. If the block fails, they lose it again.

    Yields:
        These tensors.
    """
    given = [tensor for tensor in tensors if tensor.is_meta]
    for tensor in given:
        become(tensor, torch.empty_like(tensor, device="cpu"))
    try:
        yield given
    except BaseException:
        for tensor in given:
            become(tensor, torch.empty_like(tensor, device="meta"))
        raise


def become(tensor: Tensor, other: Tensor) -> None:
    """Make a tensor hold what another one holds; its class and attributes stay."""
    with torch.no_grad():
        made = torch.Tensor._make_subclass(type(tensor), other.detach(), tensor.requires_grad)
    vars(made).update(vars(tensor))
    torch.utils.swap_tensors(tensor, made)

"""Results of operations on tensors without data, each computed once for equal operands.

before:  layer 1: y = mm(x, w)      PyTorch derives the shape, strides, dtype and device of y
         layer 2: z = mm(y, v)      the same again
after:   layer 2: z                 a new tensor like y, as its operands are like those of y

A model of equal layers repeats the same few operations, and is differentiated twice: as one stage
to be measured, and as the stages that run. PyTorch's own cache of such results takes ten times as
long, because it makes its keys from everything that a tensor can be; operands that are more than
shape, strides, dtype and device are left to it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._mode_utils import no_dispatch

_LIBRARIES = ("aten", "fxpipe")
_UNKNOWN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


_MOST = 20_000
"""How many results are kept for each of PyTorch's settings."""


def _settings() -> Hashable:
    """What a result depends on besides its operands."""
    return (
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.enabled,
    )


class _Like(NamedTuple):
    """What a result is: a new tensor, or one in the memory of an operand.

    Attributes:
        operand: the operand whose memory it has, as its place among the tensors; None for its own.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int
    operand: int | None


class _NotPlainError(Exception):
    """An operand that is described by more than a key holds."""


class KnownResults:
    """The results of operations that have run, by operation and operands."""

    _by_settings: ClassVar[dict[Hashable, KnownResults]] = {}

    def __init__(self) -> None:
        self._results: dict[Hashable, tuple[type, list[_Like | None]] | None] = {}

    @classmethod
    def shared(cls) -> KnownResults:
        """Those that all of the process shares under PyTorch's present settings."""
        known = cls._by_settings.setdefault(_settings(), cls())
        if len(known) > _MOST:
            known._results.clear()
        return known

    def __len__(self) -> int:
        """How many different results had to be derived."""
        return len(self._results)

    def result(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``func(*args, **kwargs)`` returns, called below the modes that derive it."""
        tensors: list[FakeTensor] = []
        try:
            key = func, _key(args, tensors), _key(tuple(kwargs.items()), tensors)
        except _NotPlainError:
            return func(*args, **kwargs)
        if not tensors:
            return func(*args, **kwargs)
        if key in self._results:
            known = self._results[key]
            return func(*args, **kwargs) if known is None else _made(*known, tensors)
        result = func(*args, **kwargs)
        self._results[key] = _described(func, result, tensors)
        return result


def _key(value: Any, tensors: list[FakeTensor]) -> Hashable:
    """Everything about an operand that a result depends on; appends its tensors."""
    kind = type(value)
    if kind is FakeTensor:
        if not _is_plain(value):
            raise _NotPlainError
        tensors.append(value)
        shape, strides = tuple(value.shape), value.stride()
        return shape, strides, value.storage_offset(), value.dtype, value.fake_device
    if kind is tuple or kind is list:
        return kind, *[_key(each, tensors) for each in value]
    if kind is float:
        return repr(value)  # 0.0 == -0.0
    if isinstance(value, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool | torch.Generator):
        raise _NotPlainError
    return kind, value


def _is_plain(value: FakeTensor) -> bool:
    return (
        value.layout is torch.strided
        and not value._has_symbolic_sizes_strides
        and value.constant is None
        and not value.dtype.is_complex
        and not value.is_neg()
        and not value.is_quantized
    )


def _described(
    func: OpOverload, result: Any, tensors: list[FakeTensor]
) -> tuple[type, list[_Like | None]] | None:
    """The type of a result and what its tensors are; None if it has to be computed each time."""
    kind = type(result)
    parts = list(result) if kind in (tuple, list) else [result]
    if func.namespace not in _LIBRARIES or _UNKNOWN.intersection(func.tags):
        return None
    own = [x.untyped_storage()._cdata for x in tensors]
    seen: set[int] = set()
    likes: list[_Like | None] = []
    for part in parts:
        if part is None:
            likes.append(None)
            continue
        if type(part) is not FakeTensor or not _is_plain(part) or any(part is x for x in tensors):
            return None
        memory = part.untyped_storage()._cdata
        if memory in seen:  # two results in one memory
            return None
        operand = own.index(memory) if memory in own else None
        if operand is None:
            seen.add(memory)
            if part.storage_offset() or part.untyped_storage().nbytes() != _bytes(part):
                return None
        likes.append(
            _Like(
                tuple(part.shape),
                part.stride(),
                part.dtype,
                part.fake_device,
                int(part.storage_offset()),
                operand,
            )
        )
    return kind, likes


def _bytes(tensor: Tensor) -> int:
    """The bytes from the first to the last entry of a tensor."""
    if not tensor.numel():
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * (1 + sum((size - 1) * stride for size, stride in pairs))


def _made(kind: type, likes: list[_Like | None], tensors: list[FakeTensor]) -> Any:
    """New tensors as described."""
    parts = [None if like is None else _tensor(like, tensors) for like in likes]
    return kind(parts) if kind in (tuple, list) else parts[0]


def _tensor(like: _Like, tensors: list[FakeTensor]) -> FakeTensor:
    mode = tensors[0].fake_mode
    with no_dispatch():
        meta = torch.empty_strided(like.shape, like.strides, dtype=like.dtype, device="meta")
        if like.operand is not None:
            storage = tensors[like.operand].untyped_storage()
            with in_kernel_invocation_manager(mode):
                meta.set_(storage, like.offset, like.shape, like.strides)
        return FakeTensor(mode, meta, like.device)

"""Messages between ranks: a head in JSON, and the bytes of the tensors that it describes.

A tensor arrives as it was: same strides, same alignment in memory, so that the same kernels run on
it and round alike. Nothing that arrives is executed: a head is data, never code.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.runtime.ranks.shared import LEAST, Borrowed, Lent, Slot

PREFIX = struct.Struct("!IQ")
"""Before each message: the bytes of its head, and the bytes of all its tensors."""

MOST = 1 << 26
"""A head of more bytes than this is none."""

_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)
_ALIGNED = 64
_SENT = 6  # words that tell the layout of a tensor which is sent; one in shared memory has fewer
_NAMES = {d: str(d).removeprefix("torch.") for d in vars(torch).values() if type(d) is torch.dtype}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Message:
    """What one rank tells another.

    Attributes:
        kind: what is done with it, such as ``value``.
        key: what it belongs to: numbers, strings and lists of them.
        value: tensors, numbers, strings, None, and lists, tuples and dicts of them.
    """

    kind: str
    key: tuple[Any, ...] = ()
    value: Any = None


@dataclass
class Packed:
    """A message as bytes. The tensors are not copied where they lie dense in memory; large ones are
    not in it where the other process reads them in memory that both share.

    Attributes:
        parts: the bytes in order.
        kept: what has to live until they are sent.
    """

    parts: list[memoryview] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)


def pack(message: Message, lent: Lent | None = None) -> Packed:
    """The bytes of a message; its large tensors go to memory that is lent to the process that gets
    it. Raises InputError where its value has something in it that cannot be sent."""
    flat = _Flat(lent)
    try:
        tree = flat.of(message.value)
        words = [message.kind, message.key, tree, flat.layouts]
        head = _ENCODER.encode(words).encode()
        if len(head) > MOST:
            raise InputError(f"a message to another rank has {len(head)} bytes besides its tensors")
    except BaseException:
        flat.give_back()
        raise
    views = [view for tensor in flat.tensors if len(view := _bytes(tensor))]
    made = Packed([memoryview(PREFIX.pack(len(head), sum(map(len, views))) + head), *views])
    made.kept = flat.tensors
    return made


def digest(tensor: Tensor) -> str:
    """A short text that is the same for tensors with the same values."""
    packed = pack(Message("", (), tensor))
    made = hashlib.sha256()
    for part in packed.parts[1:]:  # the first has the layout as well
        made.update(part)
    return made.hexdigest()[:16]


def unpacking(borrowed: Borrowed | None = None) -> Iterator[memoryview | Message]:
    """Read messages one after another: yields memory to fill, or a message that is complete. Large
    tensors are in memory that is borrowed from the process that sends them."""
    while True:
        prefix = bytearray(PREFIX.size)
        yield memoryview(prefix)
        size, rest = PREFIX.unpack(prefix)
        if size > MOST:
            raise ValueError(f"a head of {size} bytes")
        head = bytearray(size)
        yield memoryview(head)
        kind, key, tree, layouts = json.loads(head.decode())
        sent = [layout for layout in layouts if len(layout) == _SENT]
        expected = sum(_DTYPES[name].itemsize * prod(shape) for name, _, _, _, shape, _ in sent)
        if expected != rest:
            raise ValueError(f"{rest} bytes for tensors of {expected} bytes")
        made = [
            _room(*layout) if len(layout) == _SENT else _shared(borrowed, *layout)
            for layout in layouts
        ]
        yield from (view for _, room in made if room is not None and len(view := _bytes(room)))
        message = [Message(kind, _tuples(key), _nested(tree, [_laid_out(*each) for each in made]))]
        del made  # its tensors are to live no longer than who gets them says
        yield message.pop()


class _Flat:
    """Values as JSON, beside their tensors.

    Attributes:
        tensors: those that are sent, dense and on the CPU.
        layouts: how to restore all tensors. Of one that is sent: dtype, shape, strides, where it
            starts, the shape and strides that are sent. Of one in shared memory: dtype, shape,
            strides, where it starts, its slot.
    """

    def __init__(self, lent: Lent | None) -> None:
        self.tensors: list[Tensor] = []
        self.layouts: list[tuple[Any, ...]] = []
        self._lent = lent

    def give_back(self) -> None:
        """The message is not sent."""
        for layout in self.layouts:
            if self._lent is not None and len(layout) != _SENT:
                self._lent.give_back(layout[-1])

    def of(self, value: Any) -> Any:
        """A value as JSON."""
        if isinstance(value, Tensor):
            if value.layout is not torch.strided:
                return self._sparse(value)
            if not value.dim() and value.device.type == "cpu" and not value.is_complex():
                return {"scalar": value.item(), "dtype": _NAMES[value.dtype]}
            self._add(value.detach())
            return {"tensor": len(self.layouts) - 1}
        if value is None or isinstance(value, bool | str | int | float):
            return value
        if isinstance(value, list):
            return [self.of(item) for item in value]
        if type(value) is tuple:
            return {"tuple": [self.of(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": self.of([[*pair] for pair in value.items()])}
        raise InputError(
            f"a {type(value).__name__} would have to go from one rank to another, and only "
            "tensors, numbers, strings, lists, tuples and dicts can; let a submodule that makes "
            "and uses it be one leaf module, or keep both on one stage with partition="
        )

    def _sparse(self, value: Tensor) -> Any:
        if value.layout is torch.sparse_coo:
            parts = [value._indices(), value._values()]
            word: Any = {"coo": list(value.shape), "coalesced": value.is_coalesced()}
        elif value.layout is torch.sparse_csr:
            parts = [value.crow_indices(), value.col_indices(), value.values()]
            word = {"csr": list(value.shape)}
        else:
            raise InputError(
                f"a tensor of layout {value.layout} would have to go from one rank to another; "
                "make it dense, or torch.sparse_coo"
            )
        return word | {"parts": [self.of(part) for part in parts]}

    def _add(self, value: Tensor) -> None:
        start = value.data_ptr() % _ALIGNED // value.element_size()
        shape, strides = tuple(value.shape), value.stride()
        layout = _NAMES[value.dtype], shape, strides, start
        once = _once(value).resolve_conj().resolve_neg()
        if once.nbytes >= LEAST and self._share(once, layout):
            return
        sent = _dense(once)
        self.tensors.append(sent)
        self.layouts.append((*layout, tuple(sent.shape), sent.stride()))

    def _share(self, value: Tensor, layout: tuple[Any, ...]) -> bool:
        """Write a tensor into shared memory, laid out as it is, if there is some left."""
        _, shape, strides, start = layout
        span = _span(shape, strides)
        if self._lent is None or span > 4 * value.numel() or _overlaps(shape, strides):
            return False
        slot = self._lent.take((start + span) * value.element_size())
        if slot is None:
            return False
        memory = torch.frombuffer(self._lent.view(slot), dtype=value.dtype)
        memory.as_strided(value.shape, strides, start).copy_(value)
        self.layouts.append((*layout, slot))
        return True


def _once(value: Tensor) -> Tensor:
    """A tensor with each element that it repeats along a dimension once."""
    strides = value.stride()
    if 0 not in strides:
        return value
    shape = [1 if stride == 0 else n for n, stride in zip(value.shape, strides, strict=True)]
    return value.as_strided(shape, strides)


@lru_cache
def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """How many elements there are from a tensor's first to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


@lru_cache
def _overlaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements may be in the same place that are not one, repeated along a dimension."""
    span = 1
    for stride, n in sorted(zip(strides, shape, strict=True)):
        if n > 1 and 0 < stride < span:
            return True
        span += (n - 1) * stride
    return False


def _dense(value: Tensor) -> Tensor:
    """The same on the CPU, with elements that fill the memory from the first to the last."""
    sent = value if value.is_cpu else value.cpu()
    if not sent.is_contiguous() and _span(tuple(sent.shape), sent.stride()) != sent.numel():
        sent = sent.clone(memory_format=torch.contiguous_format)  # it has gaps, or overlaps itself
    return sent


def _room(
    name: str, shape: list[int], strides: list[int], start: int, sent: list[int], order: list[int]
) -> tuple[Tensor, Tensor]:
    """Memory for a tensor, as it will be used and as its bytes arrive; often the same memory."""
    dtype = _DTYPES[name]
    memory = torch.empty(start + _span(tuple(shape), tuple(strides)), dtype=dtype)
    made = memory.as_strided(shape, strides, start)
    if sent == shape and order == strides:
        return made, made
    same = all(n == 1 or s == o for n, s, o in zip(sent, strides, order, strict=True))
    arrives = memory.as_strided(sent, order, start) if same else None
    return made, torch.empty_strided(sent, order, dtype=dtype) if arrives is None else arrives


def _shared(
    borrowed: Borrowed | None,
    name: str,
    shape: list[int],
    strides: list[int],
    start: int,
    slot: list[int],
) -> tuple[Tensor, None]:
    """A tensor that is in shared memory."""
    if borrowed is None:
        raise ValueError("a tensor in shared memory, and none is shared")
    memory = torch.frombuffer(borrowed.view(Slot(*slot)), dtype=_DTYPES[name])
    if min(start, *strides, 0) < 0 or start + _span(tuple(shape), tuple(strides)) > len(memory):
        raise ValueError(f"a tensor beyond the end of its {Slot(*slot)}")
    return memory.as_strided(shape, strides, start), None


def _laid_out(made: Tensor, arrived: Tensor | None) -> Tensor:
    """The tensor as it was; where the bytes were sent in another order, they are copied."""
    if arrived is None or arrived is made:
        return made
    if made.untyped_storage().data_ptr() != arrived.untyped_storage().data_ptr():
        made.as_strided(arrived.shape, made.stride()).copy_(arrived)
    return made


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a dense tensor."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def _nested(tree: Any, tensors: list[Tensor]) -> Any:
    """The value of ``_flattened``'s JSON."""
    if isinstance(tree, list):
        return [_nested(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "scalar" in tree:
        return torch.tensor(tree["scalar"], dtype=_DTYPES[tree["dtype"]])
    if "tuple" in tree:
        return tuple(_nested(item, tensors) for item in tree["tuple"])
    if "dict" in tree:
        return dict(_nested(tree["dict"], tensors))
    parts = [_nested(part, tensors) for part in tree["parts"]]
    if "csr" in tree:
        rows, columns, values = parts
        return torch.sparse_csr_tensor(rows, columns, values, tree["csr"], check_invariants=False)
    indices, values = parts
    made = torch.sparse_coo_tensor(indices, values, tree["coo"], check_invariants=False)
    return made._coalesced_(tree["coalesced"])


def _tuples(key: list[Any]) -> tuple[Any, ...]:
    return tuple([_tuples(item) if isinstance(item, list) else item for item in key])

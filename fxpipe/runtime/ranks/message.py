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
from math import prod
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import InputError

PREFIX = struct.Struct("!IQ")
"""Before each message: the bytes of its head, and the bytes of all its tensors."""

MOST = 1 << 26
"""A head of more bytes than this is none."""

_ALIGNED = 64
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
    """A message as bytes. The tensors are not copied where they lie dense in memory.

    Attributes:
        parts: the bytes in order.
        kept: what has to live until they are sent.
    """

    parts: list[memoryview] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)


def pack(message: Message) -> Packed:
    """The bytes of a message.

    Raises:
        InputError: its value has something in it that cannot be sent.
    """
    tensors: list[Tensor] = []
    layouts: list[Any] = []
    tree = _flattened(message.value, tensors, layouts)
    head = json.dumps([message.kind, message.key, tree, layouts], separators=(",", ":")).encode()
    if len(head) > MOST:
        raise InputError(f"a message to another rank has {len(head)} bytes besides its tensors")
    views = [view for tensor in tensors if len(view := _bytes(tensor))]
    made = Packed([memoryview(PREFIX.pack(len(head), sum(map(len, views))) + head), *views])
    made.kept = tensors
    return made


def digest(tensor: Tensor) -> str:
    """A short text that is the same for tensors with the same values."""
    packed = pack(Message("", (), tensor))
    made = hashlib.sha256()
    for part in packed.parts[1:]:  # the first has the layout as well
        made.update(part)
    return made.hexdigest()[:16]


def unpacking() -> Iterator[memoryview | Message]:
    """Read messages one after another: yields memory to fill, or a message that is complete."""
    while True:
        prefix = bytearray(PREFIX.size)
        yield memoryview(prefix)
        size, rest = PREFIX.unpack(prefix)
        if size > MOST:
            raise ValueError(f"a head of {size} bytes")
        head = bytearray(size)
        yield memoryview(head)
        kind, key, tree, layouts = json.loads(head)
        expected = sum(_DTYPES[name].itemsize * prod(sent) for name, _, _, sent, *_ in layouts)
        if expected != rest:
            raise ValueError(f"{rest} bytes for tensors of {expected} bytes")
        made = [_room(*layout) for layout in layouts]
        yield from (view for _, room in made if len(view := _bytes(room)))
        tensors = [_laid_out(tensor, room) for tensor, room in made]
        yield Message(kind, _tuples(key), _nested(tree, tensors))


def _flattened(value: Any, tensors: list[Tensor], layouts: list[Any]) -> Any:
    """The value as JSON; its tensors are added to ``tensors``, dense and on the CPU."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return _sparse(value, tensors, layouts)
        if not value.dim() and value.device.type == "cpu" and not value.is_complex():
            return {"scalar": value.item(), "dtype": _NAMES[value.dtype]}
        dense, layout = _dense(value.detach())
        tensors.append(dense)
        layouts.append(layout)
        return {"tensor": len(tensors) - 1}
    if value is None or isinstance(value, bool | str | int | float):
        return value
    if isinstance(value, list):
        return [_flattened(item, tensors, layouts) for item in value]
    if type(value) is tuple:
        return {"tuple": [_flattened(item, tensors, layouts) for item in value]}
    if isinstance(value, dict):
        pairs = [[*pair] for pair in value.items()]
        return {"dict": _flattened(pairs, tensors, layouts)}
    raise InputError(
        f"a {type(value).__name__} would have to go from one rank to another, and only tensors, "
        "numbers, strings, lists, tuples and dicts can; let a submodule that makes and uses it be "
        "one leaf module, or keep both on one stage with partition="
    )


def _sparse(value: Tensor, tensors: list[Tensor], layouts: list[Any]) -> Any:
    if value.layout is torch.sparse_coo:
        parts = [value._indices(), value._values()]
        word: Any = {"coo": list(value.shape), "coalesced": value.is_coalesced()}
    elif value.layout is torch.sparse_csr:
        parts = [value.crow_indices(), value.col_indices(), value.values()]
        word = {"csr": list(value.shape)}
    else:
        raise InputError(
            f"a tensor of layout {value.layout} would have to go from one rank to another; make it "
            "dense, or torch.sparse_coo"
        )
    return word | {"parts": [_flattened(part, tensors, layouts) for part in parts]}


def _dense(value: Tensor) -> tuple[Tensor, Any]:
    """A tensor whose elements fill the memory from its first to its last, and the layout to
    restore: dtype, shape, strides, the shape and strides that are sent, and where it starts."""
    start = value.data_ptr() % _ALIGNED // value.element_size()
    shape, strides = tuple(value.shape), value.stride()
    name = _NAMES[value.dtype]
    value = value.resolve_conj().resolve_neg()
    if value.is_cpu and value.is_contiguous() and 0 not in strides:
        return value, [name, shape, strides, shape, strides, start]
    collapsed = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
    sent = value.as_strided(collapsed, strides)
    if value.device.type != "cpu":
        sent = sent.cpu()
    span = 1 + sum((n - 1) * s for n, s in zip(collapsed, sent.stride(), strict=True))
    if span != sent.numel() and sent.numel():
        sent = sent.clone(memory_format=torch.contiguous_format)  # it has gaps, or overlaps itself
    return sent, [name, shape, strides, tuple(sent.shape), sent.stride(), start]


def _room(
    name: str, shape: list[int], strides: list[int], sent: list[int], order: list[int], start: int
) -> tuple[Tensor, Tensor]:
    """Memory for a tensor, as it will be used and as its bytes arrive; often the same memory."""
    dtype = _DTYPES[name]
    span = (
        1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
    )
    memory = torch.empty(start + span, dtype=dtype)
    made = memory.as_strided(shape, strides, start)
    if sent == shape and order == strides:
        return made, made
    same = all(n == 1 or s == o for n, s, o in zip(sent, strides, order, strict=True))
    return made, memory.as_strided(sent, order, start) if same else _strided(sent, order, dtype)


def _strided(shape: list[int], strides: list[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


def _laid_out(made: Tensor, arrived: Tensor) -> Tensor:
    """The tensor as it was; where the bytes were sent in another order, they are copied."""
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


def _tuples(key: Any) -> Any:
    return tuple(map(_tuples, key)) if isinstance(key, list) else key

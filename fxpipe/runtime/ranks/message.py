"""Messages between ranks: a head in JSON, followed by the bytes of the tensors that it describes.

A tensor arrives with the strides and the memory alignment it had, so that the same kernels run on
it and round in the same way. Nothing that arrives is executed: the head is data, never code.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.errors import InputError

PREFIX = struct.Struct("!IQ")
"""Comes before each message: the size of its head, and of all its tensors, in bytes."""

MOST = 1 << 26
"""The maximum size of a head in bytes."""

_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)
_ALIGNED = 64
_NAMES = {d: str(d).removeprefix("torch.") for d in vars(torch).values() if type(d) is torch.dtype}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Message:
    """What one rank tells another.

    Attributes:
        kind: says how the receiver handles the message, such as ``values``.
        key: says what the message belongs to: numbers, strings and lists of them.
        value: tensors, numbers, strings, None, and lists, tuples and dicts of them.
    """

    kind: str
    key: tuple[Any, ...] = ()
    value: Any = None


class _Layout(NamedTuple):
    """How to restore a tensor.

    Attributes:
        dtype: the name of its dtype.
        shape: its sizes.
        strides: its strides.
        start: the number of elements that its new memory has before it, to align it as it was.
        dense: whether its memory is sent as it is, from the first element to the last, or else each
            element once, in order.
    """

    dtype: str
    shape: Sequence[int]
    strides: Sequence[int]
    start: int
    dense: bool

    @property
    def span(self) -> int:
        return _span(tuple(self.shape), tuple(self.strides))

    @property
    def once(self) -> list[int]:
        """The shape, with size 1 for each dimension that repeats the same elements (stride 0)."""
        sizes = zip(self.shape, self.strides, strict=True)
        return [n if stride else min(n, 1) for n, stride in sizes]

    @property
    def nbytes(self) -> int:
        """The number of bytes that are sent."""
        return _DTYPES[self.dtype].itemsize * (self.span if self.dense else prod(self.once))


def pack(message: Message) -> list[memoryview]:
    """Return the bytes of a message, in parts.

    Dense tensors with memory of their own are not copied: their parts keep them alive.

    Raises:
        InputError: the message contains something that cannot be sent.
    """
    flat = _Flat()
    words = [message.kind, message.key, flat.of(message.value), flat.layouts]
    head = _ENCODER.encode(words).encode()
    if len(head) > MOST:
        raise InputError(f"a message to another rank has {len(head)} bytes besides its tensors")
    views = [_bytes(tensor, tensor) for tensor in flat.tensors if tensor.numel()]
    return [memoryview(bytearray(PREFIX.pack(len(head), sum(map(len, views))) + head)), *views]


def digest(tensor: Tensor) -> str:
    """Return a short hash of a tensor's values; empty on the meta device."""
    if tensor.is_meta:
        return ""
    dense = tensor.layout is torch.strided
    flat = tensor.reshape(-1).contiguous() if dense else tensor
    values = hashlib.sha256()
    for part in pack(Message("", (), flat))[1:]:  # without the head, which has the layout
        values.update(part)
    return values.hexdigest()[:16]


def unpacking() -> Iterator[memoryview | Message]:
    """Read messages one after another. Yields either memory that the caller must fill with the
    bytes that arrive next, or a complete message."""
    while True:
        prefix = bytearray(PREFIX.size)
        yield memoryview(prefix)
        size, rest = PREFIX.unpack(prefix)
        if size > MOST:
            raise ValueError(f"a head of {size} bytes")
        head = bytearray(size)
        yield memoryview(head)
        kind, key, tree, words = json.loads(head.decode())
        layouts = [_Layout(*each) for each in words]
        if (expected := sum(each.nbytes for each in layouts)) != rest:
            raise ValueError(f"{rest} bytes for tensors of {expected} bytes")
        tensors = yield from _arriving(layouts)
        message = [Message(kind, _tuples(key), _nested(tree, tensors))]
        del tensors  # keep no reference: the receiver decides how long they live
        yield message.pop()


def _arriving(layouts: Sequence[_Layout]) -> Generator[memoryview, None, list[Tensor]]:
    """Return the tensors of a message; yields the memory to fill for those that are sent."""
    tensors: list[Tensor] = []
    for layout in layouts:
        dtype = _DTYPES[layout.dtype]
        memory = torch.empty(layout.start + layout.span, dtype=dtype)
        if min(layout.start, *layout.strides, 0) < 0:
            raise ValueError(f"a tensor beyond the end of its memory: {layout}")
        tensor = memory.as_strided(layout.shape, layout.strides, layout.start)
        if layout.nbytes:
            arrives = (
                memory[layout.start :] if layout.dense else torch.empty(layout.once, dtype=dtype)
            )
            yield _bytes(arrives)
            if not layout.dense:
                tensor.as_strided(layout.once, layout.strides).copy_(arrives)
        tensors.append(tensor)
    return tensors


class _Flat:
    """Turns a value into JSON and a flat list of tensors.

    Attributes:
        tensors: the tensors that are sent, on the CPU.
        layouts: the layouts of all tensors.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.layouts: list[_Layout] = []

    def of(self, value: Any) -> Any:
        """Return a value as JSON, and collect its tensors."""
        if isinstance(value, Tensor):
            if value.layout is not torch.strided:
                return self._sparse(value)
            plain = not (value.is_complex() or value.is_quantized)
            if not value.dim() and value.device.type == "cpu" and plain:
                return {"scalar": value.item(), "dtype": _NAMES[value.dtype]}
            if value.is_quantized:
                raise InputError(
                    "a quantised tensor would have to go from one rank to another; let a submodule "
                    "that makes and uses it be one leaf module, or keep both on one stage with "
                    "partition="
                )
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
        layout = _Layout(_NAMES[value.dtype], tuple(value.shape), value.stride(), start, True)
        view = value.as_strided(layout.once, layout.strides)
        plain = view.resolve_conj().resolve_neg().cpu()
        dense = plain.stride() == view.stride() and layout.span == plain.numel()
        if dense and plain.nbytes < plain.untyped_storage().nbytes():
            plain = plain.clone()  # it would keep all of its memory until it is there
        self.tensors.append(plain if dense else plain.contiguous())
        self.layouts.append(layout._replace(dense=dense))


@lru_cache
def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """The number of elements that a tensor's memory spans, from its first to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _bytes(tensor: Tensor, kept: Tensor | None = None) -> memoryview:
    """Return the memory of a dense tensor; the view keeps ``kept`` alive."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.kept = kept  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def _nested(tree: Any, tensors: list[Tensor]) -> Any:
    """Return the value from its JSON and its tensors; undoes ``_Flat.of``."""
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
    sparse = torch.sparse_coo_tensor(indices, values, tree["coo"], check_invariants=False)
    return sparse._coalesced_(tree["coalesced"])


def _tuples(key: list[Any]) -> tuple[Any, ...]:
    return tuple([_tuples(item) if isinstance(item, list) else item for item in key])

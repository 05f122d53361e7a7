"""Messages between ranks: a head in JSON, and the bytes of the tensors that it describes.

A tensor arrives as it was: same strides, same alignment in memory, so that the same kernels run on
it and round alike. Nothing that arrives is executed: a head is data, never code.
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
from fxpipe.runtime.ranks.shared import LEAST, BorrowedMemory, LentMemory, Slot

PREFIX = struct.Struct("!IQ")
"""Before each message: the bytes of its head, and the bytes of all its tensors."""

MOST = 1 << 26
"""A head of more bytes than this is none."""

_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)
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


class _Layout(NamedTuple):
    """How to restore a tensor.

    Attributes:
        dtype: its name.
        shape: its sizes.
        strides: its strides.
        start: how many elements its memory has before it, so that it is aligned as it was.
        where: its slot in shared memory. Else what is sent: True for its memory from the first
            element to the last, False for each element once, in order.
    """

    dtype: str
    shape: Sequence[int]
    strides: Sequence[int]
    start: int
    where: Sequence[int] | bool

    @property
    def span(self) -> int:
        """How many elements there are from the first to the last."""
        return _span(tuple(self.shape), tuple(self.strides))

    @property
    def once(self) -> list[int]:
        """The shape with size 1 where a dimension repeats the same elements (stride 0)."""
        sizes = zip(self.shape, self.strides, strict=True)
        return [n if stride else min(n, 1) for n, stride in sizes]

    @property
    def nbytes(self) -> int:
        """How many bytes are sent."""
        if not isinstance(self.where, bool):
            return 0
        return _DTYPES[self.dtype].itemsize * (self.span if self.where else prod(self.once))


def pack(message: Message, lent: LentMemory | None = None) -> list[memoryview]:
    """The bytes of a message, in parts, which keep the tensors alive. These are not copied where
    they lie dense in memory; large ones go to memory that is lent to the process that gets them.
    Raises InputError where the message has something in it that cannot be sent."""
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
    views = [_bytes(tensor, tensor) for tensor in flat.tensors if tensor.numel()]
    return [memoryview(PREFIX.pack(len(head), sum(map(len, views))) + head), *views]


def digest(tensor: Tensor) -> str:
    """A short text that is the same for tensors with the same values; empty where one has none."""
    if tensor.is_meta:
        return ""
    dense = tensor.layout is torch.strided
    flat = tensor.reshape(-1).contiguous() if dense else tensor
    made = hashlib.sha256()
    for part in pack(Message("", (), flat))[1:]:  # the first has the layout as well
        made.update(part)
    return made.hexdigest()[:16]


def unpacking(borrowed: BorrowedMemory | None = None) -> Iterator[memoryview | Message]:
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
        kind, key, tree, words = json.loads(head.decode())
        layouts = [_Layout(*each) for each in words]
        if (expected := sum(each.nbytes for each in layouts)) != rest:
            raise ValueError(f"{rest} bytes for tensors of {expected} bytes")
        tensors = yield from _arriving(layouts, borrowed)
        message = [Message(kind, _tuples(key), _nested(tree, tensors))]
        del tensors  # they are to live no longer than who gets them says
        yield message.pop()


def _arriving(
    layouts: Sequence[_Layout], borrowed: BorrowedMemory | None
) -> Generator[memoryview, None, list[Tensor]]:
    """The tensors of a message; yields memory for those that are sent."""
    found: list[Tensor] = []
    for layout in layouts:
        dtype, where = _DTYPES[layout.dtype], layout.where
        if isinstance(where, bool):
            memory = torch.empty(layout.start + layout.span, dtype=dtype)
        elif borrowed is None:
            raise ValueError("a tensor in shared memory, and none is shared")
        else:
            memory = torch.frombuffer(borrowed.view(Slot(*where)), dtype=dtype)
        least = min(layout.start, *layout.strides, 0)
        if least < 0 or layout.start + layout.span > len(memory):
            raise ValueError(f"a tensor beyond the end of its memory: {layout}")
        tensor = memory.as_strided(layout.shape, layout.strides, layout.start)
        if layout.nbytes:
            arrives = memory[layout.start :] if where else torch.empty(layout.once, dtype=dtype)
            yield _bytes(arrives)
            if not where:
                tensor.as_strided(layout.once, layout.strides).copy_(arrives)
        found.append(tensor)
    return found


class _Flat:
    """Values as JSON, beside their tensors.

    Attributes:
        tensors: those that are sent, on the CPU.
        layouts: how to restore all.
    """

    def __init__(self, lent: LentMemory | None) -> None:
        self.tensors: list[Tensor] = []
        self.layouts: list[_Layout] = []
        self._lent = lent

    def give_back(self) -> None:
        """The message is not sent."""
        for layout in self.layouts:
            if self._lent is not None and isinstance(layout.where, Slot):
                self._lent.give_back(layout.where)

    def of(self, value: Any) -> Any:
        """A value as JSON."""
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
        plain = view.resolve_conj().resolve_neg()
        slot = self._shared(plain, layout)
        if slot is None:
            plain = plain.cpu()
            dense = plain.stride() == view.stride() and layout.span == plain.numel()
            self.tensors.append(plain if dense else plain.contiguous())
            layout = layout._replace(where=dense)
        else:
            layout = layout._replace(where=slot)
        self.layouts.append(layout)

    def _shared(self, value: Tensor, layout: _Layout) -> Slot | None:
        """Where a tensor was written into shared memory, laid out as it is, if there was room."""
        large = value.nbytes >= LEAST and layout.span <= 4 * value.numel()
        if self._lent is None or not large or _overlaps(layout.shape, layout.strides):
            return None
        slot = self._lent.take((layout.start + layout.span) * value.element_size())
        if slot is not None:
            memory = torch.frombuffer(self._lent.view(slot), dtype=value.dtype)
            memory.as_strided(value.shape, layout.strides, layout.start).copy_(value)
        return slot


@lru_cache
def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """How many elements there are from a tensor's first to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


@lru_cache
def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share memory other than along a dimension of stride 0."""
    span = 1
    for stride, n in sorted(zip(strides, shape, strict=True)):
        if n > 1 and 0 < stride < span:
            return True
        span += (n - 1) * stride
    return False


def _bytes(tensor: Tensor, kept: Tensor | None = None) -> memoryview:
    """The memory of a dense tensor; it keeps ``kept`` alive."""
    made = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    made.kept = kept  # type: ignore[attr-defined]
    return memoryview(made).cast("B")


def _nested(tree: Any, tensors: list[Tensor]) -> Any:
    """The value of ``_Flat.of``'s JSON."""
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

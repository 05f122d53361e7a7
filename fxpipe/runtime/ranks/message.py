"""Messages between ranks: a pickled head, followed by the memory of the tensors in it.

A tensor arrives with the strides and the memory alignment it had, so that the same kernels run on
it and round in the same way. A head is read with the names of ``_KNOWN`` only, so that nothing that
arrives is executed.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import pickle
import struct
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.errors import InputError

PREFIX = struct.Struct("!IQ")
"""Comes before each message: the size of its head, and of all its tensors, in bytes."""

MOST = 1 << 26
"""The maximum size of a head in bytes."""

_ALIGNED = 64


class Message(NamedTuple):
    """What one rank tells another.

    Attributes:
        kind: says how the receiver handles the message, such as ``values``.
        key: says what the message belongs to: numbers, strings and tuples of them.
        value: tensors, numbers, strings, None, and lists, tuples and dicts of them.
    """

    kind: str
    key: tuple[Any, ...] = ()
    value: Any = None


def pack(message: Message) -> list[memoryview]:
    """Return the bytes of a message, in parts.

    Dense tensors with memory of their own are not copied: their parts keep them alive.

    Raises:
        InputError: the message contains something that cannot be sent.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(tuple(message))
    sizes = pickle.dumps([(start, len(memory)) for start, memory in pickler.memories], 5)
    head = sizes + file.getvalue()
    if len(head) > MOST:
        raise InputError(f"a message to another rank has {len(head)} bytes besides its tensors")
    parts = [memory for _, memory in pickler.memories if memory]
    return [memoryview(bytearray(PREFIX.pack(len(head), sum(map(len, parts))) + head)), *parts]


def digest(tensor: Tensor) -> str:
    """Return a short hash of a tensor's values; empty on the meta device."""
    if tensor.is_meta:
        return ""
    flat = tensor.reshape(-1).contiguous()
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
        file = io.BytesIO(head)
        sizes = _Unpickler(file).load()
        if (expected := sum(nbytes for _, nbytes in sizes)) != rest:
            raise ValueError(f"{rest} bytes for tensors of {expected} bytes")
        memories = [torch.empty(sum(each), dtype=torch.uint8)[each[0] :] for each in sizes]
        for memory in memories:
            if memory.numel():
                yield _bytes(memory)
        message = [Message(*_Unpickler(file, buffers=memories).load())]
        del memories  # keep no reference: the receiver decides how long they live
        yield message.pop()


class _Pickler(pickle.Pickler):
    """Pickles a message without its tensors.

    Attributes:
        memories: the memory of each tensor, and how many bytes come before it at the receiver.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 5, buffer_callback=lambda buffer: None)
        self.memories: list[tuple[int, memoryview]] = []

    def reducer_override(self, value: Any) -> Any:
        """How to make a value again. Called with all but plain numbers, strings and containers."""
        if isinstance(value, Tensor):
            return self._tensor(value.detach())
        if _KNOWN.get(getattr(value, "__name__", "")) is value:
            return NotImplemented
        plain: tuple[Any, ...] = (dict, list, str, int, float)
        for kind in plain:
            if isinstance(value, kind):
                return kind, (kind(value),)
        raise InputError(
            f"a {type(value).__name__} would have to go from one rank to another, and only "
            "tensors, numbers, strings, lists, tuples and dicts can; let a submodule that makes "
            "and uses it be called as it is (fxpipe.LeafModules), or keep both on one stage with "
            "partition="
        )

    def _tensor(self, value: Tensor) -> Any:
        shape = tuple(value.shape)
        if value.is_quantized:
            raise InputError(
                "a quantised tensor would have to go from one rank to another; let a submodule "
                "that makes and uses it be called as it is (fxpipe.LeafModules), or keep both on "
                "one stage with partition="
            )
        strides, start = value.stride(), value.data_ptr() % _ALIGNED // value.element_size()
        once = value.as_strided(_once(shape, strides), strides)
        plain = once.resolve_conj().resolve_neg().cpu()
        dense = plain.stride() == strides and _span(shape, strides) == plain.numel()
        if not dense:
            plain = plain.contiguous()
        elif plain.nbytes < plain.untyped_storage().nbytes():
            plain = plain.clone()  # it would keep all of its memory until it is there
        memory = _bytes(plain, plain) if plain.numel() else memoryview(b"")
        self.memories.append((start * plain.element_size() * dense, memory))
        dtype = str(value.dtype).removeprefix("torch.")
        buffer = pickle.PickleBuffer(bytearray())  # stands for the memory
        return _strided, (buffer, dtype, shape, strides, start, dense)


def _strided(
    memory: Tensor,
    dtype: str,
    shape: Sequence[int],
    strides: Sequence[int],
    start: int,
    dense: bool,
) -> Tensor:
    """Make a tensor of what has arrived: its memory as it was, from the first element to the last,
    if it was ``dense``, or else each element once, in order. ``start`` elements come before it in
    new memory, to align it as it was."""
    arrived = memory.view(getattr(torch, dtype))
    if dense:
        return arrived.as_strided(shape, strides)
    tensor = torch.empty(start + _span(shape, strides), dtype=arrived.dtype)
    tensor = tensor.as_strided(shape, strides, start)
    once = _once(shape, strides)
    tensor.as_strided(once, strides).copy_(arrived.view(once))
    return tensor


_KNOWN = {each.__name__: each for each in (_strided, dict, list, str, int, float)}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _KNOWN[name]


def _once(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The shape, with size 1 for each dimension that repeats the same elements (stride 0)."""
    return [n if stride else min(n, 1) for n, stride in zip(shape, strides, strict=True)]


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements that a tensor's memory spans, from its first to its last."""
    if not prod(shape):
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _bytes(tensor: Tensor, kept: Tensor | None = None) -> memoryview:
    """Return the memory of a dense tensor; the view keeps ``kept`` alive."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.kept = kept  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")

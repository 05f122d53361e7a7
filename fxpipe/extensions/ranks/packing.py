"""Values as bytes, on their way from rank to rank.

What ranks tell each other to agree and to fail together is *control*: numbers, texts, containers of
them, tensors and the few classes in ``CONTROL``. It is read by an unpickler that makes nothing
else. A value of the user that is no tensor is pickled apart, and travels within as bytes, which are
unpickled only where such a value is expected.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import InputError, told

CONTROL = {
    ("builtins", "range"),
    ("torch", "Size"),
    ("fxpipe.ir.value", "Buffer"),
    ("fxpipe.extensions.ranks.packing", "_tensor"),
    ("fxpipe.passes.partition.measure", "NodeCost"),  # the costs that rank 0 has measured
}
"""Module and name of what control may hold, besides the data types of tensors."""


def pack(value: Any) -> bytearray:
    """Return a value as bytes. Raises InputError if it cannot be pickled."""
    file = BytesIO()
    try:
        _Pickler(file, 5).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise InputError(
            f"a value would have to go from one rank to another and cannot ({told(error)}); let a "
            "submodule that makes and uses it be called as it is (fxpipe.LeafModules), or keep "
            "both on one stage with partition="
        ) from error
    return bytearray(file.getbuffer())


def unpack(data: Any) -> Any:
    """Return what ``pack`` was given, if it was control.

    Raises:
        RefusedError: it holds something else, of which nothing was imported or called.
    """
    return _Unpickler(BytesIO(data) if isinstance(data, bytes) else _Reader(data)).load()


def enclosed(value: Any) -> Any:
    """A value of the user, to travel in control: ``opened`` returns it. Raises like ``pack``."""
    return value if _is_dense(value) else pack(value)


def opened(value: Any) -> Any:
    """The value that ``enclosed`` was given. As it may be of any class, this may run any code."""
    return pickle.loads(value) if isinstance(value, bytes | bytearray) else value


class _Pickler(pickle.Pickler):
    """Pickles dense tensors as the memory of a copy on the CPU, without gaps."""

    def reducer_override(self, value: Any) -> Any:
        if not _is_dense(value):
            return NotImplemented
        dense = value.detach().resolve_conj().resolve_neg().cpu().clone()
        flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(flat.data), dense.dtype, dense.shape, dense.stride())


class RefusedError(pickle.UnpicklingError):
    """What is no control; the message is its module and name."""


class _Reader:
    """A file over memory that it does not copy, as the value may be as large as the model."""

    def __init__(self, data: Any) -> None:
        self._data, self._at = memoryview(data), 0

    def read(self, size: int) -> bytes:
        begin, self._at = self._at, self._at + size
        return bytes(self._data[begin : self._at])

    def readinto(self, target: Any) -> int:
        begin, self._at = self._at, self._at + len(target)
        part = self._data[begin : self._at]
        target[: len(part)] = part
        return len(part)

    def readline(self) -> bytes:
        raise RefusedError("a pickle of an old protocol")  # only these are read by lines


class _Unpickler(pickle.Unpickler):
    """Makes only what control consists of."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in CONTROL:
            return super().find_class(module, name)
        found = vars(torch).get(name) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise RefusedError(f"{module}.{name}")


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized


def _tensor(
    memory: bytearray, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
) -> Tensor:
    if not memory:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)

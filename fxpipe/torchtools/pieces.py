"""The dense tensors that a sparse tensor consists of: its indices and values.

A sparse tensor itself has no storage, strides or entries to compare; its indices and values do.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_COMPRESSED: Mapping[torch.layout, tuple[str, str]] = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}

SPARSE = {str(layout): layout for layout in (torch.sparse_coo, *_COMPRESSED)}
"""The sparse layouts by their names."""


def pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """A dense tensor itself; the indices of a sparse tensor, and last its values."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in _COMPRESSED:
        rows, columns = (getattr(tensor, name)() for name in _COMPRESSED[tensor.layout])
        return rows, columns, tensor.values()
    return (tensor,)


def memory(tensor: Tensor) -> int:
    """A number that identifies the storage of a tensor's values; the same for its views."""
    return int(pieces(tensor)[-1].untyped_storage()._cdata)


def size_in_bytes(tensor: Tensor) -> int:
    """The bytes of a tensor's elements; of a sparse tensor's indices and values."""
    return sum(piece.numel() * piece.element_size() for piece in pieces(tensor))


def equal(one: Tensor, other: Tensor) -> bool:
    """``torch.equal``; two sparse tensors are equal if their indices and values are."""
    return one.layout is other.layout and all(map(torch.equal, pieces(one), pieces(other)))

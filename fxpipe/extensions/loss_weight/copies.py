"""Copies of tensors on other devices, for whoever reads the same tensor in every step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_COPIES = WeakTensorKeyDictionary()
"""Tensor → device → the tensor's version, and a copy of it."""


def current_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor itself if it is on the device, else a copy there, not to be written.

    The copy is made anew where the tensor has been written since, so that the host waits for a
    device only then.
    """
    if tensor.device == device:
        return tensor
    copies: dict[torch.device, tuple[int, Tensor]] = _COPIES.setdefault(tensor, {})
    version, copy = copies.get(device, (-1, tensor))
    if version != tensor._version:
        copy = tensor.to(device)
        copies[device] = tensor._version, copy
    return copy

"""Check the arguments ``clip_norm`` and ``scaler`` of ``compile``, of which one is given."""

from __future__ import annotations

import math
from typing import Any

import torch

from fxpipe.errors import InputError


def check_clipping(clip_norm: Any, scaler: Any, optimizer: Any) -> None:
    """Raise InputError if the limit is no positive number, the scaler is no GradScaler, or there
    is no optimizer."""
    number = isinstance(clip_norm, int | float) and not isinstance(clip_norm, bool)
    if clip_norm is not None and not (number and 0 < clip_norm < math.inf):
        raise InputError(f"clip_norm is {clip_norm!r}; give a number above 0, such as 1.0")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InputError(
            f'scaler is {scaler!r}; give a gradient scaler, such as torch.amp.GradScaler("cpu")'
        )
    if optimizer is None:
        word = "scaler" if clip_norm is None else "clip_norm"
        raise InputError(
            f"{word} is given and no optimizer, whose update it is for; give optimizer=, or leave "
            f"{word} out and treat .grad yourself"
        )

"""What a restore finds wrong before anything changes, and that it is told by name."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import fxpipe
from fxpipe.extensions.checkpoint import file as checkpoint
from tests.helpers.checkpoints import (
    PLAIN,
    everything,
    make,
    run,
    same,
)
from tests.helpers.overlapping import ADAMW
from tests.oracles.delayed_loop import MSE

pytestmark = pytest.mark.smoke


NAMED: list[tuple[str, Any, str]] = [
    ("history/newest", 1, r"has 1 batches, and the versions \[0, 2\]"),
    ("clipping", {}, "state of clipping is {}"),
    ("clipping", {"scale": -1.0, "grown": 0, "norm": None, "skipped": 0}, "clipping is {'scale'"),
    ("clipping", {"scale": 1.0, "grown": 0, "norm": "x", "skipped": 0}, "clipping is {'scale'"),
    ("random", torch.zeros(3, dtype=torch.uint8), "random generator of cpu is invalid"),
    (
        "optimizer/parameters/0.0.bias/group",
        3,
        "'0.0.bias' is in parameter group 0 of the optimizer, and was in",
    ),
    ("history/older", {1: {"0.0.bias": torch.zeros(6)}}, "its version 1 of parameter '0.0.b"),
    ("history/older", {1: {"x": torch.zeros(6)}}, "its version 1 of parameter 'x' is none of"),
]
"""The place of a value, another value there, and what is told."""


@pytest.mark.parametrize("steps", [0, 1])
def test_what_is_wrong_is_named(steps: int, trained: Path, tmp_path: Path) -> None:
    model, data = make("mlp", 1, 4)
    scaler = torch.amp.GradScaler("cpu")
    with fxpipe.compile(model, 2, loss=MSE, optimizer=ADAMW, scaler=scaler, **PLAIN) as pipe:
        run(pipe, data[:steps])
        before = everything(pipe, scaler)
        for at, wrong, message in NAMED:
            saved: Any = checkpoint.read_checkpoint(trained)
            *path, last = at.split("/")
            holder = functools.reduce(inside, path, saved)
            if isinstance(holder, dict):
                holder[last] = wrong
            else:
                object.__setattr__(holder, last, wrong)
            checkpoint.write_checkpoint(saved, tmp_path / "wrong")
            with pytest.raises(fxpipe.CheckpointError, match=message):
                pipe.restore(tmp_path / "wrong")
            assert same(everything(pipe, scaler), before), at


def inside(value: Any, key: str) -> Any:
    if isinstance(value, list):
        return value[int(key)]
    return value[key] if isinstance(value, dict) else getattr(value, key)

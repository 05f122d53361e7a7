"""Weights that are memory-mapped from a file are read there, and nothing copies them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import fxpipe
from tests.helpers.mapped import copied_pages, mapped

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux tells which pages were copied"
)

WIDTH = 128


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
@pytest.mark.parametrize(
    "options", [{}, {"schedule": "zb-h1"}, {"extensions": [fxpipe.LeafModules("1")]}]
)
def test_nothing_copies_mapped_weights(tmp_path: Path, options: dict[str, Any], name: str) -> None:
    assert_uncopied(tmp_path, options, name)


def assert_uncopied(
    tmp_path: Path,
    options: dict[str, Any],
    name: str,
    look: Callable[[fxpipe.Pipeline], object] = repr,
) -> None:
    """Compile, train and save a model of mapped weights, and ``look`` at its pipe."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    file = tmp_path / name
    mapped(model, file)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    with fxpipe.compile(
        model, ["cpu", "cpu"], microbatches=4, partition=["2"], loss=mse_loss, **options
    ) as pipe:
        pipe.prepare(x, target=y)
        pipe.eval()
        pipe(x)
        pipe.train()
        pipe.step(x, target=y)
        pipe.step(x[:7], target=y[:7])
        str(pipe)
        pipe.save(tmp_path / "run")
        look(pipe)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    resident, written = copied_pages(file)
    assert resident >= 4 * WIDTH * WIDTH * 4 / 1024
    assert written == 0
    with torch.no_grad():
        next(model.parameters()).mul_(2)  # pages that are written are seen
    assert copied_pages(file)[1] >= WIDTH * WIDTH * 4 / 1024 - 4

"""The sequences that torchgpipe is given compute what their models do, and divide no better."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import chains
from benchmarks.models.amoebanet import AmoebaNetD
from benchmarks.models.resnet import ResNet
from benchmarks.models.unet import UNet

pytestmark = pytest.mark.models

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], nn.Module]]] = {
    "resnet": (lambda: ResNet((1, 2, 1, 1), width=2, classes=3), chains.resnet),
    "unet": (lambda: UNet(2, 4, depth=2, dropout=0.0), chains.unet),
    "amoebanet": (lambda: AmoebaNetD(3, 16, classes=3), chains.amoebanet),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_computes_what_its_model_does(name: str) -> None:
    make, sequence = MODELS[name]
    model = make().eval()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(sequence(model)(x), expected)


def test_times_of_layers_are_those_of_their_operations() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh())
    atoms = chains.measured(model, torch.randn(4, 8))
    assert sum(chains.layer_times(atoms)) == pytest.approx(1e3 * atoms.work.total)
    assert len(chains.layer_times(atoms)) == len(model)
    assert all(seconds > 0 for seconds in chains.layer_times(atoms))

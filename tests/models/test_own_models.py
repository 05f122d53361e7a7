"""Models written from their papers: as large as told there, and trained as by a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.models import own
from benchmarks.models.amoebanet import AmoebaNetD, Cell
from benchmarks.models.cases import Case
from benchmarks.models.resnet import ResNet
from benchmarks.models.unet import UNet
from tests.helpers.profiles import DEEP
from tests.helpers.trained import Setting, assert_trained_as_by_the_loop, settings


@pytest.mark.parametrize(
    ("make", "millions"),
    [
        (lambda: UNet(5, 64), 232.7),  # arXiv 2004.09910, table 2
        (lambda: AmoebaNetD(18, 256), 122.5),  # the same, and arXiv 1811.06965
        (ResNet, 44.5),  # arXiv 1512.03385
    ],
)
def test_full_size_models_have_as_many_parameters_as_their_papers_say(
    make: Callable[[], nn.Module], millions: float
) -> None:
    with torch.device("meta"):
        model = make()
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == millions


def three_cells() -> AmoebaNetD:
    """The first three of seven cells, which are of both kinds and reach over each other."""
    model = AmoebaNetD(3, 16, classes=own.CLASSES)
    del model.cells[3:]
    normal = model.cells[-1]
    assert isinstance(normal, Cell)
    parts = len(normal.genotype.returned)
    model.head[-1] = nn.Linear(16 * parts, own.CLASSES)
    return model


SHALLOWER: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "ResNet-101": ("ResNet-17", partial(ResNet, (1, 2, 1, 1), width=2, classes=own.CLASSES)),
    "AmoebaNet-D (3, 16)": ("three cells of AmoebaNet-D", three_cells),
}
"""Models with fewer of the same blocks."""


def shallower(case: Case) -> Case:
    """A model with fewer of the same blocks; in a deep run with all of them."""
    if DEEP or case.name not in SHALLOWER:
        return case
    name, model = SHALLOWER[case.name]
    return replace(case, name=name, model=model)


@pytest.mark.parametrize("setting", settings([*map(shallower, own.CASES)]))
def test_training_equals_the_loop(setting: Setting) -> None:
    assert_trained_as_by_the_loop(setting)

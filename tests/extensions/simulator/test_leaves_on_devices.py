"""How much memory leaf modules need on simulated devices, while these may have no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import nn

import fxpipe
from tests.helpers.profiles import deep
from tests.simcuda.process import on_devices, simulated
from tests.simcuda.test_memory import SGD, Adam, Optimizer, assert_within, counted

pytestmark = [simulated, pytest.mark.models]


@pytest.mark.parametrize("optimizer", [SGD, Adam])
@pytest.mark.parametrize(
    "options",
    [
        {"extensions": [fxpipe.LeafModules("layers.1")]},
        {"extensions": [fxpipe.LeafModules(nn.Linear)]},
    ],
)
def test_compiling_stages_that_autograd_differentiates_takes_no_more_than_steps(
    options: Mapping[str, Any], optimizer: Optimizer
) -> None:
    assert_within(*on_devices(counted, options, optimizer))


def predicted(options: Mapping[str, Any], optimizer: Optimizer) -> tuple[list[int], list[int]]:
    """Device → the bytes that it holds at most as predicted, and in steps."""
    found: list[int] = []

    def look(pipe: fxpipe.Pipeline, *batch: object) -> None:
        found.extend(memory.peak for memory in pipe.simulate().memory)

    steps, _, _ = counted(
        {"extensions": [fxpipe.LeafModules(nn.Linear)], **options}, optimizer, look
    )
    return found, steps


@pytest.mark.parametrize("optimizer", [SGD, *deep(Adam)])
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "gpipe"},
        {"schedule": "1f1b"},
        {"schedule": "1f1b", "recompute": "always"},
        {"schedule": "zb-h1", "extensions": [fxpipe.LeafModules("layers.1", "layers.6")]},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_what_leaves_save_and_their_gradients_are_predicted(
    options: Mapping[str, Any], optimizer: Optimizer
) -> None:
    found, steps = on_devices(predicted, options, optimizer)
    assert found == pytest.approx(steps, rel=0.01)

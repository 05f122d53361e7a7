"""How much memory leaf modules need on simulated devices, while these may have no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import fxpipe
from tests.extensions.leaf_modules.leaf_tracer import LeavesOnly
from tests.simcuda.process import on_devices, simulated
from tests.simcuda.test_memory import SGD, Adam, Optimizer, assert_within, counted

pytestmark = simulated


@pytest.mark.parametrize("optimizer", [SGD, Adam])
@pytest.mark.parametrize(
    "options",
    [{"extensions": [fxpipe.LeafModules("layers.1")]}, {"extensions": [LeavesOnly()]}],
)
def test_compiling_stages_that_autograd_differentiates_takes_no_more_than_steps(
    options: Mapping[str, Any], optimizer: Optimizer
) -> None:
    assert_within(*on_devices(counted, options, optimizer))

"""The tests of what CUDA devices hold while a pipe is compiled, on simulated devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu import test_compile_memory as held
from tests.simcuda.process import on_devices, simulated

pytestmark = simulated


@pytest.mark.parametrize(
    "test",
    [
        held.test_no_parameter_is_ever_on_a_device_that_does_not_run_its_stage,
        held.test_a_check_that_fails_leaves_the_model_where_it_was,
    ],
)
def test_weights_are_on_the_devices_of_their_stages(test: Callable[[], None]) -> None:
    on_devices(test)


@pytest.mark.deep
def test_a_model_larger_than_a_device_trains_and_resumes(tmp_path: Path) -> None:
    on_devices(held.test_a_model_larger_than_a_device_trains_and_resumes, tmp_path, devices=8)

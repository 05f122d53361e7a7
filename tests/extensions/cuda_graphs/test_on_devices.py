"""The tests of this folder that need a CUDA device, on simulated ones, all in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simcuda.process import on_devices, simulated
from tests.simcuda.test_gpu_tests import assert_pass, run

pytestmark = simulated

FILES = ("test_captured.py", "test_capturing.py", "test_cuda_graphs.py")


@pytest.mark.parametrize("some", [pytest.param("smoke", marks=pytest.mark.smoke), "not smoke"])
def test_captured_graphs_pass_their_tests_on_simulated_devices(some: str) -> None:
    files = [str(Path(__file__).with_name(file)) for file in FILES]
    failed, skipped, passed, races = on_devices(run, [*files, "-m", some])
    assert not failed, "\n".join(failed.values())
    assert not skipped
    assert not races
    assert passed


def test_the_tests_for_a_gpu_pass_on_simulated_devices() -> None:
    assert_pass(Path(__file__).with_name("test_gpu.py"))

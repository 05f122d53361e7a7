"""The tests of ``tests/gpu/test_cuda.py`` on simulated devices, all in one process.

``test_compile_memory`` here runs what else there is, and extensions run those that stand with them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.simcuda.process import on_devices, simulated

pytestmark = simulated

DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
"""Not by hypothesis, which pytest would find imported in the process with devices."""

GPU = Path(__file__).parents[1] / "gpu"
CANNOT = {
    "times are not simulated",
    "the driver makes no green context: PyTorch was not built with Green Context support!",
}
"""Why tests are skipped there."""


class Outcomes:
    """Collects how tests end."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2]
        if report.failed:
            self.failed[name] = report.longreprtext
        elif report.skipped:
            assert isinstance(report.longrepr, tuple)
            self.skipped[name] = report.longrepr[2].removeprefix("Skipped: ")
        elif report.when == "call":
            self.passed += 1


def run(given: Sequence[str]) -> tuple[dict[str, str], dict[str, str], int, list[str]]:
    """Run tests by pytest with these arguments.

    Returns:
        The tests that have failed and that were skipped, each with the text of why; how many have
        passed; and the races.
    """
    from tests.simcuda import cuda

    cuda.configure(cuda.Mode.LAZY)
    outcomes = Outcomes()
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    pytest.main([*options, *given], plugins=[outcomes])
    return outcomes.failed, outcomes.skipped, outcomes.passed, list(cuda.take().races)


LESS = " and ".join(
    [
        "(not gradients_are_the_loops or (zb and streams and thread))",
        "not fails_is_told_by_name",  # as test_pipes here, and each starts a process
        "not (batches_that_overlap and device)",
        "not (recomputations_make_the_same and thread)",
    ]
)
"""Of many like tests a few."""


def test_the_tests_for_a_gpu_pass_on_simulated_devices() -> None:
    assert_pass(GPU / "test_cuda.py", *([] if DEEP else ["-k", LESS]))


def assert_pass(file: Path, *options: str) -> None:
    """The tests of a file pass, but for those that need a GPU."""
    failed, skipped, passed, races = on_devices(run, [str(file), *options])
    assert not failed, "\n".join(failed.values())
    assert not races
    assert passed
    why = {why for why in skipped.values() if not why.startswith("needs the extension")}
    assert why <= CANNOT

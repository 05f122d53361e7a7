"""The libraries of compiled stages, for the tests that ask for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fxpipe.passes.inductor import libraries
from tests.helpers.stage_libraries import Processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The libraries of these tests: what one has compiled the others load, those of other
    workers among them. The processes that compile are shared, too."""
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "inductor"
    processes = Processes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(path))
        patch.setenv("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")  # what calls the kernels
        patch.setattr(libraries, "Popen", processes)
        patch.setattr(libraries, "processors", lambda: 1)
        yield path / "fxpipe"
    processes.end()

"""The libraries of compiled stages, for the tests that ask for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fxpipe.extensions.inductor import libraries
from tests.extensions.inductor.stage_libraries import Pools, settings


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    kept = Pools()
    yield kept
    kept.end()


@pytest.fixture
def folder(
    pools: Pools, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The libraries of all tests: what one has compiled the others load, those of other workers
    among them. The processes that compile are shared, too."""
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "inductor" / "fxpipe"
    for name, value in settings(path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(libraries, "start_pool", pools)
    return path

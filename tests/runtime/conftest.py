"""Stand-ins for CUDA and for its graphs, for the tests that ask for one."""

from __future__ import annotations

import gc

import pytest

from tests.helpers import fake_cuda, fake_graphs
from tests.helpers.fake_cuda import Cuda
from tests.helpers.fake_graphs import Graphs


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return fake_cuda.install(monkeypatch)


@pytest.fixture
def graphs(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Graphs:
    return fake_graphs.install(monkeypatch)


@pytest.fixture(scope="module", autouse=True)
def collections_look_at_what_is_new() -> None:
    """What earlier tests have left is no garbage, and a collection does not go through it again:
    there are some after each step of the tests that look for what stays alive."""
    gc.collect()
    gc.freeze()

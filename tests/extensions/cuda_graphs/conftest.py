"""Stand-ins for CUDA and for its graphs, for the tests that ask for one."""

from __future__ import annotations

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

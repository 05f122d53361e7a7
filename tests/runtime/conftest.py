"""A stand-in for CUDA, for the tests that ask for it."""

from __future__ import annotations

import pytest

from tests.helpers import fake_cuda
from tests.helpers.fake_cuda import Cuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return fake_cuda.install(monkeypatch)

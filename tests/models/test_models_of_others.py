"""Models of transformers and diffusers, unchanged, are trained as by a plain loop."""

from __future__ import annotations

import pytest

from benchmarks.models import others
from tests.helpers.trained import Setting, assert_trained_as_by_the_loop, settings


@pytest.mark.parametrize("setting", settings(others.CASES))
def test_training_equals_the_loop(setting: Setting) -> None:
    assert_trained_as_by_the_loop(setting)

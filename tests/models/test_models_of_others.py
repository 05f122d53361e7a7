"""Models of transformers and diffusers, unchanged, are trained as by a plain loop."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from benchmarks.models import others
from benchmarks.models.cases import Case
from tests.helpers.profiles import DEEP
from tests.helpers.trained import Setting, assert_trained_as_by_the_loop, settings

LIKE_OTHERS = ("BART", "U-Net of diffusers")  # as T5, and the conditional U-Net


def shallower(case: Case) -> Case:
    """A U-Net without its middle, which is made of what its other blocks are; in a deep run with
    it."""
    if DEEP or case.model is not others.conditional_unet:
        return case
    return replace(case, model=partial(others.conditional_unet, middle=None))


CASES = [shallower(case) for case in others.CASES if DEEP or case.name not in LIKE_OTHERS]


@pytest.mark.parametrize("setting", settings(CASES))
def test_training_equals_the_loop(setting: Setting) -> None:
    assert_trained_as_by_the_loop(setting)

"""Planted faults are noticed: a sample, and all of them in the long run."""

from __future__ import annotations

import importlib
import inspect

import pytest

from tests.helpers.profiles import DEEP
from tests.simcuda import planted
from tests.simcuda.faults import FAULTS
from tests.simcuda.mutants import noticed, wanted
from tests.simcuda.process import on_devices, simulated

pytestmark = simulated

SAMPLE = (
    "a wait does nothing",
    "new streams do not follow the caller",
    "a device that only an earlier batch was on is forgotten",
)


def test_every_fault_has_its_place() -> None:
    """Whoever changes code in which one is planted hears of it at once."""
    sources = {
        f.module: inspect.getsource(importlib.import_module(f.module)) for f in FAULTS.values()
    }
    assert not [name for name, f in FAULTS.items() if sources[f.module].count(f.before) != 1]


@pytest.mark.parametrize("name", FAULTS if DEEP else SAMPLE)
def test_a_planted_fault_is_noticed_unless_nothing_goes_wrong_by_it(name: str) -> None:
    assert bool(noticed(name)) != bool(FAULTS[name].equivalent)


@pytest.mark.parametrize("scene", planted.SCENES if DEEP else ["inputs here and there"])
def test_without_a_fault_nothing_goes_wrong(scene: str) -> None:
    options = planted.SCENES[scene].options
    assert not on_devices(planted.problems, scene, wanted(scene), **options)

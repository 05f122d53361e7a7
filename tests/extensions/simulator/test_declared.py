"""The simulator counts the bytes that an instruction of an extension declares."""

from __future__ import annotations

import pytest

from fxpipe.extensions.simulator.sizes import Sizes
from fxpipe.schedules import one_f_one_b
from tests.extensions.resources.test_resources import PROGRAM
from tests.helpers.plans import chain
from tests.verify.test_program import lowered

pytestmark = pytest.mark.smoke


def test_the_simulator_counts_the_bytes_that_instructions_declare() -> None:
    sizes = Sizes(parameters={0: 100, 1: 40})
    found = PROGRAM.simulate(sizes=sizes)
    assert [memory.resting for memory in found.memory] == [50, 20]
    assert [memory.peak for memory in found.memory] == [150, 60]
    plain = lowered(one_f_one_b(2, 2), chain(2)).simulate(sizes=sizes)
    assert [memory.resting for memory in plain.memory] == [100, 40]

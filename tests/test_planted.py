"""The faults of ``tests.planted`` can be planted; whether they are noticed, the command tells."""

from __future__ import annotations

import pytest

from tests.planted import FAULTS, LOWERING, OTHERS, PASSES, ROOT, RUNTIME


def test_there_are_as_many_as_the_page_says() -> None:
    assert len(LOWERING) == len(RUNTIME) == len(PASSES) == 10
    assert len(OTHERS) == 15
    assert len(FAULTS) == 45


@pytest.mark.parametrize("name", FAULTS)
def test_a_faults_text_and_its_tests_are_there(name: str) -> None:
    fault = FAULTS[name]
    assert (ROOT / fault.file).read_text().count(fault.before) == 1
    assert [path for path in fault.tests.split() if not (ROOT / path).exists()] == []

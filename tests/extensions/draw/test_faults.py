"""What a verifier refused draws itself, with its faults in red."""

from __future__ import annotations

from html import unescape

import pytest

from fxpipe.errors import InputError, VerificationError
from fxpipe.extensions.draw.picture import FAULT
from fxpipe.ir.plan import Plan
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.value import Edge
from fxpipe.schedules import gpipe, one_f_one_b
from tests.helpers.plans import plan_of

BROKEN = [
    Schedule("twice", 1, (0,), (gpipe(1, 1).rows[0] * 2,)),
    plan_of(2, Edge(1, 0, "back")),
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: type(broken).__name__)
def test_an_error_draws_what_it_refused(broken: Schedule | Plan) -> None:
    with pytest.raises(VerificationError) as caught:
        broken.verify()
    picture = caught.value.draw()
    assert picture.source == broken.draw().source
    assert FAULT in picture.source
    shown = unescape(picture.pipe("svg", encoding="utf-8")).replace("\N{NO-BREAK SPACE}", " ")
    assert all(str(fault) in shown for fault in caught.value.faults)


def test_an_error_of_something_else_says_so() -> None:
    with pytest.raises(InputError, match="no plan or schedule"):
        VerificationError("it", [], one_f_one_b).draw()

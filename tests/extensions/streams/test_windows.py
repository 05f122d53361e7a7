"""How many receives ranks must post ahead, where a send waits for its receive."""

from __future__ import annotations

import pytest

from fxpipe.errors import VerificationError
from fxpipe.extensions.streams.events import Streams
from fxpipe.ir.recipe import RECIPES
from fxpipe.ir.schedule import Schedule
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower
from tests.helpers.plans import chain, skipping
from tests.verify.test_channels import accepts


@pytest.mark.parametrize("name", RECIPES)
def test_every_schedule_is_proven_where_sends_wait_for_receives_that_are_posted_ahead(
    name: str,
) -> None:
    for p, m in [(2, 4), (3, 3), (4, 8)]:
        schedule = RECIPES[name](p, m)
        for plan in (chain, skipping) if schedule.stages > 2 else (chain,):
            program = Streams()(free(communicate(Lower(plan(schedule.stages))(schedule))))
            window = program.window
            assert accepts(program, window)
            assert window == 1 or not accepts(program, window - 1)
            if plan is chain and name != "looped-bfs":
                assert window == 1


def test_the_instructions_of_a_schedule_that_wait_for_one_another_are_named() -> None:
    """The first device does all its forwards, and the second hands gradients back meanwhile."""
    schedule = Schedule.parse(
        "schedule mine stages=2 microbatches=4 delay=0\n"
        "place 0 | 1\n"
        "0: F0 F1 F2 F3 B0 B1 B2 B3 U\n"
        "1: F0 B0 F1 B1 F2 B2 F3 B3 U\n"
    )
    program = Streams()(free(communicate(Lower(chain(2))(schedule))))
    assert program.window == 1
    with pytest.raises(VerificationError) as caught:
        program.verify(channel=0)
    one, two = caught.value.faults
    assert (one.subject, two.subject) == ("send act:y0:0->1[2]", "send grad:y0:1->0[0]")
    assert "deadlock: it waits until device 1 is past position" in one.what
    assert "deadlock: it waits until device 0 is past position" in two.what

"""Runs whose times are known, and one thread that runs all devices."""

from __future__ import annotations

import pytest

from fxpipe.extensions.simulator import Sizes
from fxpipe.extensions.simulator.chain import chain_program
from fxpipe.extensions.simulator.measured import measured_run
from fxpipe.extensions.simulator.pipe import predict_step
from fxpipe.extensions.simulator.unroll import blocking
from fxpipe.extensions.streams.events import Streams
from fxpipe.ir.recipe import find_recipe
from tests.extensions.streams.test_streams import plain
from tests.helpers.plans import chain
from tests.oracles.stream_times import timed

pytestmark = pytest.mark.models


def test_one_thread_does_one_thing_after_another() -> None:
    program = chain_program(find_recipe("1f1b")(2, 6))
    found = predict_step(chain(2), program, Sizes({}), dict.fromkeys("FBU", 1.5), serial=True)
    tasks = sum(x.letter is not None for own in program.lists for x in own)
    assert tasks == 2 * 2 * 6 + 2
    assert found.step_time == found.makespan == 1.5 * tasks


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("copy_", [0.0, 0.4, 5.0])
def test_a_run_with_streams_reads_as_one_in_which_copies_hold_up_what_needs_them(
    name: str, copy_: float
) -> None:
    """Copies that go on beside computations take nothing; what is left of one is a wait."""
    program = Streams()(plain(name, 3, 6))
    ran = timed(program, copy_)
    times = [[round(1e9 * t) for span in own for t in span] for own in ran.spans]
    found = measured_run(program, 1, times)
    assert found.program.lists == blocking(program).lists
    assert found.makespan == pytest.approx(ran.makespan)
    for device, own in enumerate(program.lists):
        starts, ends = found.events.starts[device], found.events.ends[device]
        assert all(start <= end for start, end in zip(starts, ends, strict=True))
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
        computed = [
            end - start
            for x, (start, end) in zip(own, ran.spans[device], strict=True)
            if x.letter is not None
        ]
        assert found.busy[device] == pytest.approx(sum(computed))
    idle = sum(each.total for each in found.idle)
    assert idle == pytest.approx(found.bubble * found.through * found.devices)

"""What is learned of steps whose times are known, and what is predicted of that."""

from __future__ import annotations

import itertools
from statistics import mean

import pytest
import torch

from fxpipe.extensions.offload.add_offload import add_offload
from fxpipe.extensions.simulator import Simulation, Sizes, simulate
from fxpipe.extensions.simulator.costs import Link, Overheads, Rehearsal
from fxpipe.extensions.simulator.measured import measured_run
from fxpipe.extensions.simulator.overheads import StepTimes, learned, spread
from fxpipe.extensions.simulator.predict import predict
from fxpipe.ir.recipe import find_recipe
from fxpipe.ir.unroll import blocking
from fxpipe.passes.lowering.chain import chain, chain_program
from fxpipe.passes.lowering.streams import Streams
from tests.oracles.stream_times import timed
from tests.passes.lowering.test_streams import plain

pytestmark = pytest.mark.models


def clocked(ran: Simulation) -> list[list[int]]:
    """Device → start and end of each instruction in nanoseconds, as a machine takes them."""
    return [
        [round(1e9 * t) for pair in zip(starts, ends, strict=True) for t in pair]
        for starts, ends in zip(ran.events.starts, ran.events.ends, strict=True)
    ]


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize(("name", "steps"), [("1f1b", 1), ("zb-h1", 1), ("gpipe", 3), ("2bw", 4)])
def test_what_a_run_took_is_predicted_of_its_program(name: str, steps: int, serial: bool) -> None:
    """A run by a clock of its own, of times that are known."""
    program = chain_program(find_recipe(name)(3, 6))
    costs = {("F", s): 3.0 + s for s in range(3)} | {("B", s): 5.0 + s for s in range(3)}
    costs |= {("I", s): 2.0 + s for s in range(3)} | {("W", s): 4.0 for s in range(3)}
    costs |= {("U", s): 7.0 for s in range(3)}
    links = None if serial else Link(0.75)
    ran = simulate(program, costs, links=links, overhead=0.25, serial=serial, steps=steps)
    took = [StepTimes(ran.makespan + 6.0 * steps, clocked(ran))] * 4
    found = learned(program, took, Overheads(hand_over=0.75), serial=serial, steps=steps)
    for key, time in found.costs.items():
        assert time == pytest.approx(costs[key])
    assert found.overheads.instruction == pytest.approx(0.25)
    assert found.overheads.step == pytest.approx(6.0)
    made = predict(chain(3), program, Sizes({}), rehearsal=found, steps=steps)
    assert made.step_time == pytest.approx(ran.makespan / steps + 6.0)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "2bw"])
def test_the_hand_over_between_processes_is_what_a_device_waits_after_a_send(name: str) -> None:
    program = chain_program(find_recipe(name)(3, 6))
    costs = {"F": 3.0, "B": 5.0, "U": 7.0}
    ran = simulate(program, costs, links=Link(0.75), overhead=0.25, steps=3)
    took = [StepTimes(ran.makespan, clocked(ran))] * 4
    found = learned(program, took, Overheads(hand_over=99.0), steps=3, apart=True)
    assert found.overheads.hand_over == pytest.approx(0.75)


@pytest.mark.parametrize("stores", [1.0, 30.0])
def test_what_a_run_stored_and_fetched_took_what_was_waited_for_it(stores: float) -> None:
    program = chain_program(add_offload(find_recipe("gpipe")(3, 6), "always"))
    costs = {"F": 3.0, "B": 5.0, "U": 7.0, "O": stores, "P": 1.5 * stores}
    ran = simulate(program, costs, links=Link(0.75), overhead=0.25)
    found = learned(program, [StepTimes(ran.makespan, clocked(ran))] * 4, Overheads(hand_over=0.75))
    for key in itertools.product("OP", range(3)) if stores == 30.0 else ():
        assert found.costs[key] == pytest.approx(costs[key[0]], rel=0.02)
    made = predict(chain(3), program, Sizes({}), rehearsal=found)
    assert made.step_time == pytest.approx(ran.makespan, rel=0.02)


def test_a_run_that_was_held_up_does_not_count() -> None:
    program = chain_program(find_recipe("1f1b")(2, 2))

    def took(factor: float) -> StepTimes:
        ran = simulate(program, {"F": factor, "B": 2 * factor, "U": 0.0})
        return StepTimes(ran.makespan, clocked(ran))

    found = learned(program, [*map(took, (1.0, 50.0, 1.2, 0.8))], Overheads())
    assert found.costs["F", 0] == pytest.approx(1.1)


def test_a_sampled_update_takes_its_share() -> None:
    program = chain_program(find_recipe("1f1b")(2, 2))
    ran = simulate(program, {"F": 1.0, "B": 1.0, "U": 2.0})
    took = StepTimes(ran.makespan, clocked(ran))
    found = learned(program, [took], Overheads(), shares={0: 0.25, 1: 1.0})
    assert (found.costs["U", 0], found.costs["U", 1]) == pytest.approx((8.0, 2.0))


def test_nine_of_ten_further_times_lie_within_the_spread() -> None:
    """Of normal times, by counting."""
    generator = torch.Generator().manual_seed(1)
    for count in (4, 8, 20):
        drawn = 100 + 3 * torch.randn(4000, count + 1, generator=generator, dtype=torch.double)
        inside = 0
        for *known, further in drawn.tolist():
            inside += abs(further / mean(known) - 1) <= spread(known)
        assert 0.88 < inside / len(drawn) < 0.925
    assert spread([1.0]) == 0


def test_the_range_is_as_wide_as_steps_differ() -> None:
    program = chain_program(find_recipe("gpipe")(2, 3))
    rehearsal = Rehearsal({(x, s): 1.0 for x in "FBU" for s in (0, 1)}, off=0.25)
    found = predict(chain(2), program, Sizes({}), rehearsal=rehearsal)
    assert found.step_time == 2 * (3 + 1) + 1
    assert found.range == (9 / 1.25, 9 * 1.25)


def test_one_thread_does_one_thing_after_another() -> None:
    keys = [(letter, stage) for letter in "FB" for stage in range(2)]
    times = dict.fromkeys([*keys, ("U", 0), ("U", 1)], 1.5)
    overheads = Overheads(instruction=0.25, hand_over=100.0, step=7.0)
    program = chain_program(find_recipe("1f1b")(2, 6))
    rehearsal = Rehearsal(times, overheads, serial=True)
    found = predict(chain(2), program, Sizes({}), rehearsal=rehearsal)
    letters = [x.letter for own in program.lists for x in own]
    tasks = sum(letter is not None for letter in letters)
    assert tasks == 2 * 2 * 6 + 2
    assert found.makespan == 1.5 * tasks + 0.25 * letters.count(None)
    assert found.step_time == found.makespan + 7


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

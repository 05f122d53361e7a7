"""Sums of gradients over replicas on paper: their times beside tasks, their bytes, their memory."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import InputError
from fxpipe.extensions.replicas import opcodes
from fxpipe.extensions.replicas.exchanges import Sum
from fxpipe.extensions.replicas.lowering import add_reduce, gather_weights
from fxpipe.extensions.simulator import Link, Simulation, Sizes, simulate
from fxpipe.extensions.simulator.chain import chain_program
from fxpipe.extensions.simulator.measured import measured_run
from fxpipe.extensions.simulator.report import chrome_trace
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import RECIPES, find_recipe
from fxpipe.ir.schedule import Schedule
from tests.extensions.replicas.test_add_reduce import between
from tests.oracles import small_simulator
from tests.oracles.small_simulator import makespan

SMALL = st.integers(0, 6)
TWO = Schedule.parse(
    "schedule two stages=2 microbatches=1 delay=0\nplace 0 1\n"
    "0: F0@0 F0@1 B0@1 A@1 B0@0 A@0 U@0 U@1\n"
)
"""Two stages on one device: the sum of the second goes on beside the backward of the first."""
FREE = {"F": 1, "B": 4, "A": 0, "U": 0}


def sizes(stages: int, gradients: int) -> Sizes:
    values = {f"y{stage}": 0 for stage in range(stages)}
    return Sizes(values, gradients=dict.fromkeys(range(stages), gradients))


def waits(simulation: Simulation) -> list[tuple[int, float, float]]:
    """The stage that is waited for, and from when until when."""
    return [
        (span.instruction.stage, span.start, span.end)
        for span in simulation.instructions()
        if isinstance(span.instruction, opcodes.AllGather)
    ]


def test_a_sum_goes_on_beside_the_tasks_behind_it_and_is_waited_for_at_the_end() -> None:
    link = {(0, 0): Link(latency=1, bandwidth=5)}
    found = TWO.simulate(FREE, replicas=2, links=link, sizes=sizes(2, 10))
    # each replica sends 5 bytes of parts and 5 of sums, in a time of 2, and 2 go by on the way
    sums = [(str(t.buffer), t.ready, t.start, t.end) for t in found.transfers]
    assert sums == [("sum:1[0]", 6, 6, 10), ("sum:0[0]", 10, 10, 14)]
    assert waits(found) == [(1, 10, 10), (0, 10, 14)]
    assert found.hidden == 1 / 2
    assert found.makespan == 14


def test_what_was_measured_hides_as_much() -> None:
    link = {(0, 0): Link(latency=1, bandwidth=5)}
    paper = TWO.simulate(FREE, replicas=2, links=link, sizes=sizes(2, 10))
    (starts,), (ends,) = paper.events.starts, paper.events.ends
    times = [int(1e9 * time) for pair in zip(starts, ends, strict=True) for time in pair]
    found = measured_run(paper.window, 1, [times], paper.sizes)
    assert found.hidden == paper.hidden == 1 / 2
    assert [(t.buffer, t.end) for t in found.transfers] == [(Sum(1, 0), 10), (Sum(0, 0), 14)]
    assert found.summed(1) == paper.summed(1) == (20,)
    assert "measured" in str(found) and "50.0% of the time" in str(found)


BUCKETS = [(2,), (0, 3), (1,)]


def test_buckets_are_on_their_way_while_the_rest_of_a_backward_runs() -> None:
    schedule = Schedule.parse(
        "schedule one stages=1 microbatches=2 delay=0\nplace 0\n0: F0 F1 B0 B1 A U\n"
    )
    room = Sizes(elements={0: [(10, 2), (10, 1), (8, 1), (1, 2)]}, buckets={0: BUCKETS})
    link = {(0, 0): Link(latency=1, bandwidth=10)}
    takes = {**FREE, "B": 6}
    found = schedule.simulate(takes, replicas=2, links=link, sizes=room)
    # the last backward runs from 8 to 14; of each bucket as many bytes are sent as it has
    sums = [(str(t.buffer), t.ready, t.start, t.end) for t in found.transfers]
    assert sums == [
        ("sum:0[0] bucket 0", 10, 10, 12.8),
        ("sum:0[0] bucket 1", 12, 12, 16.2),
        ("sum:0[0]", 14, 14.2, 17.2),
    ]
    assert waits(found) == [(0, 14, 17.2)]
    assert found.hidden == pytest.approx(1 - 3.2 / (2.8 + 4.2 + 3))
    assert found.costs[("B", 0)] == 6
    assert found.kept == (2,)
    assert found.summed(0) == (40,) and found.summed(1) == (40,)
    once = schedule.simulate(takes, replicas=2, links=link, sizes=replace(room, buckets={}))
    assert once.summed(1) == found.summed(1)
    assert [(t.ready, t.end) for t in once.transfers] == [(14, 20)]
    (starts,), (ends,) = found.events.starts, found.events.ends
    times = [int(1e9 * time) for pair in zip(starts, ends, strict=True) for time in pair]
    measured = measured_run(found.window, 1, [times], found.sizes)
    assert [(str(t.buffer), t.ready) for t in measured.transfers] == [s[:2] for s in sums]
    assert measured.summed(1) == (40,) and measured.costs == found.costs
    halves = Schedule.parse(
        "schedule one stages=1 microbatches=1 delay=0\nplace 0\n0: F0 I0 W0 A U\n"
    ).simulate({"I": 0, "W": 6, "A": 0}, replicas=2, links=link, sizes=room)
    assert [t.ready for t in halves.transfers] == [3, 5, 7]


def test_sums_share_the_way_to_the_other_replicas() -> None:
    link = Link(bandwidth=1)
    found = TWO.simulate({**FREE, "B": 1}, replicas=2, links=link, sizes=sizes(2, 6))
    assert [(t.ready, t.start, t.end) for t in found.transfers] == [(3, 3, 9), (4, 9, 15)]
    assert [t.buffer for t in found.transfers] == [Sum(1, 0), Sum(0, 0)]


@given(st.integers(1, 5), st.integers(1, 8), SMALL, SMALL, SMALL, SMALL, st.integers(2, 5))
def test_with_a_flush_only_what_the_drain_does_not_cover_makes_a_step_longer(
    p: int, m: int, forward: int, backward: int, reduce: int, update: int, replicas: int
) -> None:
    """Of 1f1b: stage s is done s backwards before the first one, and then sums its gradients."""
    own = [7 * (s % 3) for s in range(p)]
    times = {"F": forward, "B": backward, "A": reduce, "U": update}
    found = find_recipe("1f1b")(p, m).simulate(
        times,
        replicas=replicas,
        links={(s, s): Link(bandwidth=1) for s in range(p)}
        | {pair: Link() for k in range(p - 1) for pair in ((k, k + 1), (k + 1, k))},
        sizes=Sizes(gradients={s: replicas * own[s] for s in range(p)}),
    )
    covered = [2 * (replicas - 1) * own[s] - s * backward for s in range(p)]
    assert found.makespan == (m + p - 1) * (forward + backward) + reduce + max(covered) + update


@given(
    st.lists(st.tuples(st.integers(0, 20), st.sampled_from([2, 4, 8])), max_size=4),
    st.integers(2, 6),
)
def test_each_element_goes_to_its_replica_and_its_sum_to_all(
    gradients: list[tuple[int, int]], replicas: int
) -> None:
    whole = Sizes(elements={0: gradients})
    sent = [0] * replicas
    for size in (2, 4, 8):  # gradients of one data type lie in one row for each replica
        count = sum(each for each, of in gradients if of == size)
        for element in range(count):
            owner = element // math.ceil(count / replicas)
            for replica in range(replicas):
                sent[replica] += size * (replicas - 1 if replica == owner else 1)
    program = TWO.simulate(replicas=replicas).program
    assert [Sum(0, 0).sent(whole, replica, program) for replica in range(replicas)] == sent
    total = sum(count * size for count, size in gradients)
    assert sum(sent) == 2 * (replicas - 1) * total
    last = TWO.simulate(replicas=replicas, sizes=Sizes(elements={0: gradients, 1: gradients}))
    assert [last.summed(replica) for replica in range(replicas)] == [(2 * each,) for each in sent]


def test_the_parts_of_others_are_held_until_they_are_summed() -> None:
    free = dict.fromkeys("FBAU", 0)
    found = TWO.simulate(free, replicas=3, sizes=Sizes(gradients={0: 300, 1: 30}))
    instructions: list[str] = [*map(str, found.program.lists[0])]
    levels: dict[str, int] = dict(zip(instructions, found.memory[0].levels, strict=True))

    def level(kind: type[opcodes.ReduceScatter | opcodes.AllGather], stage: int) -> int:
        return levels[str(kind(stage))]

    # as much comes as is sent, and both are held until a third of the sums is all that there is;
    # then all thirds come, and are joined
    assert level(opcodes.ReduceScatter, 1) == 30 + 30
    assert level(opcodes.ReduceScatter, 0) == 60 + 300 + 300
    assert level(opcodes.AllGather, 1) == 600 + 10 + 30 + 30
    assert level(opcodes.AllGather, 0) == 30 + 100 + 300 + 300
    assert found.memory[0].peak == 730


def test_updates_that_come_late_for_the_sums_need_no_fewer_copies_of_the_weights() -> None:
    schedule = find_recipe("2bw")(3, 4)
    late = add_reduce(schedule)
    assert late.versions().live == (2, 2, 1) != schedule.versions().live
    for found in (schedule.simulate(sizes=sizes(3, 100)), late.simulate(sizes=sizes(3, 100))):
        assert [memory.parts["versions"] for memory in found.memory] == [100] * 3


def test_a_link_to_the_other_replicas_must_be_known_and_the_bytes_that_it_carries() -> None:
    with pytest.raises(InputError, match=r"its like in other replicas .* add links\[0, 0\] ="):
        TWO.simulate(replicas=2, links={})
    with pytest.raises(InputError, match="gradients of stage 1, whose size is not known"):
        TWO.simulate(replicas=2, links=Link(bandwidth=1))
    with pytest.raises(InputError, match="bytes of gradients need their sizes"):
        TWO.simulate(replicas=2).summed()


def test_one_replica_sums_nothing() -> None:
    one = TWO.simulate(FREE, replicas=1, links=Link(bandwidth=1), sizes=sizes(2, 10))
    assert one.makespan == 10
    assert (one.hidden, one.summed(), one.transfers) == (1, (0,), ())


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_schedule_of_the_library_runs_in_replicas(name: str) -> None:
    recipe = RECIPES[name]
    if recipe.copies(3):
        with pytest.raises(InputError, match="has copies of stages, and 2 replicas of the pipel"):
            recipe(3, 6).simulate(replicas=2)
        return
    found = recipe(3, 6).simulate(replicas=2, steps=3)
    sums = [t.buffer for t in found.transfers if isinstance(t.buffer, Sum)]
    stages = found.program.stages if name != "inference" else 0
    assert sorted(sums) == [Sum(stage, batch) for stage in range(stages) for batch in range(3)]


def test_the_table_and_the_trace_tell_of_sums() -> None:
    found = TWO.simulate(FREE, replicas=2, links=Link(2, 5), sizes=sizes(2, 10))
    text = str(found)
    # the sums take 6 each, of which 4 and 2 are over when they are needed
    assert "50.0% of the time in which 2 replicas sum gradients hides" in text
    for steps in 1, 3:
        text = str(
            TWO.simulate(FREE, replicas=2, links=Link(2, 5), sizes=sizes(2, 10), steps=steps)
        )
        assert "a device sends at most 20 B for them a step" in " ".join(text.split())
    assert " sums " in text and " sums " not in str(TWO.simulate(FREE))
    drawn = json.loads(found.draw().pipe("json"))
    assert {"sum:0[0]", "sum:1[0]"} <= {edge.get("tooltip") for edge in drawn["edges"]}
    assert "gradients are summed over the replicas" in str(drawn)
    assert " · 2 replicas · " in str(drawn) and ", 2 replicas, " in " ".join(text.split())
    told = [event for event in chrome_trace(found)["traceEvents"] if event["ph"] in "XM"]
    slices = {event["name"].partition("@")[0] for event in told if event["ph"] == "X"}
    assert {"sum:0[0]", "sum:1[0]", "A"} <= slices
    assert "device 0 to other replicas" in [event["args"].get("name") for event in told]


def gathers(simulation: Simulation) -> list[tuple[str, int, float, float]]:
    """What is waited for, of which stage, and from when until when."""
    return [
        (type(span.instruction).__name__, span.instruction.stage, span.start, span.end)
        for span in simulation.instructions()
        if span.instruction.awaits(simulation.program) is not None
    ]


def sharded(schedule: Schedule, replicas: int) -> Program:
    return gather_weights(chain_program(schedule, replicas=replicas))


def test_with_shards_new_weights_are_sent_behind_the_update() -> None:
    link = {(0, 0): Link(latency=1, bandwidth=5)}
    found = simulate(sharded(TWO, 2), FREE, links=link, sizes=sizes(2, 10), steps=1)
    # the owner of a stage's weights sends 10 bytes, in a time of 2, and 1 goes by on the way
    sent = [(str(t.buffer), t.ready, t.start, t.end) for t in found.transfers]
    assert sent == [
        ("sum:1[0]", 6, 6, 10),
        ("sum:0[0]", 10, 10, 14),
        ("weights:0[0]", 14, 14, 17),
        ("weights:1[0]", 17, 17, 20),
    ]
    assert gathers(found) == [
        ("AllGather", 1, 10, 10),
        ("AllGather", 0, 10, 14),
        ("GatherWeights", 0, 14, 17),
        ("GatherWeights", 1, 17, 20),
    ]
    assert "sum gradients and gather weights hides" in str(found)
    (starts,), (ends,) = found.events.starts, found.events.ends
    times = [int(1e9 * time) for pair in zip(starts, ends, strict=True) for time in pair]
    measured = measured_run(found.window, 1, [times], found.sizes)
    # 10 bytes for each of two sums, and the new weights of one stage: the other replica has those
    # of the other
    assert measured.summed(0) == found.summed(0) == (30,)
    ends_of = {str(t.buffer): t.end for t in measured.transfers}
    assert ends_of == {"sum:1[0]": 10, "sum:0[0]": 14, "weights:0[0]": 17, "weights:1[0]": 20}


@given(st.integers(2, 5), st.lists(st.tuples(SMALL, st.sampled_from([2, 4])), max_size=4))
def test_shards_send_half_as_many_bytes_more(
    replicas: int, elements: list[tuple[int, int]]
) -> None:
    sizes = Sizes(elements={0: elements, 1: elements})
    whole = TWO.simulate(replicas=replicas, sizes=sizes)
    shards = simulate(sharded(TWO, replicas), sizes=sizes)
    sent = [
        sum(sum(each.summed(replica)) for replica in range(replicas)) for each in (whole, shards)
    ]
    assert 3 * sent[0] == 2 * sent[1]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half"])
def test_an_a_takes_its_time_in_the_simulation(name: str) -> None:
    takes = {"F": 1, "B": 2, "I": 1, "W": 1, "A": 5, "U": 0}
    schedule = find_recipe(name)(2, 3)
    reduced = add_reduce(schedule)
    found = reduced.simulate(takes).makespan
    assert found == schedule.simulate(takes, replicas=2).makespan
    assert found == makespan(small_simulator.simulate(reduced, takes))
    # one replica has nothing to sum
    alone = reduced.simulate(takes, replicas=1).makespan
    assert alone == schedule.simulate(takes).makespan < found


def test_a_grid_shows_the_time_that_a_simulation_counts() -> None:
    row = Schedule.parse("schedule a stages=1 microbatches=1 delay=0\nplace 0\n0: F0 B0 A U\n")
    takes = {"F": 1, "B": 2, "A": 5, "U": 1}
    assert row.simulate(takes).makespan == 9
    scale, drawn = row.grid(costs=takes).splitlines()
    assert (scale.split()[-1], drawn) == ("8", "0: F0 B0--- A------------- U-")  # eight to nine


@pytest.mark.parametrize("name", ["2bw", "1f1b-async"])
def test_where_batches_overlap_the_sums_take_no_time_of_a_window(name: str) -> None:
    free = {"F": 1, "B": 1, "A": 0, "U": 0}
    for devices, microbatches in ((2, 2), (3, 4), (4, 4)):
        schedule = find_recipe(name)(devices, microbatches)
        alone = schedule.simulate(free).steady
        values = {f"y{stage}": 0 for stage in range(devices)}
        behind = between(add_reduce(schedule))
        for takes, hides in ((behind, True), (4 * microbatches, False)):
            sizes = Sizes(values, gradients=dict.fromkeys(range(devices), 10 * takes))
            found = schedule.simulate(free, replicas=2, links=Link(bandwidth=10), sizes=sizes)
            assert (found.steady.period == alone.period) is hides
            assert (found.steady.bubble < 1e-9) is hides

"""The simulator against other ways to find the same: longest paths, replays, drawn figures."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import InputError, VerificationError
from fxpipe.extensions.replicas.lowering import add_reduce, gather_weights
from fxpipe.extensions.simulator import Link, Sizes, simulate
from fxpipe.extensions.simulator.chain import chain_program
from fxpipe.extensions.simulator.unroll import unroll
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import find_recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.value import Buffer
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.lower import Lower
from fxpipe.schedules import one_f_one_b
from tests.helpers.plans import chain, skipping
from tests.passes.lowering.test_lower import plans, schedules, whole

Place = tuple[int, int]
FREE: Mapping[str, float] = {"F": 1, "B": 2, "I": 1, "W": 1, "R": 1, "U": 0}

OVERLAPPING = ("2bw", "pipedream", "1f1b-async")
LIBRARY = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v", *OVERLAPPING)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Any order of any stages over any edges; small window programs of the library too."""
    if draw(st.booleans()):
        name = draw(st.sampled_from(LIBRARY))
        devices = draw(st.integers(1, 4))
        schedule = find_recipe(name)(devices, draw(st.integers(devices, 5)))
        plan = chain(schedule.stages) if schedule.stages < 3 else skipping(schedule.stages)
        return whole(schedule, plan)
    plan = draw(plans())
    trains = draw(st.booleans())
    schedule = draw(schedules(len(plan.stages), trains))
    return whole(schedule, plan)


costs = st.fixed_dictionaries({letter: st.integers(0, 5) for letter in "FBIWRU"})


def waits(program: Program) -> dict[Place, list[Place]]:
    """What each instruction waits for, with the one before it."""
    sent = {
        x.buffer: (device, at)
        for device, own in enumerate(program.lists)
        for at, x in enumerate(own)
        if isinstance(x, ins.Send)
    }
    meetings = [
        [at for at, x in enumerate(own) if isinstance(x, ins.Barrier | ins.Pause)]
        for own in program.lists
    ]
    found: dict[Place, list[Place]] = {}
    for device, own in enumerate(program.lists):
        for at, x in enumerate(own):
            needs = [(device, at - 1)] if at else []
            if isinstance(x, ins.Receive):
                needs.append(sent[x.buffer])
            if isinstance(x, ins.Barrier | ins.Pause):
                number = meetings[device].index(at)
                needs += [(d, own_[number] - 1) for d, own_ in enumerate(meetings) if own_[number]]
            found[device, at] = needs
    return found


def longest_paths(
    program: Program,
    takes: Mapping[str, int],
    each: Mapping[tuple[str, int, int], int] = MappingProxyType({}),
) -> dict[Place, int]:
    """When each instruction ends: the longest path to it."""
    needs = waits(program)

    def time(place: Place) -> int:
        x: Any = program.lists[place[0]][place[1]]
        letter = x.letter or ""
        usual = takes.get(letter, 0)
        if not letter or getattr(x, "microbatch", None) is None:
            return usual
        return each.get((letter, x.stage, x.microbatch), usual)

    ends: dict[Place, int] = {}
    while len(ends) < len(needs):
        for place, before in needs.items():
            if all(other in ends for other in before):
                ends[place] = max((ends[other] for other in before), default=0) + time(place)
    return ends


@given(programs(), costs, st.integers(1, 3))
def test_every_instruction_ends_with_the_longest_path_to_it(
    program: Program, takes: dict[str, int], steps: int
) -> None:
    found = simulate(program, takes, steps=steps)
    assert found.program == unroll(program, steps)
    expected = longest_paths(found.program, takes)
    for span in found.instructions():
        assert span.end == expected[span.device, span.position]
    assert found.makespan == max(expected.values(), default=0)


@given(programs(), costs, st.data())
def test_a_micro_batch_may_have_times_of_its_own(
    program: Program, takes: dict[str, int], data: st.DataObject
) -> None:
    keys = st.tuples(
        st.sampled_from("FBIWR"),
        st.integers(0, program.stages - 1),
        st.integers(0, program.microbatches - 1),
    )
    each = data.draw(st.dictionaries(keys, st.integers(0, 9), max_size=8))
    given: dict[Any, float] = {**takes, **each}
    found = simulate(program, given, steps=2)
    expected = longest_paths(found.program, takes, each)
    assert found.makespan == max(expected.values(), default=0)


def test_variable_lengths_are_drawn_and_simulated_alike() -> None:
    schedule = find_recipe("1f1b")(2, 3)
    costs: dict[Any, float] = {"F": 1, "B": 2, ("F", 1, 1): 3, ("B", 0, 2): 4}
    assert schedule.simulate({**costs, "U": 0}).makespan == 16
    assert schedule.grid(costs=costs) == (
        "   0     2     4     6     8     10    12    14    16\n"
        "0: F0 F1 .  .  B0--- F2 .  .  B1--- .  B2--------- U\n"
        "1: .  F0 B0--- F1------ B1--- F2 B2--- .  .  .  .  U"
    )


def test_times_of_micro_batches_that_do_not_exist_are_refused() -> None:
    schedule = find_recipe("1f1b")(2, 3)
    with pytest.raises(InputError, match=r"is for micro-batch 3; the micro-batches are 0 to 2"):
        schedule.simulate({("F", 0, 3): 1})
    with pytest.raises(InputError, match=r"is for stage 2; the stages are 0 to 1"):
        schedule.simulate({("F", 2, 0): 1})
    with pytest.raises(InputError, match=r"or also a micro-batch, such as \('F', 0, 3\)"):
        schedule.simulate({("F", 0, 0, 0): 1})  # type: ignore[arg-type]


@given(programs(), costs, st.integers(0, 3), st.sampled_from([1, 2, 4]))
def test_links_carry_one_value_after_another(
    program: Program, takes: dict[str, int], latency: int, bandwidth: int
) -> None:
    sizes = Sizes({edge.value: 4 * k for k, edge in enumerate(program.edges)})
    link = Link(latency, bandwidth)
    found = simulate(program, takes, links=link, sizes=sizes, steps=2)
    by_link = defaultdict(list)
    for transfer in found.transfers:
        by_link[transfer.source, transfer.target].append(transfer)
    for way in by_link.values():
        free: float = 0
        for transfer in way:
            assert isinstance(transfer.buffer, Buffer)
            carried = sizes.values[transfer.buffer.value] / bandwidth
            assert transfer.start == max(transfer.ready, free)
            free = transfer.start + carried
            assert transfer.end == free + latency
    for span in found.instructions():
        before = found.events.ends[span.device][span.position - 1] if span.position else 0
        assert span.start == before
        match span.instruction:
            case ins.Receive(buffer):
                assert span.end == max(span.start, found.events.transfers[buffer].end)
            case ins.Send(buffer):
                transfer = found.events.transfers[buffer]
                assert transfer.ready == span.start
                assert span.end == span.start
            case ins.Barrier() | ins.Pause():
                pass
            case other:
                assert span.time == takes.get(other.letter or "", 0)


@given(programs(), costs, st.integers(0, 3), st.booleans())
def test_what_is_idle_and_what_is_busy_is_all_of_the_time(
    program: Program,
    takes: dict[str, int],
    latency: int,
    serial: bool,
) -> None:
    found = simulate(
        program,
        takes,
        links=Link(latency),
        serial=serial,
        steps=2,
    )
    through = found.through
    for device, idle in enumerate(found.idle):
        own = [span for span in found.spans if span.device == device and span.start < through]
        busy = sum(min(span.end, through) - span.start for span in own)
        assert busy + idle.total == pytest.approx(through)
    total = sum(idle.total for idle in found.idle)
    assert total == pytest.approx(found.bubble * through * found.devices)


def test_one_f_one_b_waits_as_its_figure_shows() -> None:
    """p = 3, m = 4: warm up, wait for the next stage's gradients, drain."""
    found = find_recipe("1f1b")(3, 4).simulate({"F": 1, "B": 1, "U": 0})
    assert [idle.warm_up for idle in found.idle] == [0, 1, 2]
    assert [idle.drain for idle in found.idle] == [0, 1, 2]
    assert [dict(idle.waiting) for idle in found.idle] == [{1: 4}, {2: 2}, {}]
    assert [dict(idle.copying) for idle in found.idle] == [{}, {}, {}]
    assert found.busy == (8, 8, 8)
    assert found.bubble == pytest.approx(1 / 3)


def test_waiting_for_a_copy_is_told_from_waiting_for_a_device() -> None:
    found = find_recipe("gpipe")(2, 1).simulate({"F": 2, "B": 3, "U": 0}, links=Link(5))
    first, second = found.idle
    assert second.warm_up == 7
    assert first.waiting == {1: 5 + 2 + 3}
    assert first.copying == {1: 5}
    assert found.makespan == 2 + 5 + 2 + 3 + 5 + 3


def test_a_device_computes_while_it_sends() -> None:
    schedule = find_recipe("inference")(2, 3)
    assert schedule.simulate({"F": 1}, links=Link(2)).makespan == 1 + 2 + 3


def test_pairs_of_devices_have_links_of_their_own() -> None:
    schedule = find_recipe("inference")(3, 1)
    links = {(0, 1): Link(10), (1, 2): Link(bandwidth=2)}
    found = schedule.simulate({"F": 1}, links=links, sizes=Sizes({"y1": 8}))
    assert found.makespan == 3 + 10 + 4
    with pytest.raises(InputError, match=r"add links\[1, 2\]"):
        schedule.simulate({"F": 1}, links={(0, 1): Link(1)})
    with pytest.raises(InputError, match="whose size is not known"):
        schedule.simulate(links=Link(bandwidth=1))


def test_stages_and_user_given_times_differ() -> None:
    schedule = find_recipe("gpipe")(2, 2)
    takes: dict[str | tuple[str, int], float] = {"F": 1, ("F", 1): 4, "B": 0, "U": 0}
    found = schedule.simulate(takes)
    assert found.makespan == 1 + 4 + 4
    assert found.costs["F", 1] == 4 and found.costs["F", 0] == 1


@given(st.sampled_from(OVERLAPPING), st.integers(1, 4), st.integers(1, 5), costs)
def test_the_long_run_is_what_many_steps_take(
    name: str, devices: int, microbatches: int, takes: dict[str, int]
) -> None:
    schedule = find_recipe(name)(devices, max(devices, microbatches))
    steady = schedule.simulate(takes).steady
    few, many = 60, 60 + 60  # what repeats after up to six steps has repeated
    ends = [schedule.simulate(takes, steps=steps).makespan for steps in (few, many)]
    assert steady.period == pytest.approx((ends[1] - ends[0]) / (many - few))
    work = schedule.microbatches * (takes["F"] + takes["B"]) + takes["U"]
    if steady.period:
        assert steady.bubble == pytest.approx(1 - work / steady.period)


def test_the_long_run_goes_by_the_slowest_device_though_first_steps_do_not() -> None:
    forwards, backwards = [5, 1, 3, 3, 5], [1, 1, 1, 1, 2]
    takes: dict[str | tuple[str, int], float] = {"U": 0}
    for stage, times in enumerate(zip(forwards, backwards, strict=True)):
        takes["F", stage], takes["B", stage] = times
    assert find_recipe("1f1b-async")(5, 1).simulate(takes).steady.period == 5 + 2


CLIPPING = Schedule.parse(
    "schedule clips stages=2 microbatches=1 delay=0\nplace 0 | 1\n0: F0 B0 C U\n1: F0 B0 C U\n"
)


def test_a_clip_waits_for_the_norms_of_all_stages() -> None:
    found = simulate(whole(CLIPPING, chain(2)), {"F": 1, "B": 3, "C": 2, "U": 1})
    clips = [span for span in found.spans if span.instruction.letter == "C"]
    assert [(span.device, span.start, span.end) for span in clips] == [(0, 8, 10), (1, 8, 10)]
    assert found.makespan == 11
    first_late = found.again(1) if found.again else found
    assert first_late.idle[1].drain == 3


def every_opcode() -> list[Program]:
    """Programs that together hold each opcode."""
    paused = Lower(skipping(3), updates=False, pause=True)(find_recipe("gpipe")(3, 2))
    again = Schedule.parse(
        "schedule again stages=3 microbatches=1 delay=0\nplace 0 | 1 | 2\n"
        "0: F0 R0 B0 U\n1: F0 I0 W0 U\n2: F0 O0 P0 B0 U\n"
    )
    programs = [paused, Lower(chain(2), replicas=2)(add_reduce(CLIPPING))]
    programs.append(gather_weights(programs[-1]))
    copied = chain_program(find_recipe("chimera")(2, 2))
    parted = chain_program(add_reduce(CLIPPING), buckets={0: [(0,), (1,)]})
    return [whole(again, skipping(3)), *map(communicate, programs), copied, parted]


def test_it_takes_every_instruction() -> None:
    found = [simulate(program, FREE) for program in every_opcode()]
    met = {type(span.instruction) for one in found for span in one.instructions()}
    others = ("fxpipe.extensions.sharding.", "fxpipe.extensions.tensor_parallel.")
    every = {each for each in ins.every_opcode().values() if not each.__module__.startswith(others)}
    assert every - met == {ins.OPCODES["run"]}  # its own test is with users' tasks
    for one in found:
        assert str(one)


def test_what_waits_for_ever_is_told() -> None:
    program = whole(find_recipe("1f1b")(2, 2), chain(2))
    first = [x for x in program.lists[0] if not isinstance(x, ins.Send)]
    broken = Program(
        program.name,
        program.microbatches,
        program.placement,
        program.edges,
        (tuple(first), program.lists[1]),
        program.passes,
    )
    with pytest.raises(InputError, match="device 0 waits for ever at position"):
        simulate(broken)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"costs": {"Q": 1}}, "no kind of task 'Q'"),
        ({"costs": {("F", 2): 1}}, "the stages are 0 to 1"),
        ({"costs": {"F": -1}}, "at least 0"),
        ({"costs": {"F": 1e101}}, "at most 1e\\+100"),
        ({"links": {(0, 5): Link()}}, "map pairs of the devices 0 to 1"),
        ({"steps": 0}, "needs at least 1"),
        ({"costs": 5}, "costs is 5; map letters"),
        ({"costs": {5: 1}}, "costs has the key 5; write a letter"),
        ({"costs": {("F", 0, 1, 2): 1}}, r"costs has the key \('F', 0, 1, 2\); write a letter"),
        ({"links": {0: Link()}}, "map pairs of the devices 0 to 1"),
        ({"sizes": 3}, "sizes is 3; give Sizes"),
        ({"costs": {"F": "a"}}, r"costs\['F'\] is 'a'; a task takes a time"),
        ({"costs": {"F": [1.0, 2.0]}}, r"costs\['F'\] is \[1\.0, 2\.0\]"),
        ({"links": 1.0}, r"links is 1\.0; give one Link"),
        ({"steps": 2.5}, r"steps is 2\.5; give a whole number"),
        ({"replicas": 0}, "replicas is 0; give a whole number of at least 1"),
        ({"replicas": 2.5}, r"replicas is 2\.5; give a whole number"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_recipe("1f1b")(2, 2).simulate(**options)


def test_bad_links_programs_and_schedules_are_refused() -> None:
    for latency in (-1, "1", None):
        with pytest.raises(InputError, match="latency"):
            Link(latency)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="bandwidth"):
        Link(bandwidth=0)
    schedule = find_recipe("1f1b")(2, 2)
    with pytest.raises(InputError, match="run it through communicate"):
        simulate(Lower(chain(2))(schedule))
    with pytest.raises(InputError, match="simulate with sizes"):
        _ = schedule.simulate().memory
    rows = (schedule.rows[0][1:], schedule.rows[1])
    with pytest.raises(VerificationError):
        Schedule("short", 2, (0, 1), rows).simulate()


def test_the_table_tells_it_all() -> None:
    weights = {0: 1 << 20, 1: 0}
    sizes = Sizes({"y0": 2048}, {0: 1024, 1: 0}, parameters=weights, gradients=weights)
    text = str(find_recipe("2bw")(2, 3).simulate({"F": 1, "B": 2, "U": 0}, sizes=sizes))
    assert "2bw, simulated: 2 devices, 3 micro-batches, 8 steps" in text
    headings = [line.split() for line in text.splitlines() if line.startswith("device ")]
    assert headings == [
        ["device", "stages", "busy", "warm-up", "waits", "for", "drain", "kept", "versions"],
        ["device", "peak", "parameters", "versions", "gradients", "saved", "values"],
        ["device", "0", "holds", "the", "most", "at", "13,", "in:", "backward", "s0[0+]", "v0"],
    ]
    assert "\n     0  3.0        1.0 " in text and "predicted, in MiB" in text
    assert "memory at its peak" in text and "versions" in text
    assert "makespan 75, bubble 4.0%; in the long run a step takes 9, bubble 0.0%" in text


def test_integer_times_stay_exact() -> None:
    huge = 10**30
    found = find_recipe("1f1b")(3, 4).simulate({"F": huge, "B": huge + 1, "U": 0})
    makespan: Any = found.makespan
    assert operator.index(makespan) == 6 * (2 * huge + 1)


def test_times_of_numpy_are_told_like_any_other(tmp_path: Path) -> None:
    half: Any = np.float32(0.5)
    costs: dict[str, Any] = {"F": np.float32(1.1), "B": Fraction(7, 3)}
    options: dict[str, Any] = {"links": Link(half), "steps": np.int64(2)}
    found = one_f_one_b(2, 3).simulate(costs, **options)
    same = one_f_one_b(2, 3).simulate(
        {"F": 1.100000023841858, "B": 7 / 3}, links=Link(0.5), steps=2
    )
    assert found.makespan == same.makespan and str(found) == str(same)
    found.trace(tmp_path / "trace.json")


def test_a_fetch_waits_for_its_own_storing() -> None:
    schedule = Schedule.parse(
        "schedule stored stages=1 microbatches=1 delay=0\nplace 0\n0: F0 O0 P0 B0 U\n"
    )
    found = simulate(chain_program(schedule, frees=False), {"O": 10, "P": 1, "B": 2, "U": 1})
    assert [(t.start, t.end) for t in found.transfers] == [(1, 11), (11, 12)]
    assert [(span.start, span.end) for span in found.spans] == [(0, 1), (12, 14), (14, 15)]


def test_a_count_of_devices_is_whole() -> None:
    with pytest.raises(InputError, match=r"devices is 1\.5"):
        one_f_one_b(devices=1.5, microbatches=2)  # type: ignore[arg-type]


TENTHS = st.integers(1, 9).map(lambda tenths: tenths / 10)


@given(st.sampled_from(["1f1b", "zb-h1", "2bw"]), st.integers(1, 9), TENTHS, TENTHS, TENTHS)
def test_a_device_that_is_never_idle_has_no_bubble_below_zero(
    name: str, microbatches: int, forward: float, backward: float, update: float
) -> None:
    costs = {"F": forward, "B": backward, "I": backward, "W": forward, "U": update}
    found = find_recipe(name)(1, microbatches).simulate(costs, steps=3)
    assert 0 <= found.bubble < 1e-12
    assert 0 <= found.steady.bubble < 1e-12
    assert "-0.0" not in str(found)

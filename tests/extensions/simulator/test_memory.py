"""What the simulator says of memory, against a replay and what schedules prove."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.extensions.simulator import Simulation, Sizes, simulate
from fxpipe.ir.instruction import InputGrad
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import find_recipe
from fxpipe.ir.value import Buffer
from fxpipe.passes.schedule import add_recompute
from tests.extensions.simulator.test_simulator import LIBRARY, programs
from tests.helpers.profiles import some


def kept_by_replay(simulation: Simulation, sizes: Sizes, device: int) -> list[int]:
    """Bytes while each instruction runs: all pieces of memory that some live buffer holds."""
    program = simulation.program
    list_ = program.lists[device]
    made: dict[Buffer, int] = {}
    gone: dict[Buffer, int] = {}
    for at, x in enumerate(list_):
        made.update(dict.fromkeys(x.makes(program), at))
        gone.update(dict.fromkeys(x.ends(program), at))
    incoming = [{e.value: e for e in program.edges_into(s)} for s in range(program.stages)]

    def place(value: str, source: int, target: int, b: Buffer) -> tuple[object, ...]:
        here = source >= 0 and program.placement[source] == device
        way = () if here else (source, target)
        return "value", value, way, b.microbatch, b.batch

    def pieces(b: Buffer) -> Iterator[tuple[object, int]]:
        if b.kind == "saved":
            yield b, sizes.saved[b.source]
            for value in sizes.holds[b.source]:
                edge = incoming[b.source].get(value)
                ends = (edge.source, edge.target) if edge else (b.source, b.source)
                yield place(value, *ends, b), sizes.values[value]
        elif b.kind == "deferred":
            yield b, sizes.deferred[b.source]
        elif b.kind == "grad":
            yield b, sizes.values[b.value]
        elif b.kind != "state":
            yield place(b.value, b.source, b.target, b), sizes.values[b.value]

    def waiting(at: int) -> int:
        """Bytes of values that are received later, for which a receive is posted."""
        starts, ways = simulation.events.starts[device], simulation.events.transfers
        here = [b for b in made if b in ways and ways[b].target == device]

        def since(b: Buffer) -> float:
            before = [c for c in here if ways[c].source == ways[b].source and made[c] < made[b]]
            before.sort(key=made.__getitem__)
            return starts[made[before[-sizes.early]]] if len(before) >= sizes.early else 0.0

        late = [b for b in here if made[b] > at and since(b) <= starts[at]]
        return sum(sizes.values[b.value] for b in late)

    return [
        sum(dict(p for b in made if made[b] <= at <= gone[b] for p in pieces(b)).values())
        + (waiting(at) if sizes.early else 0)
        - (
            min(sizes.saved[x.stage], sizes.deferred[x.stage])  # what it leaves is a part of that
            if isinstance(x, InputGrad)
            else 0
        )
        for at, x in enumerate(list_)
    ]


@given(programs(), st.data())
def test_memory_is_what_a_replay_counts(program: Program, data: st.DataObject) -> None:
    number = st.integers(1, 50)
    values = {edge.value: data.draw(number) for edge in program.edges}
    stages = range(program.stages)
    near = {
        s: sorted({e.value for e in (*program.edges_into(s), *program.edges_from(s))})
        for s in stages
    }
    sizes = Sizes(
        values,
        saved={s: data.draw(number) for s in stages},
        deferred={s: data.draw(number) for s in stages},
        holds={
            s: frozenset(data.draw(st.lists(st.sampled_from(near[s]))) if near[s] else ())
            for s in stages
        },
        early=data.draw(st.sampled_from((0, 1, 2, 3))),
    )
    found = simulate(program, sizes=sizes, steps=2)
    for device, memory in enumerate(found.memory):
        levels = kept_by_replay(found, sizes, device)
        assert list(memory.levels) == levels
        assert memory.peak == max(levels, default=0)
        if levels:
            assert memory.time == found.events.starts[device][levels.index(max(levels))]


def test_weights_gradients_and_versions_take_memory_too() -> None:
    sizes = Sizes(parameters={0: 100, 1: 100}, gradients={0: 10, 1: 10}, optimizer={0: 7, 1: 7})
    flushing = find_recipe("1f1b")(2, 2).simulate(sizes=sizes)
    assert [memory.resting for memory in flushing.memory] == [107, 107]
    assert [memory.peak for memory in flushing.memory] == [117, 117]
    double = find_recipe("2bw")(2, 2).simulate(sizes=sizes)
    # of a second version only what is trained, as much as its gradients
    assert [memory.peak for memory in double.memory] == [127, 127]


@pytest.mark.parametrize("name", some(LIBRARY))
def test_what_is_kept_and_versions_are_those_of_the_schedule(name: str) -> None:
    for devices in range(1, 5):
        for microbatches in range(devices, 2 * devices + 1):
            schedule = find_recipe(name)(devices, microbatches)
            found = schedule.simulate()
            for mode in ("never", "except_last", "always"):
                recomputed = add_recompute(schedule, dict.fromkeys(range(0, devices, 2), mode))
                proven, ran = recomputed.kept(), recomputed.simulate()
                assert ran.kept == proven.stages
                assert ran.device_kept == proven.devices
            assert list(found.weight_versions) == list(schedule.versions().live)

"""One thread for all devices: an order in which nothing waits for what comes later, and the same
results to the bit."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fxpipe
from fxpipe.errors import InputError, PartitionError, VerificationError
from fxpipe.extensions.clipping.opcodes import add_clip
from fxpipe.extensions.streams.events import Streams
from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import Launch
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import RECIPES
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower
from fxpipe.runtime import choice
from fxpipe.runtime.choice import Dispatches
from tests.extensions.streams.test_streams import LIBRARY, plain
from tests.helpers.overlapping import OPTIMIZERS, compiled
from tests.helpers.plans import chain, run
from tests.helpers.profiles import DEEP
from tests.helpers.tiny import Snapshot, batch
from tests.oracles.stream_machine import dispatch_order
from tests.passes.lowering.test_lower import plans, schedules


def assert_never_waits(program: Program, order: tuple[int, ...]) -> None:
    """Replay the order over two windows, with what a host finds when it launches."""
    recorded: set[tuple[int, int]] = set()
    sent: set[object] = set()
    sends = {x.buffer for own in program.lists for x in own if isinstance(x, ins.Send)}
    for step in range(2):
        at = [0] * program.devices
        meeting: list[int] = []
        for device in order:
            x = program.lists[device][at[device]]
            launch = program.launches[device][at[device]] if program.launches else Launch()
            for event in launch.waits:
                if step + event.batch >= 0:
                    assert (event.number, step + event.batch) in recorded
            if isinstance(x, ins.Receive) and (step or x.buffer in sends):
                assert x.buffer._replace(batch=x.buffer.batch + step) in sent
            if isinstance(x, ins.Send):
                sent.add(x.buffer._replace(batch=x.buffer.batch + step))
            if isinstance(x, ins.Barrier | ins.Pause):
                meeting.append(device)
                if len(meeting) == program.devices:
                    assert sorted(meeting) == list(range(program.devices))
                    meeting = []
            else:
                assert not meeting
            if launch.record is not None:
                recorded.add((launch.record.number, step + launch.record.batch))
            at[device] += 1
        assert at == [len(own) for own in program.lists]
        if not program.depth:
            break


@pytest.mark.parametrize("name", LIBRARY)
def test_a_thread_never_waits_for_itself(name: str) -> None:
    for devices, microbatches in ((1, 3), (2, 4), (4, 9)):
        before = plain(name, devices, microbatches)
        for program in (before, Streams()(before)):
            assert_never_waits(program, dispatch_order(program))


@given(st.data())
def test_any_schedule_over_any_edges_has_an_order(data: st.DataObject) -> None:
    plan, trains = data.draw(plans()), data.draw(st.booleans())
    schedule = data.draw(schedules(len(plan.stages), trains))
    before = run(schedule, Lower(plan, updates=trains), communicate, free)
    for program in (before, run(before, Streams(data.draw(st.integers(0, 3))))):
        assert_never_waits(program, dispatch_order(program))


def test_barriers_and_pauses_are_launched_on_all_devices_together() -> None:
    paused = Streams()(plain("gpipe", 3, 3, pause=True))
    assert any(isinstance(x, ins.Pause) for own in paused.lists for x in own)
    assert_never_waits(paused, dispatch_order(paused))
    clips = run(add_clip(RECIPES["1f1b"](3, 3)), Lower(chain(3)), communicate, free)
    for clipped in (clips, run(clips, Streams())):
        assert_never_waits(clipped, dispatch_order(clipped))


def test_a_later_device_has_work_before_an_earlier_one_has_all_of_its_own() -> None:
    before = plain("gpipe", 4, 8)
    for program in (before, Streams()(before)):
        assert_wave_by_wave(program)


def assert_wave_by_wave(program: Program) -> None:
    order, at = dispatch_order(program), [0] * program.devices
    forwards: list[tuple[int, int]] = []
    for device in order:
        x = program.lists[device][at[device]]
        at[device] += 1
        if isinstance(x, ins.Forward):
            forwards.append((device, x.microbatch))
    # wave by wave, as on devices that work at the same time
    assert all(i + device <= j + other + 1 for (device, i), (other, j) in ahead(forwards))


def ahead(
    forwards: list[tuple[int, int]],
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Each with what comes behind it."""
    return [(one, two) for k, one in enumerate(forwards) for two in forwards[k + 1 :]]


def test_turns_take_every_device_to_the_end_of_its_list() -> None:
    program = plain("gpipe", 3, 3, pause=True)
    at = [0] * 3
    for device, end in program.turns:
        assert end > at[device]
        at[device] = end
    assert at == [len(own) for own in program.lists]


def test_a_program_that_gets_stuck_is_refused() -> None:
    good = plain("1f1b", 2, 2)
    position = next(k for k, x in enumerate(good.lists[0]) if isinstance(x, ins.Send))
    late = tuple(good.lists[0][:position] + good.lists[0][position + 1 :])
    lists = ((*late, good.lists[0][position]), *good.lists[1:])
    with pytest.raises(InputError, match=r"gets stuck; Program.verify\(\) tells where"):
        dispatch_order(replace(good, lists=lists))


class Seen(nn.Module):
    """Notes in which threads it runs."""

    def __init__(self, threads: set[str]) -> None:
        super().__init__()
        self.threads = threads

    def forward(self, x: Tensor) -> Tensor:
        self.threads.add(threading.current_thread().name)
        return x.tanh()


def model_of(*middle: nn.Module) -> nn.Sequential:
    """Six layers in double precision."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6),
        nn.BatchNorm1d(6),
        *(middle or (nn.Tanh(),)),
        nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2)),
        nn.BatchNorm1d(6),
        nn.Linear(6, 3),
    ).double()


@st.composite
def settings_of(draw: st.DrawFn) -> dict[str, Any]:
    """Options of a pipe in which its devices have different things to do."""
    return {
        "devices": draw(st.integers(1, 3)),
        "schedule": draw(st.sampled_from([name for name in LIBRARY if name != "inference"])),
        "microbatches": draw(st.integers(2, 4)),
        "optimizer": OPTIMIZERS[draw(st.sampled_from(["sgd", "adamw"]))],
        "recompute": draw(st.sampled_from(["never", "always", "except_last"])),
        "clip_norm": draw(st.sampled_from([None, 0.1])),
        "extensions": draw(
            st.sampled_from([[], ["deferred_batchnorm"], [fxpipe.LeafModules("2")]])
        ),
    }


@settings(max_examples=200 if DEEP else 2)
@given(settings_of(), st.lists(st.sampled_from([8, 8, 5]), min_size=2, max_size=4))
def test_whoever_runs_the_lists_results_are_the_same_to_the_bit(
    options: dict[str, Any], sizes: list[int]
) -> None:
    found: list[tuple[list[Tensor], Snapshot] | str] = []
    leaf = any(isinstance(each, fxpipe.LeafModules) for each in options["extensions"])
    ways: Sequence[Dispatches] = ("device", "thread")
    for dispatch in ways:
        given = {**options, "extensions": [*options["extensions"], fxpipe.Dispatch(dispatch)]}
        threads: set[str] = set()
        model = model_of(Seen(threads)) if leaf else model_of()
        try:
            with compiled(model, loss=cross_entropy, **given) as pipe:
                made = [pipe.step(x.double(), target=y) for x, y in map(batch, sizes)]
                x, y = batch(4)
                cross_entropy(pipe(x.double()), y).backward()
                made += [*map(torch.as_tensor, [pipe.grad_norm or 0.0]), pipe.eval()(x.double())]
                found.append((made, Snapshot.of(pipe)))
                count = 1 if dispatch == "thread" else options["devices"]
                assert len(pipe._engine._workers) == count
        # such as for clipping where stages have different delays, or more stages than layers
        except (InputError, PartitionError, VerificationError) as error:
            found.append(str(error))
    one, other = found
    if isinstance(one, str) or isinstance(other, str):
        assert one == other
        return
    assert all(map(torch.equal, one[0], other[0]))
    assert not list(one[1].differences(other[1]))


def watched(**options: Any) -> tuple[fxpipe.Pipeline, set[str]]:
    """A pipe over two devices, and the threads in which its stages run."""
    threads: set[str] = set()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), Seen(threads), nn.Linear(6, 3), Seen(threads))
    options = {"microbatches": 2, "loss": cross_entropy, **options}
    pipe = fxpipe.compile(
        model, ["cpu"] * 2, partition=["2"], extensions=[fxpipe.LeafModules(Seen)], **options
    )
    return pipe, threads


@pytest.mark.parametrize(("longer", "processors", "count"), [(1.0, 2, 1), (0.0, 2, 2), (0.0, 1, 1)])
def test_one_thread_runs_what_is_shorter_than_a_hand_over(
    longer: float, processors: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "HAND_OVER", longer)
    monkeypatch.setattr(choice, "processors", lambda: processors)
    pipe, threads = watched()
    with pipe:
        x, y = batch()
        pipe.step(x, target=y)
        threads.clear()
        pipe.step(x, target=y)
        assert threads == {f"fxpipe-{k}" for k in range(count)}
        assert pipe._calls.shown is not None and pipe._calls.shown.threads == count
        assert ("one thread runs all devices" in str(pipe)) == (count == 1)
        assert ("one thread runs all devices" in str(pipe.simulate())) == (count == 1)
        assert ("one thread runs all devices" in str(pipe.profile(x, target=y))) == (count == 1)

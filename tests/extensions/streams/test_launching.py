"""Devices with streams behind an ordinary pipe, where lanes do on the CPU what they are given."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import DeviceError, DeviceMemoryError
from fxpipe.ir.instruction import Backward
from fxpipe.ir.program import Program
from fxpipe.runtime.choice import Dispatches
from fxpipe.runtime.host import BatchHost
from fxpipe.text.program import print_instruction
from tests.extensions.streams.eager_lanes import Backend, LateError, launched
from tests.helpers.profiles import deep
from tests.helpers.tiny import Tiny, batch, within
from tests.oracles import loop

both = pytest.mark.parametrize("dispatch", ["device", "thread"])


@both
@pytest.mark.parametrize("schedule", [*deep("1f1b", "gpipe"), "zb-h1"])
def test_a_step_that_is_launched_gives_the_loops_gradients(
    schedule: str, dispatch: Dispatches
) -> None:
    torch.manual_seed(0)
    model = Tiny()
    alone = copy.deepcopy(model)
    x, y = batch(8)
    pipe, backend = launched(model, 3, dispatch, schedule=schedule)
    with pipe, within(60):
        for _ in range(2):
            made = pipe.step(x, target=y)
            expected = loop.train(alone, 4, x, loss=nn.functional.cross_entropy, target=y)
            assert torch.equal(made, expected.loss)
        program = pipe.program
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
    loop.assert_same(model.state_dict(), alone.state_dict())
    assert backend.calls == {"begin": 2, "end": 2}
    for lanes, own, launches in zip(backend.lanes, program.lists, program.launches, strict=True):
        done = [entry for entry in lanes.log if not entry[1].startswith("wait")]
        told = [(n.stream, print_instruction(x)) for x, n in zip(own, launches, strict=True)]
        assert done == told * 2
        waits = sum(len(launch.waits) for launch in launches)
        assert len(lanes.log) - len(done) == 2 * waits
    assert not any(channels.events._marks for channels in backend.made)


@both
def test_batches_that_overlap_wait_for_events_of_the_step_before(dispatch: Dispatches) -> None:
    torch.manual_seed(0)
    model, plain = Tiny(), Tiny()
    plain.load_state_dict(model.state_dict())
    make: dict[str, Any] = {
        "schedule": "2bw",
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
    }
    pipe, _ = launched(model, 2, dispatch, **make)
    other = fxpipe.compile(
        plain, ["cpu"] * 2, loss=nn.functional.cross_entropy, microbatches=4, **make
    )
    with pipe, other, within(60):
        for seed in range(4):
            x, y = batch(8, seed)
            assert torch.equal(pipe.step(x, target=y), other.step(x, target=y))
        waits = [e.batch for own in pipe.program.launches for n in own for e in n.waits]
        assert -1 in waits
    loop.assert_same(model.state_dict(), plain.state_dict())


@both
def test_a_call_and_its_backward_are_launched_in_two_parts(dispatch: Dispatches) -> None:
    torch.manual_seed(0)
    model = Tiny()
    alone = copy.deepcopy(model)
    x, y = batch(8)
    pipe, backend = launched(model, 3, dispatch)
    with pipe, within(60):
        nn.functional.cross_entropy(pipe(x), y).backward()
    for part in x.split(2):
        alone(part)  # the statistics of BatchNorm are those of micro-batches
    assert backend.calls == {"begin": 2, "end": 2}
    loop.assert_same(dict(model.named_buffers()), dict(alone.named_buffers()))
    assert all(p.grad is not None for p in model.parameters())


@both
def test_gradients_are_clipped_across_devices(dispatch: Dispatches) -> None:
    """Norms meet at every stage: nothing may wait for what is launched later."""
    torch.manual_seed(0)
    model, plain = Tiny(), Tiny()
    plain.load_state_dict(model.state_dict())
    options: dict[str, Any] = {
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
        "clip_norm": 0.1,
    }
    pipe, _ = launched(model, 2, dispatch, **options)
    other = fxpipe.compile(
        plain, ["cpu"] * 2, loss=nn.functional.cross_entropy, microbatches=4, **options
    )
    x, y = batch(8)
    with pipe, other, within(60):
        pipe.step(x, target=y)
        other.step(x, target=y)
        assert pipe.grad_norm == other.grad_norm
    loop.assert_same(model.state_dict(), plain.state_dict())


@both
def test_a_device_without_memory_stops_the_others_and_says_what_it_held(
    dispatch: Dispatches,
) -> None:
    torch.manual_seed(0)
    pipe, backend = launched(Tiny(), 3, dispatch)
    x, y = batch(8)
    with pipe, within(60):
        pipe.step(x, target=y)
        backend.lanes[1].lacks = "backward s1[1] v0"
        with pytest.raises(DeviceMemoryError) as caught:
            pipe.step(x, target=y)
        error = caught.value
        assert isinstance(error.__cause__, torch.OutOfMemoryError)
        assert (error.device, error.stage, error.microbatch) == (1, 1, 1)
        assert error.instruction == "backward s1[1] v0"
        text = str(error)
        for part in (
            "backward s1[1] v0 (stage 1, micro-batch 1) failed",
            "the device has no memory left",
            "Take more micro-batches",
            "recompute",
            "the weights are as before the step",
        ):
            assert part in text
        backend.lanes[1].lacks = ""
        pipe.step(x, target=y)


@both
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_the_caller_uses_what_devices_make_only_after_them(
    schedule: str, dispatch: Dispatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss comes right after the caller's stream waits for all."""
    log: list[str] = []

    def told(name: str, owner: Any, method: str) -> None:
        original = getattr(owner, method)

        def call(*args: Any) -> Any:
            log.append(name)
            return original(*args)

        monkeypatch.setattr(owner, method, call)

    told("begin", Backend, "begin")
    told("end", Backend, "end")
    told("use", BatchHost, "loss")
    pipe, _ = launched(
        Tiny(), 2, dispatch, schedule=schedule, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    with pipe, within(60):
        for seed in range(3):
            x, y = batch(8, seed)
            pipe.step(x, target=y)
        pipe.flush()
    assert log.count("use") == 3
    last = [log[at - 1] for at, entry in enumerate(log) if entry == "use"]
    assert set(last) == {"end"}


@both
def test_statistics_of_a_batch_are_computed_where_its_forwards_are(dispatch: Dispatches) -> None:
    pipe, backend = launched(
        Tiny(),
        2,
        dispatch,
        schedule="2bw",
        extensions=["deferred_batchnorm"],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    x, y = batch(8)
    with pipe, within(60):
        pipe.step(x, target=y)
    assert all(("compute", "statistics") in lanes.log for lanes in backend.lanes)


@both
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_what_fails_late_is_told_with_how_to_find_it(schedule: str, dispatch: Dispatches) -> None:
    torch.manual_seed(0)
    options = {} if schedule == "1f1b" else {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
    pipe, backend = launched(Tiny(), 2, dispatch, schedule=schedule, **options)
    x, y = batch(8)
    with pipe, within(60):
        pipe.step(x, target=y)
        lanes = backend.lanes[1]
        lanes.breaks, lanes.asked = "backward s1[1] v0", 3
        if schedule == "2bw":  # versions are others
            lanes.breaks = next(
                print_instruction(x) for x in pipe.program.lists[1] if isinstance(x, Backward)
            )
        with pytest.raises(DeviceError) as caught:
            for _ in range(3):
                pipe.step(x, target=y)
            pipe.flush()
        assert isinstance(caught.value.__cause__, LateError)
        text = str(caught.value)
        # where batches overlap, the caller, who begins the next one meanwhile, may ask first
        askers = ["device 1 was given", "a batch began or ended"][: 1 + (schedule == "2bw")]
        assert any(f"when {asker}" in text for asker in askers)
        assert "CUDA_LAUNCH_BLOCKING=1" in text and "start it again" in text


def test_a_failure_that_nobody_asked_about_is_told_when_the_next_step_begins() -> None:
    torch.manual_seed(0)
    pipe, backend = launched(Tiny(), 2)
    x, y = batch(8)
    with pipe, within(60):
        pipe.step(x, target=y)
        backend.lanes[0].breaks, backend.lanes[0].asked = "backward s0[3] v0", 1000
        pipe.step(x, target=y)
        with pytest.raises(DeviceError, match="when a step began or ended"):
            pipe.step(x, target=y)


def test_who_waits_for_an_event_is_woken_when_the_run_stops() -> None:
    from fxpipe.extensions.streams.launching import RunEvents
    from fxpipe.ir.launch import Event, Launch
    from fxpipe.runtime.interpreter import Stopped

    launches = (Launch(record=Event(0)), Launch(waits=(Event(0),)))
    program = Program("x", 1, (0,), (), ((),), (), (launches,))
    events = RunEvents(program)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            events.find(Event(0))
        except Stopped as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    events.stop()
    thread.join(60)
    assert len(caught) == 1

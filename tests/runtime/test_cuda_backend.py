"""The CUDA backend where ``torch.cuda`` is a stand-in on the CPU: what it asks of it."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import DeviceError, DeviceMemoryError, InputError
from fxpipe.devices import read_devices
from fxpipe.passes.partition.measure import Stopwatch
from fxpipe.runtime.choice import Dispatches
from fxpipe.runtime.devices.lanes import ALONE, Lanes, home
from fxpipe.runtime.devices.launching import StreamBackend
from fxpipe.text.program import print_instruction
from tests.helpers.eager_lanes import use
from tests.helpers.fake_cuda import Cuda, Event, Stream
from tests.helpers.tiny import Tiny, adam, batch, within
from tests.oracles import loop
from tests.runtime.test_failures import FAILS_BACK
from tests.runtime.test_out_of_memory import Taking

both = pytest.mark.parametrize("dispatch", ["device", "thread"])


def on_cuda(
    model: nn.Module, dispatch: Dispatches = "device", **options: Any
) -> tuple[fxpipe.Pipeline, list[Stream]]:
    """A pipe over two streams of the stand-in, and these."""
    options = {"loss": nn.functional.cross_entropy, "microbatches": 4, **options}
    extensions = [fxpipe.Dispatch(dispatch), *options.pop("extensions", ())]
    pipe = fxpipe.compile(model, ["cpu"] * 2, extensions=extensions, **options)
    streams = [Stream(), Stream()]
    use(pipe, StreamBackend([Lanes(stream) for stream in streams]))  # type: ignore[arg-type]
    return pipe, streams


@both
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_step_on_given_streams_trains_as_on_cpu_devices(
    cuda: Cuda, dispatch: Dispatches, schedule: str
) -> None:
    torch.manual_seed(0)
    model = Tiny()
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {
        "schedule": schedule,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
    }
    pipe, streams = on_cuda(model, dispatch, **options)
    other = fxpipe.compile(
        plain, ["cpu"] * 2, loss=nn.functional.cross_entropy, microbatches=4, **options
    )
    with pipe, other, within(60):
        for seed in range(3):
            x, y = batch(8, seed)
            assert torch.equal(pipe.step(x, target=y), other.step(x, target=y))
        told = {print_instruction(x) for own in pipe.program.lists for x in own}
    loop.assert_same(model.state_dict(), plain.state_dict())
    assert set(cuda.ranges) == told
    assert all({"wait", "record"} <= set(stream.given) for stream in streams)
    assert not cuda.waits  # the host has waited for nothing


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_step_returns_when_pinned_memory_of_the_callers_is_read(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """Where batches overlap the pipe reads copies, so that a step need not wait for them."""
    waited: list[str] = []
    pinned: list[int] = []
    x, y = batch(8)
    monkeypatch.setattr(Event, "synchronize", lambda self: waited.append("for a copy"))
    monkeypatch.setattr(
        Tensor, "is_pinned", lambda self: self.untyped_storage().data_ptr() in pinned
    )
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    pipe, _ = on_cuda(Tiny(), schedule=schedule, optimizer=adam)
    with pipe, within(60):
        pipe.step(x, target=y)
        assert not waited
        pinned.append(x.untyped_storage().data_ptr())
        pipe.step(x, target=y)
        assert len(waited) == (schedule == "1f1b")


def test_what_stages_offload_lies_in_pinned_memory_and_nobody_waits(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Tiny()
    plain = copy.deepcopy(model)
    pinned: list[int] = []
    like = torch.empty_like

    def empty_like(value: Tensor, pin_memory: bool = False, **options: Any) -> Tensor:
        pinned.extend([value.nbytes] * pin_memory)
        return like(value, **options)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(Event, "synchronize", lambda self: pytest.fail("the host waits"))
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: self.dtype is torch.uint8)
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    options: dict[str, Any] = {"schedule": "gpipe", "optimizer": adam}
    pipe, _ = on_cuda(model, extensions=["offload"], **options)
    other = fxpipe.compile(
        plain, ["cpu"] * 2, loss=nn.functional.cross_entropy, microbatches=4, **options
    )
    with pipe, other, within(60):
        for seed in range(3):
            x, y = batch(8, seed)
            assert torch.equal(pipe.step(x, target=y), other.step(x, target=y))
        assert len(pinned) >= 3 * len(pipe.program.offloads) > 0
    loop.assert_same(model.state_dict(), plain.state_dict())


def test_a_batch_of_one_repeated_row_and_a_dense_one_after_it_train_as_the_loop(
    cuda: Cuda,
) -> None:
    torch.manual_seed(0)
    model = Tiny()
    plain = copy.deepcopy(model)
    rows = torch.randn(1, 4).expand(8, 4), torch.randn(8, 4), torch.randn(1, 4).expand(8, 4)
    y = batch(8)[1]
    pipe, _ = on_cuda(model)
    with pipe, within(60):
        for x in rows:  # a copy in the device's memory repeats nothing
            made = pipe.step(x, target=y)
            ran = loop.train(plain, 4, x, loss=nn.functional.cross_entropy, target=y)
            assert torch.equal(made, ran.loss)
    loop.assert_same(loop.gradients(model), loop.gradients(plain))


@both
def test_a_profile_takes_its_times_on_the_streams(cuda: Cuda, dispatch: Dispatches) -> None:
    x, y = batch(8)
    pipe, _ = on_cuda(Tiny(), dispatch)
    with pipe, within(60):
        pipe.step(x, target=y)
        found = pipe.profile(x, target=y, steps=2)
        assert cuda.waits
        assert found.measured and found.steps == 2
        for device in range(2):
            starts, ends = found.events.starts[device], found.events.ends[device]
            assert all(start <= end for start, end in zip(starts, ends, strict=True))
            assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
        assert all(busy > 0 for busy in found.busy)
        assert set(pipe.simulate(found.costs, steps=2).costs) == set(found.costs)


def test_without_memory_what_the_gpu_holds_is_told(cuda: Cuda) -> None:
    x, y = batch(8)
    pipe, _ = on_cuda(Taking(), partition=["second"])
    with pipe, within(60):
        pipe.step(x, target=y)
        x[5, 3] = FAILS_BACK
        with pytest.raises(DeviceMemoryError) as raised:
            pipe.step(x, target=y)
    error = raised.value
    assert (error.stage, error.microbatch, error.capacity) == (1, 2, 80 << 30)
    assert "no memory left of its 80.0 GiB: it held up to 79.0 GiB" in str(error)


@both
def test_what_cuda_reports_late_names_the_suspects(
    cuda: Cuda, dispatch: Dispatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = batch(8)
    pipe, _ = on_cuda(Tiny(), dispatch)
    with pipe, within(60):
        monkeypatch.setattr(Event, "done", False)  # the device is behind
        pipe.step(x, target=y)
        late = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        monkeypatch.setattr(Event, "fails", late)
        with pytest.raises(DeviceError, match="illegal memory access") as raised:
            pipe.step(x, target=y)
        assert "backward s0[3] v0" in raised.value.suspects
        assert "CUDA_LAUNCH_BLOCKING=1" in str(raised.value)


def test_with_launches_that_wait_an_error_is_of_its_instruction(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    x, y = batch(8)
    pipe, _ = on_cuda(Tiny())
    with pipe, within(60):
        pipe.step(x, target=y)
        kernel = pipe.plan.stages[1].kernel

        def fails(*_: Any) -> Any:
            lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
            monkeypatch.setattr(Event, "fails", lost)  # as does every call from then on
            raise lost

        monkeypatch.setattr(kernel, "backward", fails)
        with pytest.raises(fxpipe.ExecutionError, match=r"backward s1\[0\] v0.*failed") as raised:
            pipe.step(x, target=y)
        assert not isinstance(raised.value, DeviceError)
        assert any("since then a device reports" in note for note in raised.value.__notes__)


def test_costs_on_a_device_are_the_times_between_its_events(cuda: Cuda) -> None:
    watch = Stopwatch(torch.device("cpu"))
    marks = [watch.mark() for _ in range(3)]
    one, both_ = watch.seconds([(marks[0], marks[1]), (marks[0], marks[2])])
    assert 0 < one < both_ < 1
    assert cuda.waits == 1


def test_no_stream_is_made_to_wait_while_something_is_captured(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = []

    def wait_event(self: Stream, event: Any) -> None:
        alone.append(ALONE._is_owned())  # type: ignore[attr-defined]

    monkeypatch.setattr(Stream, "wait_event", wait_event)
    place: Any = Stream()
    backend = StreamBackend([Lanes(place)])
    backend.begin()
    backend.end()
    assert alone == [True, True]


def test_a_device_may_make_a_stream_while_the_caller_begins_a_run(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    place: Any = Stream()
    backend = StreamBackend([Lanes(place)])
    lanes = backend.lanes[0]
    lanes.stream("in")

    def wait_event(self: Stream, event: Any) -> None:
        if self is place:
            lanes.stream("out")

    monkeypatch.setattr(Stream, "wait_event", wait_event)
    backend.begin()
    assert set(lanes._streams) == {"compute", "in", "out"}


# devices


def test_streams_are_devices(cuda: Cuda) -> None:
    one: Any = Stream()
    two: Any = Stream()
    places = [one, two, "cpu"]
    assert read_devices(places) == [one, two, torch.device("cpu")]
    assert [home(place) for place in read_devices(places)] == [torch.device("cpu")] * 3
    lanes = [Lanes(one), Lanes(two)]
    assert [each.stream("compute") for each in lanes] == [one, two]


def test_a_stream_that_computes_is_nobody_elses(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = [Stream() for _ in range(6)]
    turns = itertools.cycle(pool)
    # a type, as somebody asks whether a device is a stream
    made = type("Pooled", (Stream,), {"__new__": lambda cls, device=None: next(turns)})
    monkeypatch.setattr(torch, "Stream", made)
    place = torch.device("cpu")
    lanes = [Lanes(place) for _ in range(3)]
    computing = [each.stream("compute") for each in lanes]
    assert len(set(computing)) == 3
    copying = [each.stream(f"in{k}") for each in lanes for k in range(5)]
    assert not set(copying) & set(computing)
    assert set(copying) == set(pool) - set(computing)  # more than there are: they are shared
    del lanes[0]
    computing = [Lanes(place).stream("compute"), *computing[1:]]
    assert len(set(computing)) == 3


def test_the_same_stream_twice_is_refused(cuda: Cuda) -> None:
    stream: Any = Stream()
    with pytest.raises(InputError, match="stands twice in devices"):
        read_devices([stream, stream])


def test_a_stream_beside_a_cpu_device_is_refused(cuda: Cuda) -> None:
    stream: Any = Stream("meta")
    with pytest.raises(InputError, match="name devices of one kind"):
        read_devices([stream, "cpu"])


def test_devices_that_are_not_there_are_refused(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    given = [torch.device("cuda", 1), torch.device("cuda", 0), torch.device("cuda", 1)]
    assert read_devices(["cuda", "cuda:0", "cuda:1"]) == given
    with pytest.raises(InputError, match="there is no cuda:2; the CUDA devices are cuda:0 to"):
        read_devices(["cuda:0", "cuda:2"])
    with pytest.raises(InputError, match="there are 2 CUDA devices"):
        read_devices(3)
    with pytest.raises(InputError, match="name devices of one kind"):
        read_devices(["cuda:0", "cpu"])

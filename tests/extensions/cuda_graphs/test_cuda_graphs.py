"""One capture by CUDA, on a stand-in: beside other streams, threads and earlier work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from fxpipe import CaptureError
from fxpipe.extensions.cuda_graphs.slot_graphs import SlotGraphs
from fxpipe.runtime.devices.lanes import ALONE, Lanes
from fxpipe.runtime.devices.launching import StreamBackend
from tests.helpers.fake_cuda import Cuda, Stream
from tests.helpers.fake_graphs import Graphs


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


def test_a_stream_that_is_made_in_a_run_starts_after_what_the_caller_has_launched(
    cuda: Cuda,
) -> None:
    place: Any = Stream()
    backend = StreamBackend([Lanes(place)])
    lanes: Any = backend.lanes[0]
    assert lanes.stream("early").given == []
    backend.begin()
    assert lanes.stream("late").given == ["wait"]


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


def test_a_copy_from_another_device_is_ordered_with_the_callers_work_there(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last device may load what lies on the first one, such as a target."""
    here, there = torch.device("cpu"), torch.device("meta")
    current = {here: Stream(here), there: Stream(there)}
    monkeypatch.setattr(torch.accelerator, "current_stream", current.get)
    places: Any = [Stream(here), Stream(there)]
    backend = StreamBackend([*map(Lanes, places)])
    early: Any = backend.lanes[1]._leaving_stream("in", here)
    backend.begin()
    late: Any = backend.lanes[1]._leaving_stream("in0", here)
    assert early.given == late.given == ["wait"]
    elsewhere: Any = backend.lanes[1]._leaving_stream("in", torch.device("xla"))
    assert elsewhere.given == ["wait"]  # for the default stream there
    current[elsewhere.device] = Stream(elsewhere.device)
    before = current[here].given.count("wait")
    backend.end()
    assert current[here].given.count("wait") - before == 3  # for what computes, and both of these
    backend.begin()
    assert elsewhere.given.count("wait") == 2 and current[elsewhere.device].given[-1] == "record"


def test_the_default_stream_is_captured_on_another(graphs: Graphs, cuda: Cuda) -> None:
    cuda.current.append(cuda.default)  # the stand-in refuses to capture that
    made, replay = SlotGraphs().capture(lambda: torch.zeros(3) + 1, "sum")
    assert not torch.equal(made, torch.ones(3))  # nothing has run
    replay()
    assert torch.equal(made, torch.ones(3))


def test_a_failure_of_earlier_work_is_none_of_the_capture(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def synchronize(device: Any = None) -> None:
        raise late

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        SlotGraphs().capture(lambda: None, "nothing")


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.0"])
@pytest.mark.parametrize("earlier", [0, 1])
def test_after_a_failed_capture_others_go_on(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch, version: str, earlier: int
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    slot = SlotGraphs()
    replays = [slot.capture(lambda: torch.zeros(3), "zeros")[1] for _ in range(earlier)]
    for error, raised in (
        (torch.OutOfMemoryError("none left"), torch.OutOfMemoryError),
        (RuntimeError("no"), CaptureError),
    ):
        graphs.refuses["add"] = error
        with pytest.raises(raised, match=r"the sum cannot be captured|none left"):
            slot.capture(lambda: torch.zeros(3) + 1, "sum")
        graphs.refuses.clear()
        made, replay = slot.capture(lambda: torch.zeros(3) + 1, "sum")
        replay()
        assert torch.equal(made, torch.ones(3))
    for again in replays:
        again()


def test_the_cause_is_what_failed_last_in_a_capture(graphs: Graphs) -> None:
    def run() -> None:
        try:
            raise KeyError("handled")
        except KeyError:
            raise torch.OutOfMemoryError("none left") from None

    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        SlotGraphs().capture(run, "nothing")

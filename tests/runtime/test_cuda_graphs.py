"""One capture by CUDA, on a stand-in: beside other streams, threads and earlier work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from fxpipe import CaptureError
from fxpipe.runtime.devices.cuda import CudaLanes
from fxpipe.runtime.devices.cuda_graphs import ALONE, CudaGraphs
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
    lanes = CudaLanes(place)
    lanes.begin()
    lanes.end()
    assert alone == [True, True]


def test_a_stream_that_is_made_in_a_run_starts_after_what_the_caller_has_launched(
    cuda: Cuda,
) -> None:
    place: Any = Stream()
    lanes = CudaLanes(place)
    assert lanes.stream("early").given == []  # type: ignore[attr-defined]
    lanes.begin()
    assert lanes.stream("late").given == ["wait"]  # type: ignore[attr-defined]


def test_a_device_may_make_a_stream_while_the_caller_begins_a_run(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    place: Any = Stream()
    lanes = CudaLanes(place)
    lanes.stream("in")

    def wait_event(self: Stream, event: Any) -> None:
        if self is place:
            lanes.stream("out")

    monkeypatch.setattr(Stream, "wait_event", wait_event)
    lanes.begin()
    assert set(lanes._streams) == {"compute", "in", "out"}


def test_the_default_stream_is_captured_on_another(graphs: Graphs, cuda: Cuda) -> None:
    cuda.current.append(cuda.default)  # the stand-in refuses to capture that
    made, replay = CudaGraphs().capture(lambda: torch.zeros(3) + 1, "sum")
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
        CudaGraphs().capture(lambda: None, "nothing")


@pytest.mark.parametrize(("version", "ended"), [("2.11.0+cu130", 1), ("2.12.0", 0)])
def test_a_failed_capture_leaves_no_allocation_to_its_pool(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch, version: str, ended: int
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(
        torch._C, "_cuda_endAllocateToPool", lambda *at: calls.append(at), raising=False
    )
    graphs.refuses["add"] = RuntimeError("no")
    with pytest.raises(CaptureError, match="the sum cannot be captured"):
        CudaGraphs().capture(lambda: torch.zeros(3) + 1, "sum")
    assert len(calls) == ended

"""One capture by CUDA: beside earlier work, and after others that failed. Skipped without a CUDA
device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from fxpipe import CaptureError
from fxpipe.extensions.cuda_graphs.slot_graphs import SlotGraphs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def test_a_failure_of_earlier_work_is_none_of_the_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def synchronize(device: Any = None) -> None:
        raise late

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        SlotGraphs().capture(lambda: None, "nothing")


def added() -> Tensor:
    return torch.zeros(3, device="cuda") + 1


def failing(error: Exception) -> Callable[[], Tensor]:
    def run() -> Tensor:
        added()
        raise error

    return run


@pytest.mark.parametrize("earlier", [0, 1])
def test_after_a_failed_capture_others_go_on(earlier: int) -> None:
    slot = SlotGraphs()
    replays = [slot.capture(added, "earlier")[1] for _ in range(earlier)]
    for error, raised in (
        (torch.OutOfMemoryError("none left"), torch.OutOfMemoryError),
        (RuntimeError("no"), CaptureError),
    ):
        with pytest.raises(raised, match=r"the sum cannot be captured|none left"):
            slot.capture(failing(error), "sum")
        made, replay = slot.capture(added, "sum")
        replay()
        assert made.tolist() == [1.0] * 3
    for again in replays:
        again()


@pytest.mark.parametrize(("version", "ends"), [("2.11.0+cu130", True), ("2.12.0", False)])
def test_older_torch_is_told_to_allocate_no_more_in_a_broken_capture(
    monkeypatch: pytest.MonkeyPatch, version: str, ends: bool
) -> None:
    told: list[Any] = []

    def end(device: int, pool: Any) -> None:
        told.append(pool)
        raise RuntimeError("the capture was ended")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    with pytest.raises(CaptureError):
        SlotGraphs().capture(failing(RuntimeError("no")), "sum")
    assert len(told) == ends


def test_the_cause_is_what_failed_last_in_a_capture() -> None:
    def run() -> None:
        try:
            raise KeyError("handled")
        except KeyError:
            raise torch.OutOfMemoryError("none left") from None

    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        SlotGraphs().capture(run, "nothing")

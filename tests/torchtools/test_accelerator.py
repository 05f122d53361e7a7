"""Accelerators as devices of a pipe, by name or by their number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fxpipe import InputError
from fxpipe.devices import read_devices


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Say which kind of accelerator this machine has, and how many."""

    def install(kind: str, count: int = 2) -> None:
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda **_: torch.device(kind)
        )
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)

    return install


def test_a_number_of_devices_means_accelerators_that_have_streams(
    found: Callable[..., None],
) -> None:
    found("xpu")
    assert read_devices(2) == [torch.device("xpu:0"), torch.device("xpu:1")]
    with pytest.raises(InputError, match="devices is 3 and there are 2 XPU devices"):
        read_devices(3)
    found("mps", count=1)
    assert read_devices(2) == [torch.device("cpu")] * 2


def test_devices_of_the_kind_that_is_there_are_taken(found: Callable[..., None]) -> None:
    found("xpu")
    assert read_devices(["xpu", "xpu:0"]) == [torch.device("xpu:1"), torch.device("xpu:0")]
    with pytest.raises(InputError, match="there is no xpu:2; the XPU devices are xpu:0 to xpu:1"):
        read_devices(["xpu:2"])
    with pytest.raises(InputError, match="stages cannot run on cuda:0 here; name CPU or XPU"):
        read_devices(["cuda:0"])
    with pytest.raises(InputError, match="name devices of one kind"):
        read_devices(["xpu:0", "cpu"])


def test_a_stream_of_torchs_common_class_is_a_device() -> None:
    stream = torch.Stream("cpu")
    assert read_devices([stream]) == [stream]

"""Kinds of accelerators: what the runtime asks torch about each, by one name."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxpipe import InputError
from fxpipe.devices import read_devices
from fxpipe.torchtools.accelerator import Accelerator, kind_of

OTHER = torch.device("privateuseone:1")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Say which kind of accelerator this machine has, how many, and what its module has."""

    def install(kind: str, count: int = 2, **module: Any) -> None:
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda **_: torch.device(kind)
        )
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
        monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(**module))

    return install


def test_a_kind_that_is_not_in_the_table_is_asked_by_the_names_of_cuda(
    found: Callable[..., None],
) -> None:
    one, two = torch.Generator(), torch.Generator()
    found("privateuseone", default_generators=[one, two])
    kind = kind_of(OTHER)
    assert kind == Accelerator("privateuseone")
    assert kind.generator(OTHER) is two


@pytest.mark.parametrize(
    ("kind", "error", "late"),
    [
        ("cuda", torch.AcceleratorError("an illegal memory access"), True),
        ("cuda", RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), True),
        ("cuda", RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        ("cuda", ValueError("CUDA error"), False),
        ("xpu", RuntimeError("XPU error: device lost"), True),
        ("xpu", RuntimeError("CUDA error: device lost"), False),
    ],
)
def test_an_error_that_may_be_of_an_earlier_launch(
    kind: str, error: Exception, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kind_of(torch.device(kind)).is_late(error) == late
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")  # no error is late then, on CUDA
    assert kind_of(torch.device(kind)).is_late(error) == (late and kind != "cuda")


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

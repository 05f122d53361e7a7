"""Kinds of accelerators: what is asked of torch about each, by one name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fxpipe.extensions.streams.kinds import Accelerator, kind_of

OTHER = torch.device("privateuseone:1")


@pytest.mark.smoke
def test_a_kind_that_is_not_in_the_table_is_asked_by_the_names_of_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two = torch.Generator(), torch.Generator()
    module = SimpleNamespace(default_generators=[one, two])
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    kind = kind_of(OTHER)
    assert kind == Accelerator("privateuseone")
    assert kind.generator(OTHER) is two


@pytest.mark.smoke
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

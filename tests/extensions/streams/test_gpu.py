"""Streams of CUDA devices: they need at least one device, and are skipped without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda import green_contexts

import fxpipe
from fxpipe.extensions.streams.lanes import Lanes
from tests.gpu.test_cuda import Model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def test_a_value_that_arrives_is_a_copy_made_beside_the_computations() -> None:
    lanes = Lanes(torch.device("cuda:0"))
    for value in (torch.arange(1000.0), torch.arange(1000.0).pin_memory(), torch.ones(3).cuda()):
        with lanes.on("in0", "copy"):
            made = lanes.bring("in0", value)
        lanes.wait("compute", lanes.mark("in0"))
        with lanes.on("compute", "sum"):
            total = made.sum()
        lanes.end()
        assert total.item() == value.sum().item()
        assert made.data_ptr() != value.data_ptr()


def test_the_stream_of_a_green_context_is_a_device() -> None:
    try:
        context: Any = green_contexts.GreenContext.create(num_sms=8, device_id=0)
        stream = context.Stream()
    except RuntimeError as error:
        pytest.skip(f"the driver makes no green context: {error}")
    model = Model()
    x, y = torch.randn(8, 64), torch.randint(8, (8,))
    with fxpipe.compile(
        model, [stream, torch.cuda.Stream()], microbatches=2, loss=nn.functional.cross_entropy
    ) as pipe:
        assert pipe.step(x, target=y).isfinite()
        assert pipe.profile(x, target=y).makespan > 0

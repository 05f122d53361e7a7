"""Streams of simulated devices, and what tests ask of a GPU's."""

from __future__ import annotations

from pathlib import Path

import torch

from fxpipe.extensions.streams.lanes import current, plain
from tests.simcuda.process import on_devices, simulated
from tests.simcuda.test_gpu_tests import assert_pass

pytestmark = simulated


def blocks() -> None:
    first, second = torch.Stream("cuda:0"), torch.Stream("cuda:1")

    def now() -> tuple[int, torch.Stream, torch.Stream]:
        stream = torch.accelerator.current_stream
        return torch.accelerator.current_device_index(), stream(0), stream(1)

    before = now()
    with current(first), current(second):
        assert now() == (1, first, second)
        with current(first):  # once more
            assert now() == (0, first, second)
        assert now() == (1, first, second)
    assert now() == before
    assert [stream.stream_id for stream in before[1:]] == [0, 0]  # the default ones
    given = torch.cuda.Stream(1)
    assert type(plain(given)) is torch.Stream
    assert plain(given).stream_id == given.stream_id
    assert plain(given).device == torch.device("cuda:1")


def test_a_stream_is_current_in_its_block_alone() -> None:
    on_devices(blocks)


def test_the_tests_for_a_gpu_pass_on_simulated_devices() -> None:
    assert_pass(Path(__file__).with_name("test_gpu.py"))

"""Models of several kinds give the same bits on ranks as on the devices of one process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from benchmarks.models.ranks import Found, Setting, attempt, differing
from tests.helpers.profiles import DEEP
from tests.helpers.ranks import DeviceMesh, on_ranks

SETTINGS: dict[int, tuple[Setting, ...]] = {
    2: (Setting("U-Net (2, 4)", "1f1b"),),
}
"""Ranks → what they train."""

if DEEP:
    SETTINGS = {
        2: (
            *SETTINGS[2],
            Setting("LSTM", "zb-h1"),
            Setting("branches", "interleaved-1f1b"),
            Setting("mixture of experts", "2bw"),
        ),
        4: (
            Setting("branches", "gpipe"),
            Setting("mixture of experts", "interleaved-1f1b"),
            Setting("LSTM", "2bw"),
        ),
    }


def attempts(devices: DeviceMesh, settings: Sequence[Setting]) -> list[Found | str]:
    return [attempt(setting, devices) for setting in settings]


@pytest.mark.parametrize("size", SETTINGS)
def test_models_on_ranks_have_the_bits_of_one_process(size: int) -> None:
    settings = SETTINGS[size]
    ranks = on_ranks(size, attempts, settings)
    for number, setting in enumerate(settings):
        alone = attempt(setting, ["cpu"] * size)
        assert not differing(alone, [own[number] for own in ranks]), setting
        assert not isinstance(alone, str)
        assert any(name.startswith("gradient") for name in alone)


ONE_OF_MANY = """
from benchmarks.logical import rank_of
for figure in rank_of({"dp": 2, "pp": 4, "tp": 2}, 13, 4).figures:
    print(figure.name, figure.value, sep="=")
"""


def test_one_rank_of_a_mesh_compiles_on_one_machine_without_the_others() -> None:
    command = [sys.executable, "-c", ONE_OF_MANY]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    figures = dict(line.split("=") for line in told.splitlines())
    assert int(figures["values that it sends a step"]) == 8  # there and back, each micro-batch
    # whole values go between stages, also where these are divided
    assert int(figures["bytes of these"]) == 8 * 16 * 4

"""Devices and clusters on paper, against formulas."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf, nan
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import Cluster, Device, Link, Time
from fxpipe.errors import InputError
from fxpipe.extensions.paper.counting import Counted, count
from fxpipe.extensions.paper.operations import Operation
from fxpipe.extensions.paper.presets import PRESETS
from fxpipe.extensions.paper.profile import Profile


def test_an_operation_takes_the_longest_of_its_flops_its_bytes_and_its_launch() -> None:
    device = Device(flops=100, bandwidth=10, efficiency=0.5, streaming=0.5, launch=3, single=20)
    assert device.seconds(Operation("mm", 1000, 10, (1, 1, 1, 1), 2)) == 1000 / 50
    assert device.seconds(Operation("mm", 1000, 10, (1, 1, 1, 1), 4)) == 1000 / 10
    assert device.seconds(Operation("add", 0, 100)) == 100 / 5
    assert device.seconds(Operation("add", 0, 1)) == 3


@pytest.mark.parametrize("rows", [1, 128, 129, 1000, 5000])
def test_a_product_takes_whole_tiles_and_half_a_tile_more(rows: int) -> None:
    device = Device(flops=1, units=10)
    tiles = ceil(rows / 128) * 8
    flops = 2.0 * rows * 1024 * 512
    waves = max(tiles / 10 + 0.5, 1)  # tiles of each multiprocessor, one after another
    found = device.seconds(Operation("mm", flops, 0, (1, rows, 1024, 512), 2))
    assert found == pytest.approx(waves * flops / tiles * 10)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_devices_of_their_names(name: str) -> None:
    device = PRESETS[name]
    assert device.name.replace(" ", "") == name
    assert device.bandwidth < device.flops
    assert Cluster.parse(f"4x{name}/2").devices == 8


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Device(flops=0), "flops of a device is 0; give a number above 0"),
        (lambda: Device(flops=nan), "flops of a device is nan; give a number above 0"),
        (lambda: Device(flops=inf), "flops of a device is inf; give a finite number"),
        (lambda: Device(flops=1, bandwidth=0), "bandwidth of a device is 0; give"),
        (lambda: Device(flops=1, bandwidth=nan), "bandwidth of a device is nan; give"),
        (lambda: Device(flops=1, memory=nan), "memory of a device is nan; give"),
        (lambda: Link(1, 0), "a link's bandwidth is 0; give one above 0"),
        (lambda: Link(1, nan), "a link's bandwidth is nan; give one above 0"),
        (lambda: Link(nan, 1), "a link's latency is nan; give a time"),
        (lambda: Time(nan), "compute of a Time is nan"),
        (lambda: Device(flops=1, launch=-1), "launch of a device is -1"),
        (lambda: Device(flops=1, link=3), "link of a device is 3"),  # type: ignore[arg-type]
        (lambda: Cluster(3, 2), "a cluster is of 3"),  # type: ignore[arg-type]
        (lambda: Cluster(Device(1), 0), "number of parts of a cluster is 0"),
        (lambda: Cluster.parse("8"), "the cluster is '8'; write"),
        (lambda: Cluster.parse("8xH10"), "there is no device 'H10'"),
    ],
)
def test_wrong_devices_and_clusters_are_refused(make: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        make()


def test_two_devices_have_the_link_of_the_innermost_level_that_they_share() -> None:
    device = Device(flops=1, link=Link(1), network=Link(2))
    rack = Cluster(Cluster(device, 4), 3)
    cluster = Cluster(rack, 2, link=Link(9, 30), shared=True)
    assert cluster.devices == 24
    for one in range(24):
        for other in range(24):
            level = 0 if one // 4 == other // 4 else 1 if one // 12 == other // 12 else 2
            expected = (Link(1), Link(2), Link(9, 30 / 12))[level]
            assert cluster.link_between(one, other) == expected


def counted(model: nn.Module, *shape: int) -> Counted:
    with torch.device("meta"):
        return count(model, [torch.zeros(shape)], {}, None, shape[0])


def halves(found: Counted) -> dict[str, float]:
    total = dict.fromkeys("FIW", 0.0)
    for ran in found.ran:
        total[ran.half] += ran.operation.flops
    return total


def test_a_linear_layer_counts_as_three_products_after_the_first() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    first, second = 2 * 5 * 6 * 8, 2 * 5 * 8 * 4
    found = counted(model, 5, 6)
    # nothing asks for the gradient of the input
    assert halves(found) == {"F": first + second, "I": second, "W": first + second}
    paths = {ran.path for ran in found.ran}
    assert paths == {"0", "1", "2"}
    adds = [r.operation.bytes for r in found.ran if r.operation.name == "add"]
    assert sorted(adds) == sorted(3 * 4 * n for n in (48, 8, 32, 4))


def test_a_convolution_counts_as_three_products() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 2, 1))
    first, second = 2 * 4 * 8 * 8 * 6 * 3 * 9, 2 * 4 * 8 * 8 * 2 * 6
    assert halves(counted(model, 4, 3, 8, 8)) == {
        "F": first + second,
        "I": second,
        "W": first + second,
    }


def test_what_backward_keeps_is_counted_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(x)
            return self.one(y) + self.two(y)  # type: ignore[no-any-return]

    with torch.device("meta"):
        model = Twice()
    found = counted(model, 5, 6)
    assert sum(kept.bytes for kept in found.saved) == 5 * 6 * 4


def test_an_operation_of_which_no_flops_are_counted_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Inverse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch.linalg.inv(x)
            return y

    profile = Profile(Inverse(), (torch.zeros(5, 6, 6),), {}, None, (), {}, 1)
    with caplog.at_level("WARNING", logger="fxpipe"):
        found = profile.counted(5)
        profile.counted(10)
    (told,) = (record.getMessage() for record in caplog.records)
    assert "torch counts no FLOPs of aten.linalg_inv_ex.default, so that only" in told
    assert found.ran
    assert all(ran.operation.bytes > 0 for ran in found.ran)


def test_a_model_that_reads_values_only_where_it_is_not_compiled_is_counted() -> None:
    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling() and bool((x != 0).all()):  # as masks are looked at
                return x
            return super().forward(x)

    found = Profile(Looks(6, 6), (torch.zeros(5, 6),), {}, None, (), {}, 1).counted(5)
    assert sum(ran.operation.flops for ran in found.ran) >= 3 * 2 * 5 * 6 * 6 - 2 * 5 * 6 * 6


def test_a_model_that_reads_values_is_refused() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    place = (
        r"Branches does not run on the meta device at \S*test_device.py:\d+, in forward: return x"
    )
    with pytest.raises(InputError, match=place):
        counted(Branches(), 5, 6)


def test_public_names_are_there() -> None:
    assert fxpipe.Device is Device
    assert replace(PRESETS["A100"], efficiency=0.5).efficiency == 0.5

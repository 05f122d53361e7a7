"""The GPU benchmarks' groups of multiprocessors, on a driver that is a stand-in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import groups
from benchmarks.gpu.setting import Setting


class Driver(ModuleType):
    """The driver of a GPU that has so many multiprocessors, of which so many can be grouped."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)

    def __init__(self, multiprocessors: int, grouped: Callable[[int, int], int]) -> None:
        super().__init__("cuda.bindings.driver")
        self.multiprocessors = multiprocessors
        self.grouped = grouped
        self.splits: list[tuple[int, int]] = []

    def cuDeviceGet(self, index: int) -> tuple[int, int]:
        return 0, index

    def cuDeviceGetDevResource(self, device: int, kind: int) -> tuple[int, Any]:
        return 0, self._resource(self.multiprocessors)

    def cuDevSmResourceSplitByCount(
        self, count: int, whole: Any, flags: int, size: int
    ) -> tuple[int, Any, int, Any]:
        self.splits.append((size, flags))
        found = min(count, self.grouped(size, flags))
        return 0, [self._resource(size) for _ in range(found)], found, None

    def cuDevResourceGenerateDesc(self, groups: list[Any], count: int) -> tuple[int, Any]:
        return 0, groups

    def cuGreenCtxCreate(self, groups: list[Any], device: int, flags: int) -> tuple[int, Any]:
        return 0, groups

    def cuGreenCtxStreamCreate(self, groups: list[Any], flags: int, _: int) -> tuple[int, int]:
        return 0, id(groups[0])

    def _resource(self, size: int) -> Any:
        return SimpleNamespace(sm=SimpleNamespace(smCount=size))


@pytest.mark.parametrize(
    ("grouped", "size", "splits"),
    [
        (lambda size, flags: 8, 16, [(16, 0)]),
        (lambda size, flags: 8 if flags else 7, 16, [(16, 0), (16, 1)]),
        (lambda size, flags: 120 // size, 8, [(16, 0), (16, 1), (8, 0)]),
    ],
    ids=["at once", "not co-scheduled", "smaller"],
)
def test_groups_are_separate_parts_of_one_split(
    grouped: Callable[[int, int], int],
    size: int,
    splits: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(132, grouped)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer, device: pointer)
    found = groups.split(Setting(False, torch.device("cpu"), Path(), 0.0, 1), 8)
    assert found.multiprocessors == size and driver.splits == splits
    assert len(set(found.devices)) == 8


def test_a_gpu_that_cannot_be_split_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", Driver(132, lambda size, flags: 1))
    with pytest.raises(groups.GroupsError, match="132 multiprocessors cannot be split into 8"):
        groups.split(Setting(False, torch.device("cpu"), Path(), 0.0, 1), 8)

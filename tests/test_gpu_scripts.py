"""The GPU benchmarks, tried on CPU devices; and what they stand on."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import fxpipe
from benchmarks.gpu import ablation, groups, memory, scaling, spin, stages
from benchmarks.gpu.peer import Peer
from benchmarks.gpu.setting import Setting, out_of_memory
from benchmarks.gpu.workloads import NAMES, balance, begins, fair, layers, workload
from benchmarks.models.amoebanet import AmoebaNetD
from benchmarks.models.gpt2 import GPT2
from benchmarks.models.resnet import ResNet
from benchmarks.models.unet import UNet
from examples.plain import one_thread

DRY = Setting(True, torch.device("cpu"), Path(), 0.0, 1)

RUNS: list[tuple[Callable[[Sequence[str]], int], str]] = [
    (spin.main, "--schedules 1f1b"),
    (stages.main, "--models gpt2 --stages 2"),
    (scaling.main, "--models gpt2 --devices 1 2 --microbatches 2"),
    (ablation.main, ""),
    (memory.main, "--models gpt2 --schedules 2bw --modes always"),
]


@pytest.fixture(autouse=True)
def one_thread_is_faster() -> Iterator[None]:
    """For models as tiny as these."""
    with one_thread():
        yield


@pytest.mark.parametrize(("main", "own"), RUNS, ids=[run[0].__module__ for run in RUNS])
def test_a_dry_run_goes_through_and_writes_its_result(
    main: Callable[[Sequence[str]], int], own: str, tmp_path: Path
) -> None:
    assert main(["--dry-run", "--output", str(tmp_path), *own.split()]) == 0
    (path,) = tmp_path.glob("gpu-*-dry-run-*.json")
    found = json.loads(path.read_text())
    assert found["machine"]["gpu"] == "none"
    assert found["machine"]["date"] in path.name
    assert "fxpipe" in found["settings"]["versions"]
    assert found["grids"][0]["rows"]
    assert path.with_suffix(".md").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_a_script_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        stages.main([])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "no CUDA device" in told and "--dry-run" in told and told.count("\n") == 1


def test_rows_for_which_no_time_is_left_are_shown_and_fail(tmp_path: Path) -> None:
    given = ["--dry-run", "--minutes", "0", "--output", str(tmp_path), "--models", "gpt2"]
    assert stages.main(given) == 1
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["grids"][0]["rows"]
    assert all(cell == "–" for row in rows for cell in row[2:])


def test_models_have_as_many_parameters_as_the_papers_say() -> None:
    with torch.device("meta"):
        models = UNet(5, 64), AmoebaNetD(18, 256), GPT2(), ResNet()
    counts = [sum(p.numel() for p in model.parameters()) / 1e6 for model in models]
    assert [round(count, 1) for count in counts] == [232.7, 122.5, 124.4, 44.5]


@pytest.mark.parametrize("name", NAMES)
def test_torchgpipe_trains_the_same_model(name: str) -> None:
    pytest.importorskip("torchgpipe")
    work = workload(name, DRY)
    torch.manual_seed(0)
    model, other = work.model(), work.model()
    other.load_state_dict(model.state_dict())
    x, y = work.draw(4)
    lengths = balance(model, x, 2, DRY.synchronize)
    sgd = torch.optim.SGD
    peer = Peer(other, work.loss, lambda p: sgd(p, 1e-3), lengths, DRY.devices(2), 1, "never")
    torch.testing.assert_close(peer.step(x, y), work.loss(model(x), y).detach())


@pytest.mark.parametrize("name", NAMES)
def test_layers_run_in_their_order(name: str) -> None:
    model = workload(name, DRY).model()
    seen: list[str] = []
    for layer in layers(model):
        model.get_submodule(layer).register_forward_pre_hook(
            lambda *_, layer=layer: seen.append(layer)
        )
    model(workload(name, DRY).draw(2)[0])
    assert seen == layers(model)


def test_a_fair_division_has_the_least_slowest_part() -> None:
    dice = random.Random(0)
    for _ in range(50):
        costs = [dice.random() for _ in range(dice.randrange(1, 9))]
        parts = dice.randrange(1, len(costs) + 1)
        lengths = fair(costs, parts)
        assert len(lengths) == parts and sum(lengths) == len(costs) and min(lengths) > 0
        ends = itertools.combinations(range(1, len(costs)), parts - 1)
        assert _slowest(costs, lengths) == min(
            max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cut, len(costs))))
            for cut in ends
        )


def _slowest(costs: Sequence[float], lengths: Sequence[int]) -> float:
    edges = [0, *itertools.accumulate(lengths)]
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))


def test_skips_that_are_handed_on_cross_one_stage_at_a_time() -> None:
    torch.manual_seed(0)
    model = UNet(1, 4, depth=2, dropout=0.0)
    cuts = begins(layers(model), [1, 2, 3])
    x, y = torch.randn(2, 3, 8, 8), torch.randn(2, 1, 8, 8)
    expected = mse_loss(model(x), y).detach()
    with fxpipe.compile(
        ablation.Carrying(model, cuts),
        ["cpu"] * 3,
        microbatches=1,
        loss=mse_loss,
        partition=[f"unet.{cut}" for cut in cuts],
    ) as pipe:
        torch.testing.assert_close(pipe.step(x, target=y), expected)
        inner = [e for e in pipe.plan.edges if min(e.source, e.target) >= 0 and e.gradient]
        assert len(inner) > 2 and all(e.target - e.source == 1 for e in inner)


def test_memory_of_devices_together_is_counted_at_one_time() -> None:
    def simulation(starts: list[list[float]], levels: list[list[int]]) -> Any:
        held = [SimpleNamespace(levels=own, resting=1) for own in levels]
        events = SimpleNamespace(starts=starts)
        return SimpleNamespace(devices=len(levels), memory=held, events=events)

    apart = simulation([[0.0, 1.0], [0.0, 1.0]], [[10, 2], [3, 20]])
    assert memory.together(apart) == 22
    at_once = simulation([[0.0, 2.0], [1.0, 3.0]], [[10, 2], [20, 3]])
    assert memory.together(at_once) == 30


def test_a_lack_of_memory_is_found_behind_other_errors() -> None:
    error = RuntimeError("stage 1")
    error.__cause__ = torch.OutOfMemoryError("no memory")
    assert out_of_memory(error)
    assert not out_of_memory(RuntimeError("no memory"))


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

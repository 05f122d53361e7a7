"""The GPU benchmarks, tried on CPU devices; and what they stand on."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from benchmarks.gpu import __main__ as calls
from benchmarks.gpu import ablation, memory, overlap, right, scaling, spin, stages
from benchmarks.gpu.limited import limited
from benchmarks.gpu.setting import LEAST, Setting
from benchmarks.gpu.workloads import workload
from fxpipe.extensions.simulator.unroll import unroll
from fxpipe.ir.instruction import Arrival
from tests.extensions.streams.eager_lanes import launched
from tests.helpers.profiles import some

pytestmark = pytest.mark.models

DRY = Setting(True, torch.device("cpu"), Path(), 0.0, 1)

RUNS: list[tuple[Callable[[Sequence[str]], int], str]] = [
    (spin.main, "--schedules 1f1b"),
    (stages.main, "--models gpt2 --stages 8"),
    (scaling.main, "--models gpt2 --devices 1 2 --microbatches 2"),
    (ablation.main, ""),
    (overlap.main, "--models gpt2 --schedules 1f1b"),
    (memory.main, "--models gpt2 --schedules 2bw --modes always"),
]
SCRIPTS = {
    "ablation": ablation,
    "memory": memory,
    "overlap": overlap,
    "right": right,
    "scaling": scaling,
    "spin": spin,
    "stages": stages,
}
PARTS = [*calls.EVERYTHING, *itertools.chain(*(call.parts for call in calls.CALLS.values()))]


@pytest.mark.parametrize(("main", "own"), some(RUNS))
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


def result(folder: Path) -> list[Any]:
    """The tables of the one result that a folder holds."""
    (path,) = folder.glob("*.json")
    return [grid["rows"] for grid in json.loads(path.read_text())["grids"]]


def test_rows_for_which_no_time_is_left_are_shown_and_fail(tmp_path: Path) -> None:
    given = ["--dry-run", "--minutes", "0", "--output", str(tmp_path), "--models", "gpt2"]
    assert stages.main(given) == 1
    rows, missing = result(tmp_path)
    assert all(cell == "–" for row in rows for cell in row[2:])
    assert missing == [[f"tiny GPT-2, p={p}", "no time was left"] for p in (1, 2)]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyError("any\n|kind")])
def test_an_error_costs_its_row_alone_and_is_written_down(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(work: Any, schedule: str, mode: str, *_: Any) -> memory.Row:
        if schedule == "1f1b":
            (first,) = result(tmp_path)  # what was measured before is published
            assert [row[0] for row in first] == ["tiny GPT-2, gpipe, recompute never"]
            raise error
        return memory.Row(1, 1, 1)

    monkeypatch.setattr(memory, "measure", measure)
    given = ["--models", "gpt2", "--modes", "never", "--output", str(tmp_path), "--dry-run"]
    assert memory.main(given) == 1
    rows, ((row, why),) = result(tmp_path)
    assert [row[-1] for row in rows] == ["+0.00 %", "–", "+0.00 %"]
    assert row == "tiny GPT-2, 1f1b, recompute never"
    assert why in ("OutOfMemoryError: no memory", r"KeyError: 'any\n/kind'")


@pytest.mark.parametrize("part", PARTS, ids=[" ".join(part.words) for part in PARTS])
def test_every_script_takes_the_arguments_that_it_is_given(
    part: calls.Part, tmp_path: Path
) -> None:
    script, *own = part.words
    given = [*own, "--dry-run", "--minutes", "0", "--output", str(tmp_path)]
    assert SCRIPTS[script].main(given) == 1
    assert all(why == "no time was left" for _, why in result(tmp_path)[-1])


@pytest.mark.parametrize("call", calls.CALLS)
def test_a_call_ends_in_time_though_every_script_takes_all_of_its_own(
    call: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0

    def take(command: Sequence[str], seconds: float) -> tuple[int | None, str]:
        nonlocal now
        assert 60 * float(command[-1]) < seconds  # there is time to end by itself
        now += seconds
        return None, ""

    monkeypatch.setattr(calls, "limited", take)
    monkeypatch.setattr(calls, "perf_counter", lambda: now)
    assert calls.main([call]) == 1
    most, parts = calls.CALLS[call]
    assert now <= 60 * most
    assert capsys.readouterr().out.count("(killed after") == len(parts)


def test_the_calls_of_a_quarter_of_an_hour_leave_few_files() -> None:
    assert sum(60 * call.minutes for call in calls.CALLS.values()) <= 750
    assert all(2 * len(call.parts) <= 8 for call in calls.CALLS.values())


def test_only_the_tests_run_under_the_sanitizer(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, bool] = {}

    def take(command: Sequence[str], seconds: float) -> tuple[int, str]:
        given[command[2]] = "--sanitizer" in command
        return 0, ""

    monkeypatch.setattr(calls, "limited", take)
    assert calls.main(["--sanitizer"]) == 0
    assert [name for name, under in given.items() if under] == ["benchmarks.gpu.right"]


def test_a_script_that_fails_does_not_keep_the_next_from_running(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Sequence[str]] = []

    def take(command: Sequence[str], seconds: float) -> tuple[int | None, str]:
        ran.append(command)
        return len(ran) % 2, ""

    monkeypatch.setattr(calls, "limited", take)
    assert calls.main(["--dry-run", "--output", str(tmp_path), "--minutes", "3"]) == 1
    assert len(ran) == len(calls.EVERYTHING)
    assert all("--dry-run" in command and command[-1] == "3.0" for command in ran)
    assert "not whole: right (exit status 1)" in capsys.readouterr().out


def test_a_process_is_killed_in_time_with_all_that_it_started() -> None:
    assert limited(["sh", "-c", "echo begun; exit 3"], 600, stdout=-1) == (3, "begun\n")
    status, output = limited(["sh", "-c", "echo begun; sleep 900 & wait"], 1, stdout=-1)
    assert status is None and output in ("begun\n", "")


@pytest.mark.deep
def test_each_test_of_the_gpu_runs_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(
        "import os, pytest, warnings\n"
        "def test_right(): warnings.warn('a warning')\n"
        "def test_wrong(): assert 1 == 2\n"
        "def test_dead(): os._exit(139)\n"
        "@pytest.mark.skip\ndef test_elsewhere(): pass\n"
    )
    given = ["--output", str(tmp_path), "--files", str(file), "no/such.py", "--seconds", "600"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(right, "OF_A_DRY_RUN", 1)
        assert right.main(["--dry-run", *given]) == 1
    rows, missing = result(tmp_path)
    found = {name.rpartition("::")[2]: outcome for name, outcome, _ in rows}
    assert found == {
        "test_right": "passed",
        "test_wrong": "failed",
        "test_dead": "ended with 139",
        "test_elsewhere": "skipped",
    }
    whys = {name.rpartition("::")[2]: why for name, why in missing}
    assert whys["test_wrong"].endswith("assert 1 == 2") and "no/such.py" in whys["no/such.py"]


@pytest.mark.parametrize("sanitizer", [False, True])
def test_a_test_runs_under_the_sanitizer_where_it_is_asked_for(
    sanitizer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str | None] = []

    def take(command: Sequence[str], seconds: float, **how: Any) -> tuple[int, str]:
        found.append(how["env"].get("TORCH_CUDA_SANITIZER"))
        return 0, "1 passed"

    monkeypatch.setattr(right, "limited", take)
    setting = Setting(True, torch.device("cpu"), Path(), math.inf, 1)
    assert right.run("a test", 1.0, setting, sanitizer).outcome == "passed"
    assert found == ["1" if sanitizer else None]


def test_a_test_that_cannot_be_started_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(command: Sequence[str], seconds: float, **how: Any) -> tuple[int, str]:
        if "--collect-only" in command:
            return 0, "some.py::test_first\nsome.py::test_second\n"
        if "first" in command[-1]:
            raise OSError("no process is left")
        return 0, "1 passed"

    monkeypatch.setattr(right, "limited", take)
    monkeypatch.setattr(right, "OF_A_DRY_RUN", 1)
    assert right.main(["--dry-run", "--output", str(tmp_path), "--files", "some.py"]) == 1
    rows, ((name, why),) = result(tmp_path)
    assert [row[1] for row in rows] == ["not run", "passed"]
    assert "first" in name and "no process is left" in why


@pytest.mark.parametrize("script", [overlap, scaling, ablation])
def test_a_gpu_that_cannot_be_split_leaves_a_result_that_says_why(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def split(setting: Setting, count: int) -> Any:
        raise AttributeError("no such function of the driver")

    monkeypatch.setattr(script, "split", split)
    assert script.main(["--dry-run", "--output", str(tmp_path)]) == 1
    (((_, why),),) = result(tmp_path)
    assert why == "AttributeError: no such function of the driver"


def test_no_more_rounds_begin_when_the_time_of_the_script_is_up() -> None:
    ran: list[int] = []
    over = Setting(True, torch.device("cpu"), Path(), 0.0, 50)
    over.seconds({"step": lambda: ran.append(1)}, 60.0)
    assert len(ran) == 1 + LEAST


class Beside(Setting):
    """As on a GPU, as far as the script that is tried can tell."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""


@pytest.mark.parametrize("given", ["", "--dispatch thread", "--cuda-graphs"])
def test_stages_are_launched_as_is_asked(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, Any]] = []

    def compiled(model: Any, devices: Any, **options: Any) -> Any:
        found.append(options)
        raise RuntimeError("that is all")

    monkeypatch.setattr(fxpipe, "compile", compiled)
    one = ["--models", "gpt2", "--stages", "1", "--output", str(tmp_path), *given.split()]
    stages.main(["--dry-run", *one])
    own = SimpleNamespace(
        microbatches=2,
        recompute="never",
        schedule="1f1b",
        dispatch="thread" if "thread" in given else "device",
        cuda_graphs="graphs" in given,
    )
    with pytest.raises(RuntimeError, match="that is all"):
        gpu = Beside(False, torch.device("cpu"), tmp_path, 0.0, 1)
        stages.measure(workload("gpt2", DRY), 1, gpu, own)
    dry, real = found
    threads = [fxpipe.Dispatch(own.dispatch)]
    graphs = [fxpipe.CudaGraphs()] * own.cuda_graphs
    assert dry["extensions"] == threads and real["extensions"] == [*threads, *graphs]


def test_memory_is_measured_over_four_steps_that_all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    within: list[int] = []

    def peak(setting: Setting, step: Callable[[], Any]) -> int:
        before = len(ran)
        step()
        within.append(len(ran) - before)
        return 0

    def step(pipe: fxpipe.Pipeline, *args: Any, **kwargs: Any) -> Any:
        ran.append(pipe)
        return plain(pipe, *args, **kwargs)

    ran: list[fxpipe.Pipeline] = []
    plain = fxpipe.Pipeline.step
    monkeypatch.setattr(Setting, "peak", peak)
    monkeypatch.setattr(fxpipe.Pipeline, "step", step)
    memory.measure(workload("gpt2", DRY), "2bw", "never", 2, 4, DRY)
    assert within == [4]


def test_what_is_covered_is_counted_as_on_a_ruler() -> None:
    dice = random.Random(0)

    def draw() -> list[tuple[float, float]]:
        starts = [dice.randrange(20) for _ in range(dice.randrange(5))]
        return [(start, start + dice.randrange(6)) for start in starts]

    for _ in range(200):
        spans, by = draw(), draw()
        marked = {at for start, end in by for at in range(int(start), int(end))}
        wanted = sum(at in marked for start, end in spans for at in range(int(start), int(end)))
        assert overlap.covered(spans, by) == wanted


def test_copies_are_found_on_the_streams_that_only_copy() -> None:
    def event(kind: str, stream: int, name: str, start: int, length: int) -> dict[str, Any]:
        where = {"args": {"stream": stream}, "tid": stream, "pid": 0}
        return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length, **where}

    events = [
        event("kernel", 7, "gemm", 0, 10),
        event("gpu_memcpy", 7, "Memcpy DtoD", 10, 5),  # in the middle of what is computed
        event("kernel", 7, "direct_copy_kernel", 15, 5),
        event("kernel", 9, "relu", 15, 5),
        event("gpu_memcpy", 13, "Memcpy HtoD", 8, 4),
        event("kernel", 17, "void at::native::direct_copy_kernel_cuda", 18, 4),
        event("cpu_op", 13, "aten::mm", 0, 99),
        {"ph": "M", "name": "process_name"},
    ]
    lanes = overlap.lanes_of(events)
    assert {lane.name: (len(lane.copies), len(lane.kernels)) for lane in lanes} == {
        "7": (2, 1),
        "9": (0, 1),
        "13": (1, 0),
        "17": (1, 0),
    }
    found = overlap.under(lanes)
    assert found.copies == pytest.approx(8e-6) and found.under == pytest.approx(4e-6)


def test_arrivals_are_held_against_the_tasks_of_their_own_device() -> None:
    pipe, _ = launched(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), 2, partition=["1"])
    with pipe:
        pipe.step(torch.rand(4, 4), target=torch.tensor([0, 1, 2, 0]))
        flat = unroll(pipe.program, 1)
    assert flat.launches
    times: list[list[int]] = []
    for own in flat.lists:  # all tasks from 0 to 100, all arrivals from 40 to 140 and the rest
        times.append([])
        for instruction in own:
            times[-1] += (0, 100) if instruction.letter else (40, 140)
    arrivals = sum(isinstance(i, Arrival) for own in flat.lists for i in own)
    found = overlap.arrivals_under_tasks(flat, times)
    assert arrivals and found.copies == pytest.approx(arrivals * 100e-9)
    assert found.share == pytest.approx(0.6)


def test_memory_of_devices_together_is_counted_at_one_time() -> None:
    def simulation(starts: list[list[float]], levels: list[list[int]]) -> Any:
        held = [SimpleNamespace(levels=own, resting=1) for own in levels]
        events = SimpleNamespace(starts=starts)
        return SimpleNamespace(devices=len(levels), memory=held, events=events)

    apart = simulation([[0.0, 1.0], [0.0, 1.0]], [[10, 2], [3, 20]])
    assert memory.together(apart) == 22
    at_once = simulation([[0.0, 2.0], [1.0, 3.0]], [[10, 2], [20, 3]])
    assert memory.together(at_once) == 30

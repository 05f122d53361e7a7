"""The model, the photographs and the plain loop that the demo and the benchmarks stand on."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from benchmarks.machine import Machine
from benchmarks.peers.contenders import LIMIT, RANKS
from benchmarks.peers.group import Group, Step
from benchmarks.report import Figure, Grid, Report, spread
from examples import plain
from examples.unet import UNet
from tests.helpers.profiles import deep
from tests.helpers.ranks import CONTEXT, DEADLINE, on_ranks

ROOT = Path(__file__).parent.parent
OPTIONS = ("--steps", "2", "--output")

MACHINE = Machine("2026-01-31", "a processor", 2, 0.5, "Linux 6", "3.11.0", "2.13.0")


@pytest.mark.parametrize("depth", [1, 3])
def test_a_unet_gives_an_image_of_the_same_size(depth: int) -> None:
    image = torch.rand(2, 3, 16, 24)
    assert UNet(base=4, depth=depth)(image).shape == image.shape


def test_a_unet_uses_every_parameter() -> None:
    model = UNet(base=2, depth=2)
    model(torch.rand(2, 3, 8, 8)).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_a_plain_step_over_uneven_microbatches_follows_the_gradient_of_the_batch() -> None:
    torch.manual_seed(0)
    x, y = torch.rand(7, 3), torch.rand(7, 2)
    split, whole = nn.Linear(3, 2), nn.Linear(3, 2)
    whole.load_state_dict(split.state_dict())
    loss = plain.step(split, mse_loss, torch.optim.SGD(split.parameters(), lr=0.5), x, y, 3)
    expected = plain.step(whole, mse_loss, torch.optim.SGD(whole.parameters(), lr=0.5), x, y, 1)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(split.state_dict(), whole.state_dict())


def test_crops_are_drawn_again_from_the_same_seed() -> None:
    photographs = pytest.importorskip("examples.photographs")
    pictures = photographs.training()

    def draw() -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        crops = photographs.crops(pictures, 5, 32, generator)
        image: torch.Tensor = photographs.add_noise(crops, generator).image
        return image

    assert draw().shape == (5, 3, 32, 32)
    assert torch.equal(draw(), draw())


def test_a_report_fits_80_columns_and_leaves_no_figure_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    who = "a contender whose name is long, and that runs in processes of its own beside another one"
    figures = [Figure(who, 1.5, "ms"), Figure("it cannot run", "because of this and that " * 9)]
    rows = [[f"row {at}", *(f"{at}.{column}234567 ms" for column in range(12))] for at in range(3)]
    grid = Grid(["case", *(f"column {at}" for at in range(12))], rows)
    Report("wide", "A benchmark", {}, figures, MACHINE, [grid]).publish(tmp_path)
    lines = capsys.readouterr().out.splitlines()[:-1]  # the last one is a path
    assert max(map(len, lines)) <= 80
    words = " ".join(lines).split()
    assert all(cell in " ".join(words) for row in rows for cell in row)
    assert words.count("because") == 9 and "1.5" in words


def test_of_two_loops_at_once_a_step_takes_half_of_the_time() -> None:
    class Answering(Group):
        def __init__(self, contender: str) -> None:
            self.contender = contender

        def _order(self, order: str) -> list[tuple[float, float, tuple[float, ...]]]:
            return [(2.0, 1.5, (0.25,)), (3.0, 2.5, (0.25,))]

    assert Answering(LIMIT).step() == Step(1.5, 2.0, (0.25,))
    assert Answering(RANKS).step() == Step(3.0, 4.0, (0.25,))


def test_a_report_is_written_for_people_and_for_programs(tmp_path: Path) -> None:

    figures = [*spread("a step", [0.010, 0.012, 0.020]), Figure("ratio", 1.5)]
    Report("short", "A benchmark", {"rounds": 3}, figures, MACHINE).publish(tmp_path)
    markdown = (tmp_path / "short-2026-01-31.md").read_text()
    assert "| a step, median | 12 ms |\n" in markdown
    assert "- cpu: a processor\n" in markdown
    assert '"value": 1.5' in (tmp_path / "short-2026-01-31.json").read_text()


def demo(output: Path, told: Path, variables: Mapping[str, str]) -> None:
    """Run the demo in a process of its own, in which nothing else has happened."""
    os.environ.update(variables)
    sys.argv = ["denoise", *OPTIONS, str(output)]
    with told.open("w") as out, redirect_stdout(out):
        status = importlib.import_module("examples.denoise").main()
    sys.exit(status)


def forked(processes: int, output: Path, folder: Path) -> tuple[list[int | None], str]:
    """The exit status of each process, and all that they print; each has the variables that
    torchrun gives it if there are several."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    own = {"WORLD_SIZE": f"{processes}", "MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}"}
    every = [
        {**own, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} if processes > 1 else {}
        for rank in range(processes)
    ]
    ranks = [
        CONTEXT.Process(target=demo, args=(output, folder / f"{rank}", variables))
        for rank, variables in enumerate(every)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(DEADLINE)
    told = "".join((folder / f"{rank}").read_text() for rank in range(processes))
    return [each.exitcode for each in ranks], told


def started(processes: int, output: Path, folder: Path) -> tuple[list[int | None], str]:
    """The same as a reader starts it."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [
            *(sys.executable, *(torchrun if processes > 1 else ())),
            *("-m", "examples.denoise", *OPTIONS, str(output)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return [done.returncode] * processes, done.stdout


@pytest.mark.parametrize("processes", [*deep(1), 2])
@pytest.mark.parametrize("run", [forked, *deep(started)])
def test_the_demo_trains_equal_to_one_device_and_draws(
    tmp_path: Path,
    processes: int,
    run: Callable[[int, Path, Path], tuple[list[int | None], str]],
) -> None:
    pytest.importorskip("skimage")
    output = tmp_path / "output"
    status, told = run(processes, output, tmp_path)
    assert status == [0] * processes, told
    assert told.count("Equal bit for bit") == 1
    assert ("2 processes" in told) == ("rank 1" in told) == (processes > 1)
    names = ("plan", "schedule", "program", "timeline")
    drawn = {f"{name}.{end}" for name in names for end in ("svg", "png")}
    assert {path.name for path in output.iterdir()} == drawn | {"denoised.png"}
    assert "stash and pop" in (output / "plan.svg").read_text()
    table, pictures, command = (told.rindex(x) for x in ("share", str(output), "next: "))
    assert table < pictures < command > told.rstrip().rindex("\n")  # it ends with them


@pytest.mark.deep
def test_a_model_whose_blocks_read_all_earlier_ones_trains_equal_to_the_loop(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["attention_residuals", "--steps", "2"])
    importlib.import_module("examples.attention_residuals").main()
    assert "after 2 steps, equal bit for bit to the loop's" in capsys.readouterr().out


NUMBER = re.compile(r"-?\d+\.\d+")


@pytest.mark.parametrize("name", ["unet", *deep("gpt2")])
def test_a_script_changes_in_few_lines_and_logs_the_same_numbers(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "gpt2":
        pytest.importorskip("transformers")
    texts = []
    for kind in ("plain", "piped"):
        script = importlib.import_module(f"examples.{kind}_{name}")
        script.main()
        texts.append((Path(script.__file__ or "").read_text(), capsys.readouterr().out))
    (plain_code, plain_log), (piped_code, piped_log) = texts
    old, new = ([x for x in code.splitlines() if x] for code in (plain_code, piped_code))
    changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    changed = [max(b - a, d - c) for kind, a, b, c, d in changes if kind != "equal"]
    assert sum(changed) <= 8 and len(old) < 70
    assert NUMBER.sub("", plain_log) == NUMBER.sub("", piped_log)
    plain_numbers, piped_numbers = (NUMBER.findall(log) for log in (plain_log, piped_log))
    assert len(plain_numbers) > 20
    if name == "gpt2":  # it accumulates gradients over what the pipe has as micro-batches
        assert plain_numbers[:-1] == piped_numbers[:-1]
    for one, other in zip(plain_numbers, piped_numbers, strict=True):
        last = 10.0 ** -len(one.partition(".")[2])  # sums round otherwise over other parts
        assert abs(float(one) - float(other)) < 1.5 * last


@pytest.mark.deep
def test_a_script_of_pipelining_trains_the_same_over_the_same_two_ranks() -> None:
    (_, first), (losses, last) = on_ranks(2, trained_as, "pippy_ranks")
    for rank, (own, weights) in enumerate(on_ranks(2, trained_as, "piped_ranks")):
        assert own == pytest.approx(losses, rel=1e-6) and own[-1] < own[0]
        torch.testing.assert_close(weights, (first, last)[rank])


def trained_as(mesh: Any, name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    with warnings.catch_warnings(action="ignore"):  # of torch's own export
        found: tuple[list[float], dict[str, torch.Tensor]]
        found = importlib.import_module(f"examples.{name}").train()
    return found


@pytest.mark.deep
def test_files_of_the_hub_go_over_four_ranks_and_back(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    source, target = tmp_path / "source", tmp_path / "target"
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=4, num_attention_heads=2)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(source, max_shard_size="14KB")
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    words = (torch.arange(8)[:, None] + torch.arange(16)) % 64
    for _ in range(3):
        optimizer.zero_grad()
        for part in words.chunk(4):
            (model(input_ids=part, labels=part).loss / 4).backward()
        optimizer.step()
    on_ranks(4, tuned, source, target)
    shards = [len([*folder.glob("*.safetensors")]) for folder in (source, target)]
    assert shards == [4, 4]
    found = transformers.AutoModelForCausalLM.from_pretrained(target).state_dict()
    torch.testing.assert_close(found, dict(model.state_dict()), rtol=0, atol=0)


def tuned(mesh: Any, source: Path, target: Path) -> None:
    tune_ranks = importlib.import_module("examples.tune_ranks")
    assert len({*tune_ranks.train(source, target, 3, mesh)}) == 3

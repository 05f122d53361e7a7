"""Checkpoints of several ranks: any number of ranks goes on from them, to the bit, or none does."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn import functional as F

import fxpipe
from fxpipe.extensions.checkpoint import folder as checkpoint_folder
from tests.helpers.checkpoints import same
from tests.helpers.one_optimizer import made_by
from tests.helpers.profiles import DEEP, deep
from tests.helpers.ranks import DEADLINE, DeviceMesh, on_ranks, result_of, start

Devices = DeviceMesh | int
STEPS, STOP = 6, 3


class Model(nn.Module):
    """Eight blocks with a weight that the first and the last share, BatchNorm, and dropout."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.block1, self.block2 = nn.Linear(6, 6), nn.Linear(6, 6)
        self.block3, self.block4 = nn.Linear(6, 6), nn.Linear(6, 6)
        self.block5, self.block6 = nn.Linear(6, 6), nn.Linear(6, 6)
        self.block7, self.block8 = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.block8.weight = self.block1.weight
        self.register_buffer("scale", torch.full((6,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.block2(torch.tanh(self.block1(x))))
        x = self.norm(torch.tanh(self.block4(torch.tanh(self.block3(x)))))
        x = self.drop(torch.tanh(self.block6(torch.tanh(self.block5(x)))))
        out: Tensor = self.block8(torch.tanh(self.block7(x)) * self.scale)
        return out


CUTS = {1: [], 2: ["block5"], 4: ["block3", "block5", "block7"]}
ADAMW: Callable[..., Any] = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)  # noqa: E731


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


def pipe_of(
    devices: Devices, schedule: str = "1f1b", model: nn.Module | None = None, **options: Any
) -> fxpipe.Pipeline:
    count = devices if isinstance(devices, int) else devices.size()
    defaults: dict[str, Any] = {
        "microbatches": 4,
        "loss": F.mse_loss,
        "optimizer": ADAMW,
        "partition": CUTS[count],
    }
    torch.manual_seed(0)
    model = model or Model()
    return fxpipe.compile(model, devices, schedule=schedule, **{**defaults, **options})


def trained(
    devices: Devices,
    options: dict[str, Any],
    load: Path | None,
    save: Path | None,
    steps: tuple[int, int],
    prepared: bool = True,
) -> dict[str, Any]:
    """The losses of some steps and the whole state after them."""
    with pipe_of(devices, **options) as pipe:
        x, y = batch(0)
        if prepared:
            pipe.prepare(x, target=y)
        torch.manual_seed(1)
        if load is not None:
            assert pipe.load(load) == {"epoch": 3}
            assert pipe.batches == steps[0]
        losses = []
        for step in range(*steps):
            x, y = batch(step)
            losses.append(pipe.step(x, target=y).clone())
        pipe.flush()
        if save is not None:
            pipe.save(save, {"epoch": 3})
        return {"losses": losses, "state": pipe.state_dict(full=True), "norm": pipe.grad_norm}


def on(count: int, *args: Any) -> dict[str, Any]:
    """What ``trained`` gives on all ranks, or in one process."""
    if count == 1:
        return trained(1, *args)
    found: list[dict[str, Any]] = on_ranks(count, trained, *args)
    for other in found[1:]:
        assert same(other, found[0])
    return found[0]


CASES: list[tuple[dict[str, Any], dict[int, tuple[int, ...]]]] = [
    *deep(({"schedule": "1f1b"}, {4: (1, 2), 1: (2,)})),
    ({"schedule": "2bw"}, {2: (4, 1)}),
]
"""Options of a pipe, and on how many ranks it is saved → on how many it is loaded."""

if DEEP:
    CASES = [(options, {4: (1, 2), 2: (4, 1), 1: (2,)}) for options, _ in CASES]


@pytest.mark.parametrize(("options", "numbers"), CASES)
def test_any_number_of_ranks_goes_on_from_any_other(
    options: dict[str, Any], numbers: dict[int, tuple[int, ...]], tmp_path: Path
) -> None:
    whole = trained(1, options, None, None, (0, STEPS))
    for save, loads in numbers.items():
        on(save, options, None, tmp_path / f"{save}", (0, STOP))
        for load in loads:
            rest = on(load, options, tmp_path / f"{save}", None, (STOP, STEPS), load != 2)
            assert same(rest["state"], whole["state"]), (save, load)
            assert same(rest["losses"], whole["losses"][STOP:]), (save, load)


def restored(
    mesh: DeviceMesh, options: dict[str, Any], file: Path, prepared: bool
) -> dict[str, Any]:
    """The same from a file that one process wrote; before that one rank finds none."""
    with pipe_of(mesh, **options) as pipe:
        x, y = batch(0)
        if prepared:
            pipe.prepare(x, target=y)
        missing = file if mesh.get_local_rank() else file.with_name("none")
        with pytest.raises((fxpipe.CheckpointError, fxpipe.RankError), match="none"):
            pipe.restore(missing)
        assert pipe.batches == 0
        assert pipe.restore(file) == {"epoch": 3}
        assert pipe.batches == STOP
        losses = []
        for step in range(STOP, STEPS):
            x, y = batch(step)
            losses.append(pipe.step(x, target=y).clone())
        return {"losses": losses, "state": pipe.state_dict(full=True)}


@pytest.mark.parametrize("options", [{"schedule": "2bw"}, *deep({"schedule": "1f1b"})])
def test_ranks_go_on_from_a_file_that_one_process_wrote(
    options: dict[str, Any], tmp_path: Path
) -> None:
    with pipe_of(1, **options) as pipe:
        torch.manual_seed(1)
        for step in range(STOP):
            x, y = batch(step)
            pipe.step(x, target=y)
        pipe.checkpoint(tmp_path / "file", extra={"epoch": 3})
        losses = []
        for step in range(STOP, STEPS):
            x, y = batch(step)
            losses.append(pipe.step(x, target=y).clone())
        whole = {"losses": losses, "state": pipe.state_dict()}
    for found in on_ranks(2, restored, options, tmp_path / "file", options["schedule"] == "1f1b"):
        assert same(found["state"], whole["state"])
        assert same(found["losses"], whole["losses"])


def hollow(mesh: DeviceMesh, folder: Path) -> dict[str, Any]:
    """The same on a model without data; which of its parameters get memory."""
    x, y = batch(0)
    with torch.device("meta"):
        model = Model()
    model.scale = torch.full((6,), 0.5)
    with pipe_of(mesh, model=model) as pipe:
        with pytest.raises(fxpipe.InputError, match="nothing is compiled yet"):
            pipe.load(folder)
        pipe.prepare(x, target=y)
        pipe.load(folder)
        for step in range(STOP, STEPS):
            x, y = batch(step)
            pipe.step(x, target=y)
        held = {name for name, value in model.named_parameters() if not value.is_meta}
        return {"held": held, "state": pipe.state_dict(full=True)}


def test_a_model_without_data_gets_memory_for_what_a_rank_loads(tmp_path: Path) -> None:
    whole = trained(1, {}, None, None, (0, STEPS))
    trained(1, {}, None, tmp_path / "run", (0, STOP))
    first, second = on_ranks(2, hollow, tmp_path / "run")
    assert same(first["state"], whole["state"])
    assert "block2.weight" in first["held"] and "block7.weight" in second["held"]
    assert not first["held"] & second["held"] - {"block1.weight"}


def scaled(devices: Devices, *args: Any) -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    found = trained(devices, {"clip_norm": 0.05, "scaler": scaler}, *args)
    return {**found, "scale": scaler.get_scale()}


def test_clipping_and_the_scale_of_losses_go_on(tmp_path: Path) -> None:
    whole = scaled(2, None, None, (0, STEPS))
    on_ranks(2, scaled, None, tmp_path / "run", (0, STOP))
    for rest in on_ranks(2, scaled, tmp_path / "run", None, (STOP, STEPS)):
        assert same(rest["state"], whole["state"])
        assert (rest["norm"], rest["scale"]) == (whole["norm"], whole["scale"])


def parts(mesh: DeviceMesh, folder: Path) -> tuple[list[str], list[str], dict[str, Tensor]]:
    """What a rank has of the state dict, which of a folder it reads, and the whole."""
    read: list[str] = []
    with pipe_of(mesh) as pipe:
        x, y = batch(0)
        assert pipe.load(folder, must_exist=False) is None
        pipe.step(x, target=y)
        pipe.save(folder, extra=mesh.get_rank())
        own = checkpoint_folder.Reader.read

        def noted(self: checkpoint_folder.Reader, names: Collection[str]) -> dict[str, Any]:
            read.extend(names)
            return own(self, names)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint_folder.Reader, "read", noted)
            assert pipe.load(folder) == 0
        return list(pipe.state_dict()), read, pipe.state_dict(full=True)


def rates(mesh: DeviceMesh, folder: Path) -> tuple[float, bool]:
    """The learning rate that comes back with a checkpoint, of one optimizer for a model whose last
    stage has no parameters; and whether this rank has parameters."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    given = torch.optim.AdamW(model.parameters(), lr=0.01)
    with pipe_of(mesh, model=model, optimizer=given, partition=["1"]) as pipe:
        for step in range(2):
            x, y = batch(step)
            pipe.step(x, target=y)
        pipe.save(folder)
        pipe.optimizer.param_groups[0]["lr"] = 0.5
        pipe.load(folder)
        return pipe.optimizer.param_groups[0]["lr"], any(made_by(pipe))


def test_settings_come_back_on_a_rank_without_parameters(tmp_path: Path) -> None:
    assert on_ranks(2, rates, tmp_path / "run") == [(0.01, True), (0.01, False)]


def test_each_rank_writes_and_reads_its_own_stages(tmp_path: Path) -> None:
    first, second = on_ranks(2, parts, tmp_path / "run")
    assert not set(first[0]) & set(second[0])
    assert {*first[0], *second[0]} == first[2].keys()
    assert "block1.weight" in first[0] and "block5.weight" in second[0]
    assert "optimizer.block2.weight.exp_avg" in first[1] and "model.block2.weight" not in second[1]
    assert "optimizer.block7.weight.exp_avg" in second[1] and "model.block7.weight" not in first[1]
    assert {"random", "model.norm.running_mean"} <= {*first[1]} | {*second[1]}
    written = sorted(each.name for each in (tmp_path / "run").iterdir())
    assert written == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(tmp_path / "run", tmp_path / "run.pt")
    found = torch.load(tmp_path / "run.pt", weights_only=True)["model"]
    Model().load_state_dict(found)
    assert same(dict(sorted(found.items())), dict(sorted(first[2].items())))


def failing(mesh: DeviceMesh, folder: Path, which: int, where: str) -> tuple[str, bool]:
    """What is raised where one rank fails, and whether nothing has changed."""
    with pipe_of(mesh) as pipe:
        x, y = batch(0)
        pipe.step(x, target=y)
        pipe.save(folder, extra="old")
        pipe.step(x, target=y)
        before = copy.deepcopy(pipe.state_dict())

        def full(*args: Any, **options: Any) -> None:
            raise OSError(28, "No space left on device")

        with pytest.MonkeyPatch.context() as patch:
            if mesh.get_rank() == which:
                holder = {"write_data": checkpoint_folder.Writer, "replace": Path}
                patch.setattr(holder.get(where, checkpoint_folder.Reader), where, full)
            with pytest.raises((fxpipe.CheckpointError, fxpipe.RankError)) as caught:
                pipe.load(folder) if where == "read" else pipe.save(folder)
        kept = same(dict(pipe.state_dict()), dict(before)) and pipe.batches == 2
        assert pipe.load(folder) == "old"
        pipe.step(x, target=y)
        pipe.save(folder, extra="new")
        assert pipe.load(folder) == "new"
        return str(caught.value), kept


@pytest.mark.parametrize(
    ("which", "where"), [(1, "write_data"), *deep((0, "replace"), (1, "read"))]
)
def test_what_fails_on_one_rank_fails_on_all_and_changes_nothing(
    which: int, where: str, tmp_path: Path
) -> None:
    for text, kept in on_ranks(2, failing, tmp_path / "run", which, where):
        assert "No space left on device" in text
        assert kept
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def of_several(mesh: DeviceMesh, folder: Path) -> tuple[str, str]:
    """Each rank saves to a folder of its own, and then all to one, by other names of it."""
    rank = mesh.get_rank()
    with pipe_of(mesh) as pipe:
        x, y = batch(0)
        pipe.step(x, target=y)
        with pytest.raises(fxpipe.CheckpointError) as caught:
            pipe.save(folder.with_name(f"run-{rank}"))
        pipe.save((os.path.relpath(folder), folder / ".." / "run")[rank], extra="one")
        return str(caught.value), pipe.load(folder)


def test_folders_that_differ_between_ranks_are_one_error_of_all(tmp_path: Path) -> None:
    first, second = (str(tmp_path / f"run-{number}") for number in range(2))
    for told, extra in on_ranks(2, of_several, tmp_path / "run"):
        assert f"rank 1 was given the folder {second!r}, and rank 0 {first!r}" in told
        assert extra == "one"
    assert [each.name for each in tmp_path.iterdir()] == ["run"]
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "run").iterdir()} == {0o600}


def vanished(mesh: DeviceMesh, folder: Path, how: str) -> str:
    """Rank 0 has no room for its part, or something removes what it has written, before rank 1
    begins to write; what is raised."""
    write, first = checkpoint_folder.Writer.write, mesh.get_rank() == 0

    def failing(self: checkpoint_folder.Writer, values: dict[str, Any], rank: int) -> Any:
        if not first:
            time.sleep(0.5)
        elif how == "full":
            raise OSError(28, "No space left on device")
        written = write(self, values, rank)
        if first:
            shutil.rmtree(Path(self.path).parent)
        return written

    with pipe_of(mesh) as pipe, pytest.MonkeyPatch.context() as patch:
        x, y = batch(0)
        pipe.step(x, target=y)
        patch.setattr(checkpoint_folder.Writer, "write", failing)
        kind = fxpipe.CheckpointError if first else fxpipe.RankError
        with pytest.raises(kind) as caught:
            pipe.save(folder)
        patch.undo()
        pipe.save(folder)
        return str(caught.value)


@pytest.mark.parametrize(
    ("how", "reason"),
    [("full", "No space left on device"), ("removed", "was removed or emptied meanwhile")],
)
def test_all_ranks_tell_why_the_first_one_could_not_write(
    how: str, reason: str, tmp_path: Path
) -> None:
    own, other = on_ranks(2, vanished, tmp_path / "run", how)
    assert reason in own
    assert other.startswith("rank 0")
    assert other.endswith(own)
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def killed(mesh: DeviceMesh, folder: Path) -> str:
    """A rank is killed while it writes its part: what the other one raises."""
    with pipe_of(mesh) as pipe:
        x, y = batch(0)
        pipe.step(x, target=y)
        pipe.save(folder, extra="old")
        if mesh.get_rank() == 1:
            checkpoint_folder.Writer.write = lambda *args: os.kill(  # type: ignore[assignment]
                os.getpid(), signal.SIGKILL
            )
        with pytest.raises(fxpipe.RankError) as caught:
            pipe.save(folder, extra="new")
        return str(caught.value)


def test_a_rank_that_is_killed_while_it_writes_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    folder = tempfile.mkdtemp(dir=tmp_path)
    ranks = [start(rank, 2, folder, killed, tmp_path / "run") for rank in range(2)]
    for process in ranks:
        process.join(DEADLINE)
    assert ranks[1].exitcode == -signal.SIGKILL
    assert "rank 1" in result_of(folder, 0)
    assert checkpoint_folder.read(tmp_path / "run").extra == "old"
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(["run", Path(folder).name])

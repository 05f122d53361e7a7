"""Folders that are written while training goes on: what is in them, what is told of a failure, and
what a kill leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.extensions.checkpoint import folder as folders
from fxpipe.pipeline import Pipeline
from tests.helpers.checkpoints import same
from tests.helpers.ranks import on_ranks

X = torch.linspace(-1, 1, 32).reshape(8, 4)


def compiled(devices: Any = 2) -> Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return fxpipe.compile(
        model, devices, microbatches=2, loss=mse_loss, optimizer=lambda p: torch.optim.Adam(p)
    )


def train(pipe: Pipeline, steps: int) -> list[Tensor]:
    return [pipe.step(X, target=X.cos()).clone() for _ in range(steps)]


class Held:
    """Lets no process write before it is told to; notes which threads computed checksums."""

    def __init__(self, error: type[Exception] | None = None) -> None:
        self.go, self.came, self.error = threading.Event(), threading.Event(), error
        self.summed: set[int] = set()

    @contextmanager
    def __call__(self) -> Iterator[Held]:
        write, checksum = folders.Writer.write_data, folders.checksum

        def waiting(*args: Any) -> Any:
            self.came.set()
            assert self.go.wait(60)
            if self.error is not None:
                raise self.error("no room")
            return write(*args)

        def noted(*args: Any) -> int:
            self.summed.add(threading.get_ident())
            return checksum(*args)

        with (
            patch.object(folders.Writer, "write_data", waiting),
            patch.object(folders, "checksum", noted),
        ):
            try:
                yield self
            finally:
                self.go.set()


@pytest.mark.smoke
def test_steps_go_on_while_a_folder_is_written_that_has_what_was_there_before_them(
    tmp_path: Path,
) -> None:
    with compiled() as pipe, Held()() as held:
        train(pipe, 2)
        pipe.save(tmp_path / "beside", {"epoch": 1}, wait=False)
        after = train(pipe, 3)
        assert held.came.wait(60)
        assert not (tmp_path / "beside").exists()
        assert threading.get_ident() not in held.summed  # the caller has copied, and no more
        held.go.set()
        assert pipe.load(tmp_path / "beside") == {"epoch": 1}  # waits
        assert same(train(pipe, 3), after)
        assert [each.name for each in tmp_path.iterdir()] == ["beside"]


def test_the_folder_equals_that_of_a_save_that_waits(tmp_path: Path) -> None:
    with compiled() as pipe:
        train(pipe, 2)
        pipe.save(tmp_path / "beside", wait=False)
        pipe.save(tmp_path / "plain")
    beside, plain = (folders.read(tmp_path / name) for name in ("beside", "plain"))
    assert same(beside.parameters, plain.parameters)
    assert beside.optimizer is not None and plain.optimizer is not None
    for name, each in plain.optimizer.parameters.items():
        assert same(beside.optimizer.parameters[name].state, each.state)
    assert torch.equal(beside.random, plain.random)


@pytest.mark.smoke
@pytest.mark.parametrize("call", ["step", "save", "load", "close"])
def test_a_failure_is_told_once_by_the_next_call_and_the_older_folder_stays(
    tmp_path: Path, call: str
) -> None:
    folder, pipe = tmp_path / "run", compiled()
    calls: dict[str, Any] = {
        "step": lambda: train(pipe, 1),
        "save": lambda: pipe.save(folder),
        "load": lambda: pipe.load(folder),
        "close": pipe.close,
    }
    train(pipe, 1)
    pipe.save(folder, "old")
    with Held(OSError)() as held:
        pipe.save(folder, "new", wait=False)
        held.go.set()
        saving = pipe._engine.beside
        assert saving._done.exception(60) is not None
        with pytest.raises(fxpipe.CheckpointError, match=r"cannot write .*run.*: no room"):
            calls[call]()
    if call != "close":
        train(pipe, 1)
        assert pipe.load(folder) == "old"
        pipe.close()
    assert folders.read(folder).extra == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


KILLED = """
import os, signal, sys
from pathlib import Path
from fxpipe.extensions.checkpoint import folder as folders
from tests.extensions.checkpoint import test_background as here
folder = Path(sys.argv[1])
pipe = here.compiled()
here.train(pipe, 1)
pipe.save(folder, "old")
folders.Writer.finish = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
pipe.save(folder, "new", wait=False)
while True:
    here.train(pipe, 1)
"""


def test_a_kill_loses_the_unfinished_folder_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    made = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    assert made.returncode == -signal.SIGKILL, made.stderr
    with compiled() as pipe:
        assert pipe.load(tmp_path / "run") == "old"


def test_a_process_that_ends_without_close_finishes_the_folder(tmp_path: Path) -> None:
    ending = KILLED.replace("folders.Writer.finish", "here.unused").partition("while")[0]
    command = [sys.executable, "-c", ending, str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run(command, env=environment, capture_output=True, timeout=120, check=True)
    assert folders.read(tmp_path / "run").extra == "new"


def on_rank(mesh: DeviceMesh, folder: Path, fails: int) -> tuple[str, Any, bool]:
    """Save twice, the second time beside the steps, where one rank may fail."""
    held = Held(OSError if mesh.get_local_rank() == fails else None)
    with compiled(mesh) as pipe:
        train(pipe, 1)
        pipe.save(folder, "old")
        with held() as writing:
            pipe.save(folder, "new", wait=False)
            after = train(pipe, 2)
            went_on = writing.came.wait(60) and folders.read(folder).extra == "old"
            writing.go.set()
            told = ""
            try:
                pipe.save(folder.with_name("next"), wait=False)
            except fxpipe.FxpipeError as error:
                told = f"{type(error).__name__}: {error}"
        found = pipe.load(folder)
        if found == "new":
            assert same(train(pipe, 2), after)
    return told, found, went_on


@pytest.mark.parametrize("fails", [-1, 0, 1])
def test_ranks_write_a_folder_together_beside_their_steps(tmp_path: Path, fails: int) -> None:
    (first, found, went), (second, *others) = on_ranks(2, on_rank, tmp_path / "run", fails)
    assert went and others == [found, went]
    if fails < 0:
        assert (first, second, found) == ("", "", "new")
        return
    assert found == "old"
    assert first.startswith("CheckpointError: cannot write") and "no room" in first
    assert second.startswith("RankError: rank 0") and "no room" in second

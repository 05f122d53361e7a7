"""Which files a pipe goes on from: old ones, and none that do not fit, which change nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fxpipe
from examples.unet import UNet
from fxpipe.runtime.checkpoint import FORMAT
from tests.checkpoints import PLAIN, Left, make, run
from tests.delayed import MSE, Factory
from tests.overlapping import ADAMW, OPTIMIZERS, SGD

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A checkpoint of three batches of the MLP, with AdamW."""
    model, data = make("mlp", 3, 4)
    with fxpipe.compile(model, 2, loss=MSE, optimizer=ADAMW, **PLAIN) as pipe:
        run(pipe, data)
        pipe.checkpoint(tmp_path / "run")
    return tmp_path / "run"


def refuse(
    path: Path,
    message: str,
    model: nn.Module | None = None,
    optimizer: Factory | None = ADAMW,
    schedule: str = "2bw",
) -> None:
    """Restoring is refused, and changes nothing."""
    model = make("mlp", 0, 1)[0] if model is None else model
    options: dict[str, Any] = {**PLAIN, "optimizer": optimizer, "schedule": schedule}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    with fxpipe.compile(model, 2, loss=MSE, **options) as pipe:
        with pytest.raises(fxpipe.CheckpointError, match=message):
            pipe.restore(path)
        assert torch.equal(torch.get_rng_state(), drawn)
        assert pipe.batches == 0
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_files_of_the_first_format_are_read(trained: Path, tmp_path: Path) -> None:
    with safetensors.safe_open(trained, framework="pt") as file:
        header = json.loads(file.metadata()["fxpipe"])
    header["format"] = 1
    del header["content"]["extra"], header["content"]["device_random"]
    save_file(load_file(trained), tmp_path / "old", {"fxpipe": json.dumps(header)})
    with fxpipe.compile(make("mlp", 0, 1)[0], 2, loss=MSE, **PLAIN, optimizer=ADAMW) as pipe:
        assert pipe.restore(tmp_path / "old") is None
        assert pipe.batches == 3


def test_a_refused_checkpoint_leaves_a_run_as_it_was(tmp_path: Path) -> None:
    model, data = make("mlp", 8, 4)
    options: dict[str, Any] = {**PLAIN, "optimizer": SGD}
    with fxpipe.compile(make("mlp", 0, 1)[0], 2, loss=MSE, **options) as pipe:
        losses = run(pipe, data)
        torch.manual_seed(0)
        expected = Left.by(pipe, losses)
    with fxpipe.compile(UNet(channels=1, base=4, depth=2), 2, loss=MSE, **options) as pipe:
        pipe.checkpoint(tmp_path / "unet")
    with fxpipe.compile(model, 2, loss=MSE, **options) as pipe:
        losses = run(pipe, data[:4])
        with pytest.raises(fxpipe.CheckpointError):
            pipe.restore(tmp_path / "unet")
        losses += run(pipe, data[4:])
        torch.manual_seed(0)
        Left.by(pipe, losses).assert_same(expected)


def test_a_checkpoint_of_another_model_names_the_first_key_that_differs(trained: Path) -> None:
    deeper = make("mlp", 0, 1)[0]
    assert isinstance(deeper, nn.Sequential)
    refuse(trained, r"its parameter '3.0.weight' is none of the pipe's", deeper[:3])
    deeper.append(nn.Linear(6, 6).double())
    refuse(trained, r"it has no parameter '4.weight'; did you mean '3.0.weight'", deeper)
    wide = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
    refuse(trained, r"'0.0.weight' is 6×6 of float64, and the pipe's is 6×6 of float32", wide)
    wide[2] = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
    wide.double()
    refuse(trained, r"'2.0.weight' is 6×6 of float64, and the pipe's is 7×6 of float64", wide)


def test_an_optimizer_of_another_kind_is_named(trained: Path) -> None:
    refuse(
        trained,
        r"holds the state of AdamW for '0.0.weight', and the pipe trains it with SGD",
        optimizer=SGD,
    )
    refuse(trained, "state of AdamW, and the pipe has no opt", optimizer=None, schedule="1f1b")


def test_groups_that_were_parted_are_named(tmp_path: Path) -> None:
    model, data = make("mlp", 2, 4)
    with fxpipe.compile(model, 2, loss=MSE, optimizer=OPTIMIZERS["groups"], **PLAIN) as pipe:
        run(pipe, data)
        pipe.checkpoint(tmp_path / "run")
    with fxpipe.compile(make("mlp", 0, 1)[0], 2, loss=MSE, optimizer=ADAMW, **PLAIN) as pipe:
        run(pipe, data[:1])
        with pytest.raises(fxpipe.CheckpointError, match="had different 'weight_decay'"):
            pipe.restore(tmp_path / "run")


def test_one_without_an_optimizer_is_not_for_a_pipe_with_one(tmp_path: Path) -> None:
    model, data = make("mlp", 1, 4)
    with fxpipe.compile(model, 2, loss=MSE, microbatches=2, tracer="symbolic") as pipe:
        run(pipe, data)
        pipe.checkpoint(tmp_path / "run")
    refuse(tmp_path / "run", "made by a pipe without an optimizer")


def test_files_that_are_no_whole_checkpoint_are_refused(trained: Path, tmp_path: Path) -> None:
    content, other = trained.read_bytes(), tmp_path / "other"
    for length in (0, 5, 200, len(content) // 2, len(content) - 1):
        other.write_bytes(content[:length])
        refuse(other, "is no checkpoint, or not all of one")
    refuse(tmp_path / "missing", "cannot read the checkpoint")
    refuse(tmp_path, "cannot read the checkpoint")
    torch.save(make("mlp", 0, 1)[0].state_dict(), other)
    refuse(other, "is no checkpoint, or not all of one")
    save_file({"x": torch.ones(2)}, other)
    refuse(other, "holds tensors, but no checkpoint")
    with safetensors.safe_open(trained, framework="pt") as file:
        header = json.loads(file.metadata()["fxpipe"])
    tensors = load_file(trained)
    newer = {"format": FORMAT + 1, "content": {}}
    save_file(tensors, other, {"fxpipe": json.dumps(newer)})
    refuse(other, f"has format {FORMAT + 1}, and this fxpipe reads those up to {FORMAT}")
    for damaged in ("{", "[]", "{}", json.dumps({"format": 1, "content": {}})):
        save_file(tensors, other, {"fxpipe": damaged})
        refuse(other, "is damaged")
    generator = random.Random(0)
    for name in generator.sample(sorted(tensors), 5):
        save_file(
            {n: t for n, t in tensors.items() if n != name}, other, {"fxpipe": json.dumps(header)}
        )
        refuse(other, "is damaged")


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    model, data = make("mlp", 2, 4)
    with fxpipe.compile(model, 2, loss=MSE, optimizer=OPTIMIZERS["own"], **PLAIN) as pipe:
        run(pipe, data)
        pipe.checkpoint(tmp_path / "run")
        before = (tmp_path / "run").read_bytes()
        with pytest.raises(fxpipe.CheckpointError, match="cannot write the checkpoint"):
            pipe.checkpoint(tmp_path / "missing" / "run")
        for optimizer in pipe.optimizers:
            assert optimizer is not None
            optimizer.param_groups[0]["k"] = object()
        with pytest.raises(fxpipe.CheckpointError, match="k is a object, which a checkpoint"):
            pipe.checkpoint(tmp_path / "run")
    assert (tmp_path / "run").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_closed_pipe_restores_nothing(trained: Path) -> None:
    pipe = fxpipe.compile(make("mlp", 0, 1)[0], 1, loss=MSE)
    pipe.close()
    with pytest.raises(fxpipe.InputError, match="the pipe is closed"):
        pipe.restore(trained)

"""Which files a pipe writes and goes on from: none that do not fit, which change nothing."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import fxpipe
from examples.unet import UNet
from fxpipe.extensions.checkpoint import file as checkpoint
from fxpipe.extensions.checkpoint.content import as_held, encode
from fxpipe.extensions.checkpoint.file import FORMAT
from tests.helpers.checkpoints import PLAIN, Left, make, run, same
from tests.helpers.overlapping import ADAMW, OPTIMIZERS, SGD
from tests.helpers.profiles import LEVELS
from tests.oracles.delayed_loop import MSE, Factory

pytestmark = pytest.mark.smoke


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


def test_a_refused_checkpoint_leaves_a_run_as_it_was(tmp_path: Path) -> None:
    model, data = make("mlp", 8, 4)
    options: dict[str, Any] = {**PLAIN, "optimizer": SGD}
    with fxpipe.compile(make("mlp", 0, 1)[0], 2, loss=MSE, **options) as pipe:
        losses = run(pipe, data)
        torch.manual_seed(0)
        expected = Left.by(pipe, losses)
    with fxpipe.compile(UNet(channels=1, base=4, depth=LEVELS), 2, loss=MSE, **options) as pipe:
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
        r"holds the state of AdamW, and the pipe trains with SGD",
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
        with pytest.raises(fxpipe.CheckpointError, match="has 1 parameter groups"):
            pipe.restore(tmp_path / "run")


def test_one_without_an_optimizer_is_not_for_a_pipe_with_one(tmp_path: Path) -> None:
    model, data = make("mlp", 1, 4)
    with fxpipe.compile(model, 2, loss=MSE, microbatches=2) as pipe:
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
    save_file({"x": torch.ones(2)}, other)
    refuse(other, "is no checkpoint, or not all of one")
    torch.save(make("mlp", 0, 1)[0].state_dict(), other)
    refuse(other, "holds tensors, but no checkpoint")
    torch.save({"fxpipe": FORMAT + 1}, other)
    refuse(other, f"has format {FORMAT + 1}, and this fxpipe reads format {FORMAT}")
    whole = torch.load(trained)
    for name in whole.keys() - {"fxpipe"}:
        torch.save({key: value for key, value in whole.items() if key != name}, other)
        refuse(other, "is damaged|made by a pipe without an optimizer|it has no parameter")


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_code_in_a_file_does_not_run(tmp_path: Path) -> None:
    torch.save({"fxpipe": FORMAT, "extra": Evil(tmp_path / "ran")}, tmp_path / "evil")
    refuse(tmp_path / "evil", "is no checkpoint, or not all of one .*Weights only load failed")
    assert not (tmp_path / "ran").exists()


@given(place=st.integers(0, 2**30), bit=st.integers(0, 7))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_flipped_bit_is_noticed_or_changes_nothing(
    place: int, bit: int, trained: Path, tmp_path: Path
) -> None:
    """Some bits of a zip file mean nothing, as those that pad it."""
    expected = encode(checkpoint.read_checkpoint(trained), as_held)
    content = bytearray(trained.read_bytes())
    content[place % len(content)] ^= 1 << bit
    (tmp_path / "flipped").write_bytes(content)
    try:
        found = checkpoint.read_checkpoint(tmp_path / "flipped")
    except fxpipe.CheckpointError:
        return
    assert same(encode(found, as_held), expected)


def test_a_flipped_bit_in_a_tensor_is_noticed(trained: Path) -> None:
    weight = checkpoint.read_checkpoint(trained).parameters["2.0.weight"].detach().numpy().tobytes()
    content = bytearray(trained.read_bytes())
    content[content.index(weight) + 17] ^= 4
    trained.write_bytes(content)
    refuse(trained, "the checksum of its .* is another")


def test_checksums_and_tensors_are_of_one_file_whatever_takes_its_place_meanwhile(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = checkpoint.read_checkpoint(trained)
    zeros = {name: torch.zeros_like(value) for name, value in saved.parameters.items()}
    other = copy.copy(saved)
    object.__setattr__(other, "parameters", zeros)
    checkpoint.write_checkpoint(other, tmp_path / "other")
    load = torch.load

    def replaced_before(*args: Any, **kwargs: Any) -> Any:
        (tmp_path / "other").replace(trained)
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", replaced_before)
    found = checkpoint.read_checkpoint(trained)
    assert same(found.parameters, saved.parameters)


def while_writing(monkeypatch: pytest.MonkeyPatch, do: Callable[[Path], None]) -> None:
    """Let something happen once in the middle of the next writing."""
    save = torch.save

    def writing(content: Any, path: Path) -> None:
        monkeypatch.setattr(torch, "save", save)
        save(content, path)
        do(path)

    monkeypatch.setattr(torch, "save", writing)


def test_of_two_writers_at_once_both_succeed(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, path = checkpoint.read_checkpoint(trained), tmp_path / "both"
    object.__setattr__(saved, "extra", "second")
    second = copy.deepcopy(saved)
    object.__setattr__(saved, "extra", "first")
    seen = []

    def write_too(unfinished: Path) -> None:
        checkpoint.write_checkpoint(second, path)
        seen.append(checkpoint.read_checkpoint(path).extra)

    while_writing(monkeypatch, write_too)
    checkpoint.write_checkpoint(saved, path)
    assert [*seen, checkpoint.read_checkpoint(path).extra] == ["second", "first"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["both", "run"]


@pytest.mark.parametrize(("shared", "mode"), [(False, 0o600), (True, 0o640)])
def test_only_the_user_may_read_it_unless_the_umask_counts_and_a_link_stays(
    shared: bool, mode: int, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = checkpoint.read_checkpoint(trained)
    link = tmp_path / "link"
    (tmp_path / "elsewhere").mkdir()
    link.symlink_to(tmp_path / "elsewhere" / "run")
    around = []
    while_writing(monkeypatch, lambda path: around.append(path.parent.stat().st_mode & 0o777))
    before = os.umask(0o027)
    try:
        checkpoint.write_checkpoint(saved, link, shared=shared)
        checkpoint.write_checkpoint(saved, link, shared=shared)
    finally:
        os.umask(before)
    assert around == [0o750 if shared else 0o700]
    assert link.is_symlink()
    written = tmp_path / "elsewhere" / "run"
    assert not written.is_symlink()
    assert written.stat().st_mode & 0o777 == mode
    assert same(checkpoint.read_checkpoint(link).parameters, saved.parameters)


def endless() -> list[Any]:
    made: list[Any] = [1]
    made.append(made)
    return made


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (endless(), "extra holds itself"),
        ({"x": torch.eye(2).to_mkldnn()}, "extra/x is a tensor of a kind that .*_mkldnn"),
        ([torch.empty(2, device="meta")], "extra/0 is a tensor of a kind that .* on meta"),
        (10**5000, "extra is a int, which a checkpoint"),
        ({10**5000: 1}, "extra/.* is a int, which a checkpoint"),
    ],
    ids=["cycle", "mkldnn", "meta", "digits", "digits of a key"],
)
def test_what_a_file_cannot_hold_leaves_the_old_one(
    extra: Any, message: str, trained: Path, tmp_path: Path
) -> None:
    before = trained.read_bytes()
    with fxpipe.compile(make("mlp", 0, 1)[0], 2, loss=MSE, **PLAIN, optimizer=ADAMW) as pipe:
        pipe.restore(trained)
        with pytest.raises(fxpipe.CheckpointError, match=message):
            pipe.checkpoint(trained, extra=extra)
    assert trained.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_where_nothing_can_be_written_the_old_file_stays(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, before = checkpoint.read_checkpoint(trained), trained.read_bytes()

    def fails(name: str, number: int) -> None:
        def failing(*args: Any, **kwargs: Any) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(Path, name, failing)

    def refused(path: Path, message: str) -> None:
        with pytest.raises(fxpipe.CheckpointError, match=f"cannot write the.*{message}"):
            checkpoint.write_checkpoint(saved, path)
        assert trained.read_bytes() == before

    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "there is something that is not a file")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "there is something that is not a file")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    refused(tmp_path / "circle", "there is something that is not a file")
    refused(tmp_path / ("x" * 300), os.strerror(errno.ENAMETOOLONG))
    refused(tmp_path / "run" / "in a file", os.strerror(errno.ENOTDIR))
    refused(tmp_path / "no\0name", "null")
    longest = tmp_path / ("x" * 255)
    checkpoint.write_checkpoint(saved, longest)
    while_writing(monkeypatch, lambda path: fails("replace", errno.EACCES))
    refused(trained, os.strerror(errno.EACCES))
    while_writing(monkeypatch, lambda path: fails("chmod", errno.EPERM))
    refused(trained, os.strerror(errno.EPERM))
    fails("mkdir", errno.EROFS)
    refused(trained, os.strerror(errno.EROFS))
    names = sorted(["circle", "folder", "pipe", "run", longest.name])
    assert sorted(each.name for each in tmp_path.iterdir()) == names


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    model, data = make("mlp", 2, 4)
    with fxpipe.compile(model, 2, loss=MSE, optimizer=OPTIMIZERS["own"], **PLAIN) as pipe:
        run(pipe, data)
        pipe.checkpoint(tmp_path / "run")
        before = (tmp_path / "run").read_bytes()
        with pytest.raises(fxpipe.CheckpointError, match="cannot write the checkpoint"):
            pipe.checkpoint(tmp_path / "missing" / "run")
        pipe.optimizer.param_groups[0]["k"] = object()
        with pytest.raises(fxpipe.CheckpointError, match="k is a object, which a checkpoint"):
            pipe.checkpoint(tmp_path / "run")
    assert (tmp_path / "run").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_closed_pipe_restores_nothing(trained: Path) -> None:
    pipe = fxpipe.compile(make("mlp", 0, 1)[0], 1, loss=MSE)
    pipe.close()
    with pytest.raises(fxpipe.InputError, match="the pipe is closed"):
        pipe.restore(trained)

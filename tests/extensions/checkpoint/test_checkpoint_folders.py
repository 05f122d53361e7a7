"""Checkpoints as folders: plain torch reads them, any pipe goes on from them, and what is not whole
is refused and changes nothing."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import signal
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save

import fxpipe
from fxpipe.extensions.checkpoint import folder as checkpoint_folder
from fxpipe.runtime.group import Group
from tests.helpers.checkpoints import PLAIN, Left, everything, make, run, same
from tests.helpers.overlapping import ADAMW, SGD
from tests.helpers.ranks import CONTEXT, DEADLINE
from tests.oracles.delayed_loop import MSE


def compiled(devices: int = 2, optimizer: Any = ADAMW, **options: Any) -> fxpipe.Pipeline:
    model = make("mlp", 0, 1)[0]
    return fxpipe.compile(model, devices, loss=MSE, optimizer=optimizer, **{**PLAIN, **options})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of three batches of the MLP."""
    path = tmp_path_factory.mktemp("written") / "run"
    with compiled() as pipe:
        run(pipe, make("mlp", 3, 4)[1])
        pipe.save(path, extra={"epoch": 3, "seen": torch.arange(4)})
    return path


@pytest.fixture
def trained(tmp_path: Path, written: Path) -> Path:
    return shutil.copytree(written, tmp_path / "run")


def plainly(act: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Call one of torch's functions, which warns that one process alone calls it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        act(*args, **options)


# what a folder holds


class Several(nn.Module):
    """A tied weight, buffers that are written and not written by a state dict, and more dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.register_buffer("turn", torch.tensor([1 + 2j, 3j]))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.norm(self.first(x)))) * self.scale.float()
        return out


@pytest.mark.smoke
def test_plain_torch_reads_a_folder_by_the_names_of_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, fresh = Several(), Several()
    data = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(3)]
    with fxpipe.compile(model, 2, loss=MSE, optimizer=ADAMW, **PLAIN) as pipe:
        run(pipe, data)
        pipe.save(tmp_path / "run", extra={"seen": torch.arange(4)})
        moments: dict[Any, Tensor] = {p: own["exp_avg"] for p, own in pipe.optimizer.state.items()}
    plainly(dcp_to_torch_save, tmp_path / "run", tmp_path / "run.pt")
    found = torch.load(tmp_path / "run.pt", weights_only=True)
    assert found["model"].keys() == model.state_dict().keys()
    fresh.load_state_dict(found["model"])
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
    for name, parameter in model.named_parameters():
        assert torch.equal(found["optimizer"][name]["exp_avg"], moments[parameter]), name
    assert found["buffers"].keys() == {"passing"}
    assert found["older"].keys() == {"2"}
    assert torch.equal(found["extra"]["seen"], torch.arange(4))


OTHERS = [
    (1, {"schedule": "gpipe"}),
    (2, {"schedule": "zb-h1"}),
    (3, {"schedule": "1f1b"}),
    (2, {"schedule": "interleaved-1f1b"}),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("devices", "options"), OTHERS)
def test_a_run_of_four_stages_goes_on_with_other_stages_and_schedules(
    devices: int, options: dict[str, Any], tmp_path: Path
) -> None:
    data = make("mlp", 6, 8)[1]
    with compiled(4, schedule="1f1b") as pipe:
        losses = run(pipe, data[:3])
        pipe.save(tmp_path / "run")
        torch.manual_seed(5)
        whole = Left.by(pipe, losses + run(pipe, data[3:]))
    with compiled(devices, **options) as pipe:
        pipe.load(tmp_path / "run")
        torch.manual_seed(5)
        Left.by(pipe, losses + run(pipe, data[3:])).assert_same(whole)


class Coarse(torch.optim.Optimizer):
    """Keeps a sum in another dtype than the parameter's, a list, numbers, and None."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "warm": torch.tensor(2.0)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                own = self.state[p]
                if not own:
                    zeros = torch.zeros_like(p, dtype=torch.bfloat16)
                    own |= {"sum": zeros, "last": [zeros.clone(), 0.5], "count": 0, "spare": None}
                own["sum"] += p.grad.bfloat16()
                own["last"][0].copy_(p.grad)
                own["count"] += 1
                p.sub_(own["sum"].double() * group["lr"] / group["warm"] / own["count"])


def test_whatever_an_optimizer_keeps_comes_back(tmp_path: Path) -> None:
    def kept(pipe: fxpipe.Pipeline) -> Mapping[str, Any]:
        names: dict[Any, str] = {own: name for name, own in pipe.named_parameters()}
        return {names[p]: dict(own) for p, own in pipe.optimizer.state.items()}

    data = make("mlp", 3, 4)[1]
    with compiled(3, Coarse, schedule="1f1b") as pipe:
        run(pipe, data)
        pipe.save(tmp_path / "run")
        expected = copy.deepcopy(kept(pipe))
        losses = run(pipe, data)
    with compiled(2, Coarse, schedule="1f1b") as pipe:
        pipe.prepare(data[0][0], target=data[0][1])
        pipe.load(tmp_path / "run")
        found = kept(pipe)
        assert same(found, expected)
        assert found["0.0.weight"]["sum"].dtype is torch.bfloat16
        assert found["0.0.weight"]["spare"] is None
        assert run(pipe, data) == losses


def test_only_the_tensors_of_wanted_parameters_are_read(trained: Path) -> None:
    whole = checkpoint_folder.read(trained)
    part = checkpoint_folder.read(trained, own={"0.0.weight"})
    assert part.optimizer is not None and whole.optimizer is not None
    for name, value in whole.parameters.items():
        found = part.parameters[name], part.optimizer.parameters[name].state["exp_avg"]
        expected = value, whole.optimizer.parameters[name].state["exp_avg"]
        for one, other in zip(found, expected, strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert one.is_meta if name != "0.0.weight" else torch.equal(one, other)
    assert torch.equal(part.random, whole.random)
    assert same(part.extra, whole.extra)


# what is refused


def refuse(path: Path, message: str, **options: Any) -> None:
    """Loading is refused, and changes nothing."""
    scaler = torch.amp.GradScaler("cpu")
    with compiled(**options) as pipe:
        run(pipe, make("mlp", 1, 4)[1])
        before = everything(pipe, scaler)
        with pytest.raises(fxpipe.CheckpointError, match=message):
            pipe.load(path)
        assert same(everything(pipe, scaler), before)


def test_what_is_no_folder_of_a_pipe_is_refused(trained: Path, tmp_path: Path) -> None:
    refuse(tmp_path / "missing", "cannot read the checkpoint .*missing': it is no folder with a fi")
    refuse(tmp_path, "it is no folder with a file '.metadata'")
    refuse(tmp_path / ("long" * 99), "cannot read the checkpoint .*File name too long")
    (tmp_path / "file").touch()
    refuse(tmp_path / "file", r"pipe.restore\(\) reads the files of pipe.checkpoint\(\)")
    foreign = FileSystemWriter(tmp_path / "foreign")
    plainly(save, {"model": {"x": torch.ones(2)}}, storage_writer=foreign, no_dist=True)
    refuse(tmp_path / "foreign", r"foreign' was not written by pipe.save\(\)")
    refuse(trained, "holds the state of AdamW, and the pipe trains with SGD", optimizer=SGD)


def test_one_of_another_fxpipe_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with compiled() as pipe, monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, "FORMAT", checkpoint_folder.FORMAT + 1)
        pipe.save(tmp_path / "run")
    refuse(tmp_path / "run", "has format 5, and this fxpipe reads format 4")


def test_one_of_another_model_names_the_first_tensor_that_differs(trained: Path) -> None:
    deeper = make("mlp", 0, 1)[0]
    assert isinstance(deeper, nn.Sequential)
    with (
        fxpipe.compile(deeper[:3], 2, loss=MSE, optimizer=ADAMW, **PLAIN) as pipe,
        pytest.raises(fxpipe.CheckpointError, match=r"parameter '3.0.weight' is none of the pipe"),
    ):
        pipe.load(trained)


@given(place=st.integers(0, 2**30), bit=st.integers(0, 7), which=st.integers(0, 1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_flipped_bit_is_noticed_or_changes_no_tensor(
    place: int, bit: int, which: int, trained: Path, tmp_path: Path
) -> None:
    """Some bits of a folder mean nothing, as those that pad a zip file."""
    expected = checkpoint_folder.read(trained)
    shutil.rmtree(tmp_path / "flipped", ignore_errors=True)
    shutil.copytree(trained, tmp_path / "flipped")
    file = sorted((tmp_path / "flipped").iterdir())[which]
    content = bytearray(file.read_bytes())
    content[place % len(content)] ^= 1 << bit
    file.write_bytes(content)
    try:
        found = checkpoint_folder.read(tmp_path / "flipped")
    except fxpipe.CheckpointError:
        return
    assert same(
        [vars(found.history), found.parameters], [vars(expected.history), expected.parameters]
    )
    assert same([found.random, found.extra], [expected.random, expected.extra])
    assert found.optimizer is not None and expected.optimizer is not None
    for name, own in expected.optimizer.parameters.items():
        assert same(found.optimizer.parameters[name].state, own.state)


def test_a_flipped_bit_in_a_tensor_is_noticed(trained: Path) -> None:
    weight = checkpoint_folder.read(trained).parameters["2.0.weight"].numpy().tobytes()
    file = trained / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[content.index(weight) + 17] ^= 4
    file.write_bytes(content)
    refuse(trained, r"the checksum of 'model.2.0.weight' is another")


def test_a_folder_that_is_not_whole_is_refused(trained: Path) -> None:
    file = trained / "__0_0.distcp"
    content = file.read_bytes()
    for length in (0, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        refuse(trained, "is damaged, or not all of a checkpoint")
    file.unlink()
    refuse(trained, "is damaged, or not all of a checkpoint .*__0_0.distcp")
    (trained / ".metadata").write_bytes(b"")
    refuse(trained, "is damaged, or not all of a checkpoint")


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_code_in_a_folder_does_not_run(trained: Path, tmp_path: Path) -> None:
    (trained / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    refuse(trained, "it holds a posix.mkdir")
    writer = FileSystemWriter(tmp_path / "inner")
    values = {"fxpipe": {"0": {"header": Evil(tmp_path / "ran"), "crc32": 0}}}
    plainly(save, values, storage_writer=writer, no_dist=True)
    refuse(tmp_path / "inner", r"was not written by pipe.save\(\)")
    assert not (tmp_path / "ran").exists()


# writing


def test_a_folder_is_replaced_whole_and_leaves_nothing_else(trained: Path) -> None:
    with compiled() as pipe:
        extra = pipe.load(trained)
        assert (extra["epoch"], pipe.batches) == (3, 3)
        run(pipe, make("mlp", 1, 4)[1])
        pipe.save(trained, extra="next")
        assert pipe.load(str(trained)) == "next"
        assert pipe.batches == 4
    assert "run" in [each.name for each in trained.parent.iterdir()]


@pytest.mark.parametrize(("shared", "modes"), [(False, {0o700, 0o600}), (True, {0o750, 0o640})])
def test_only_the_user_may_read_it_unless_the_umask_counts(
    shared: bool, modes: set[int], trained: Path, tmp_path: Path
) -> None:
    before = os.umask(0o027)
    try:
        with compiled() as pipe:
            pipe.load(trained)
            for _ in range(2):
                pipe.save(tmp_path / "other", shared=shared)
                pipe.checkpoint(tmp_path / "file", shared=shared)
    finally:
        os.umask(before)
    written = [tmp_path / "other", tmp_path / "file", *(tmp_path / "other").iterdir()]
    found = {(path.is_dir(), path.stat().st_mode & 0o777) for path in written}
    assert found == {(mode in (0o700, 0o750), mode) for mode in modes}
    assert len(written) >= 4


def killed(trained: Path, where: str) -> None:
    """Die while a folder is written, in a process of its own."""

    def kill(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    saved = checkpoint_folder.read(trained)
    owner, name = (checkpoint_folder.Writer, "finish") if where == "written" else (Path, "replace")
    setattr(owner, name, kill)
    checkpoint_folder.write(saved, saved.parameters, trained, Group())


@pytest.mark.parametrize("where", ["written", "moved away"])
def test_a_killed_writer_leaves_the_old_one(where: str, trained: Path) -> None:
    before = checkpoint_folder.read(trained)
    process = CONTEXT.Process(target=killed, args=(trained, where))
    process.start()
    process.join(DEADLINE)
    assert process.exitcode == -signal.SIGKILL
    assert trained.exists() == (where == "written")
    after = checkpoint_folder.read(trained)
    assert same(after.parameters, before.parameters)
    assert same(after.extra, before.extra)
    checkpoint_folder.write(after, after.parameters, trained, Group())
    assert "run" in [each.name for each in trained.parent.iterdir()]
    assert same(checkpoint_folder.read(trained).parameters, before.parameters)


def test_a_folder_with_other_files_is_left_alone(trained: Path, tmp_path: Path) -> None:
    (trained / "notes.txt").touch()
    (tmp_path / "file").touch()
    with compiled() as pipe:
        with pytest.raises(fxpipe.CheckpointError, match=r"it holds 'notes.txt', which is no part"):
            pipe.save(trained)
        with pytest.raises(fxpipe.CheckpointError, match="there is something that is not a folder"):
            pipe.save(tmp_path / "file")
        (tmp_path / "empty").mkdir()
        pipe.save(tmp_path / "empty")
    assert (trained / "notes.txt").exists()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["empty", "file", "run"]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_where_it_cannot_be_written_the_old_one_stays(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = checkpoint_folder.read(trained)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with compiled() as pipe:
        for where, name in ((Path, "replace"), (Path, "mkdir"), (FileSystemWriter, "write_data")):
            with monkeypatch.context() as patch:
                patch.setattr(where, name, full)
                with pytest.raises(fxpipe.CheckpointError, match=r"cannot write .*No space left"):
                    pipe.save(trained)
        with pytest.raises(fxpipe.CheckpointError, match="extra/seen is a set, which"):
            pipe.save(trained, extra={"seen": {1}})
        with pytest.raises(fxpipe.CheckpointError, match=r"extra/x is a tensor of .* on meta"):
            pipe.save(trained, extra={"x": torch.empty(2, device="meta")})
        quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        with pytest.raises(fxpipe.CheckpointError, match=r"extra/x is a tensor of .*qint8"):
            pipe.save(trained, extra={"x": quantised})
        with pytest.raises(fxpipe.CheckpointError, match="cannot write"):
            pipe.save(tmp_path / "missing" / "run")
    assert same(checkpoint_folder.read(trained).parameters, before.parameters)
    assert [each.name for each in tmp_path.iterdir()] == ["run"]

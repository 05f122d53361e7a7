"""What replicas share besides gradients: draws, statistics, checkpoints, and failures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from tests.extensions.ranks.test_replicas import OPTIMIZERS, Model, batch, looped, pipe_of
from tests.helpers.one_optimizer import made_by
from tests.helpers.profiles import deep
from tests.helpers.ranks import DeviceMesh, on_ranks, shared_folder

Devices = DeviceMesh | int


class Noisy(nn.Module):
    """A BatchNorm of the inputs, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.second = nn.Sequential(nn.Flatten(), nn.Linear(10, 16), nn.Tanh())
        self.third = nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.third(self.second(self.norm(x)))
        return out


def noisy(devices: Devices, replicas: list[int], microbatches: int) -> dict[str, Any]:
    """The losses and statistics of a few steps on the batches of some replicas, and an output."""
    found: dict[str, Any] = {}
    for schedule in ("1f1b", *deep("2bw")):
        torch.manual_seed(0)
        with fxpipe.compile(
            Noisy(),
            devices,
            schedule=schedule,
            microbatches=microbatches,
            loss=F.mse_loss,
            optimizer=OPTIMIZERS["sgd"],
            partition=["third"],
            extensions=["deferred_batchnorm"],
        ) as pipe:
            torch.manual_seed(5 + replicas[0])  # the draws of the first rank count
            for step in range(3):
                parts = [batch(step, replica) for replica in replicas]
                x, y = (torch.cat(each) for each in zip(*parts, strict=True))
                found[f"{schedule} {step}"] = pipe.step(x, target=y).clone()
            pipe.flush()
            found |= {f"{schedule} {k}": v for k, v in pipe.state_dict(full=True).items()}
            pipe.eval()
            found[f"{schedule} out"] = pipe(batch(9, replicas[0])[0])
    return found


def noisy_on_ranks(mesh: DeviceMesh) -> dict[str, Any]:
    return noisy(mesh, [mesh["dp"].get_local_rank()], 4)


def test_draws_and_deferred_statistics_are_those_of_one_loop_over_all_batches() -> None:
    expected = noisy(2, [0, 1], 8)
    ranks = on_ranks(4, noisy_on_ranks, replicas=2)
    for rank, found in enumerate(ranks):
        for key, value in expected.items():
            if not key.endswith("out"):
                torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=key)
                assert torch.equal(found[key], ranks[0][key])
        if rank < 2:
            torch.testing.assert_close(found["1f1b out"], expected["1f1b out"])
    assert not torch.allclose(ranks[0]["1f1b out"], ranks[2]["1f1b out"])


class Alternating:
    """Batches of two replicas, the second of which has two lengths in turn; and their loop."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

    def batch(self, step: int, replica: int) -> Tensor:
        length = 5 + replica * (step % 2)
        return torch.randn(4, length, 2, generator=torch.Generator().manual_seed(step))

    def losses(self, steps: int) -> list[float]:
        optimizer, found = torch.optim.SGD(self.model.parameters(), lr=0.1), []
        for step in range(steps):
            parts = [part for r in (0, 1) for part in self.batch(step, r).split(2)]
            loss = torch.stack([F.mse_loss(self.model(x), x) for x in parts]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found


def alternating(mesh: DeviceMesh) -> list[float]:
    """The losses."""
    beside, replica = Alternating(), mesh.get_local_rank("dp")
    options: dict[str, Any] = {"microbatches": 2, "loss": F.mse_loss}
    options["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    with fxpipe.compile(beside.model, mesh, **options) as pipe:
        losses = []
        for step in range(6):
            x = beside.batch(step, replica)
            losses.append(float(pipe.step(x, target=x)))
        return losses


def test_replicas_of_which_one_alternates_between_shapes_go_on() -> None:
    expected = Alternating().losses(6)
    for losses in on_ranks(2, alternating, replicas=2, timeout=20):
        torch.testing.assert_close(losses, expected)


class Longer(nn.Module):
    """Drops something out of long inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(F.dropout(x) if x.shape[1] > 5 else x)
        return out


def drawing_apart(mesh: DeviceMesh) -> tuple[str, int]:
    """What a rank is told where one replica alone draws random numbers, and how many steps count
    after another one in which none does."""
    torch.manual_seed(0)
    with fxpipe.compile(Longer(), mesh, microbatches=2, loss=F.mse_loss) as pipe:
        short, long = torch.ones(4, 5, 2), torch.ones(4, 6, 2)
        pipe.step(short, target=short)
        x = long if mesh.get_local_rank("dp") else short
        with pytest.raises(fxpipe.RankError) as raised:
            pipe.step(x, target=x)
        pipe.step(short, target=short)
        return str(raised.value), pipe.batches


def test_replicas_of_which_one_alone_draws_random_numbers_are_refused() -> None:
    for told, batches in on_ranks(2, drawing_apart, replicas=2, timeout=20):
        assert "'the model draws random numbers: False' on rank 0" in told
        assert batches == 2


class Exiting(SystemExit):
    """Told to end."""


def broken(mesh: DeviceMesh, where: str, shards: bool) -> list[float]:
    """The losses after a first step in which the first rank alone is interrupted at some place."""

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        if where == "optimizer" and alone:
            alone.pop()
            raise Exiting
        return torch.optim.SGD(parameters, lr=0.1)

    def agree(about: str, *args: Any, **kwargs: Any) -> Any:
        if where == "comparison" and about == "what replicas train" and alone:
            alone.pop()
            raise Exiting
        return real(about, *args, **kwargs)

    beside = Alternating()
    alone = [mesh.get_rank()] if mesh.get_rank() == 0 else []
    options: dict[str, Any] = {"microbatches": 2, "loss": F.mse_loss}
    options["extensions"] = [fxpipe.Replicas(shard_optimizer=shards)]
    x = beside.batch(0, 0)
    example = (x,), {"target": x}
    with fxpipe.compile(beside.model, mesh, optimizer=sgd, example=example, **options) as pipe:
        group: Any = pipe._group
        real = group.agree
        group.agree = agree
        with pytest.raises((Exiting, fxpipe.RankError)):
            pipe.step(x, target=x)
        replica = mesh.get_local_rank("dp")
        batches = [beside.batch(step, replica) for step in range(2)]
        return [float(pipe.step(x, target=x)) for x in batches]


@pytest.mark.parametrize(
    ("where", "shards"),
    [("optimizer", True), *deep(("comparison", True), ("optimizer", False), ("comparison", False))],
)
def test_a_first_step_that_one_rank_leaves_while_replicas_are_compared_is_made_again(
    where: str, shards: bool
) -> None:
    expected = Alternating().losses(2)
    for losses in on_ranks(2, broken, where, shards, replicas=2, timeout=600):
        torch.testing.assert_close(losses, expected)


def continued(
    mesh: DeviceMesh, load: str | None, save: str | None, steps: tuple[int, int], schedule: str
) -> dict[str, Any]:
    """The state after some steps, from one checkpoint and to another."""
    replica = mesh["dp"].get_local_rank()
    with pipe_of(mesh, schedule=schedule, optimizer=OPTIMIZERS["adamw"]) as pipe:
        x, y = batch(0, replica)
        pipe.prepare(x, target=y)
        return go_on(pipe, replica, load, save, steps)


def go_on(
    pipe: fxpipe.Pipeline,
    replica: int,
    load: Path | str | None,
    save: Path | str | None,
    steps: tuple[int, int],
) -> dict[str, Any]:
    """Train a pipe for some steps, from one checkpoint and to another. Returns its state."""
    if load is not None:
        pipe.load(load)
    for step in range(*steps):
        x, y = batch(step, replica)
        pipe.step(x, target=y)
    pipe.flush()
    if save is not None:
        pipe.save(save)
    state: dict[str, Any] = pipe.state_dict(full=True)
    return state


def test_checkpoints_go_from_any_replicas_and_devices_to_any_others(tmp_path: Path) -> None:
    first = on_ranks(4, continued, None, tmp_path / "a", (0, 3), "2bw", replicas=2)
    assert len([*(tmp_path / "a").glob("*.distcp")]) == 2
    again = on_ranks(2, continued, tmp_path / "a", tmp_path / "b", (3, 5), "2bw", replicas=2)
    expected = looped(2, "adamw", 5, schedule="2bw")
    with fxpipe.compile(Model(), 1, loss=F.mse_loss, optimizer=OPTIMIZERS["adamw"]) as pipe:
        pipe.load(tmp_path / "b")
        assert pipe.batches == 5
        alone = pipe.state_dict()
    for found in (*again, alone):
        for key, value in found.items():
            assert torch.equal(value, expected[key]), key
    assert all(torch.equal(first[0][key], first[3][key]) for key in first[0])


class Broken(Exception):
    """Raised in one replica."""


def breaking(breaks: Callable[[], bool]) -> Callable[[Any], torch.optim.Optimizer]:
    """Makes optimizers whose step raises ``Broken`` while something holds."""

    class Breaking(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if breaks():
                raise Broken("here")
            super().step()

    return lambda parameters: Breaking(parameters, lr=0.05, momentum=0.9)


def failing(mesh: DeviceMesh) -> dict[str, Any]:
    """What a rank is told of failures in the second replica, and how all go on from a folder."""
    replica, device = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    told: dict[str, Any] = {}
    for schedule in ("1f1b", "2bw"):
        step, breaks = 0, False
        optimizer = breaking(lambda: breaks and (replica, device) == (1, 1))  # noqa: B023
        with pipe_of(mesh, schedule=schedule, optimizer=optimizer) as pipe:
            while pipe.batches < 6:
                if step == 3:
                    pipe.save(shared_folder() / schedule)
                breaks, step = step == 3, step + 1
                x, y = batch(pipe.batches, replica)
                try:
                    pipe.step(x, target=y)
                    if step == 4:
                        pipe.flush()
                except fxpipe.ExecutionError as error:
                    with pytest.raises(fxpipe.EndedError):
                        pipe.step(x, target=y)
                    pipe.load(shared_folder() / schedule)
                    told[schedule] = str(error), pipe.batches
            pipe.flush()
            told[f"{schedule} state"] = pipe.state_dict(full=True)
    return told


def exiting(mesh: DeviceMesh) -> tuple[str, str]:
    """What a rank is told where the optimizer of another exits in the first step, and of a retry
    from a checkpoint that was saved before."""
    replica, leaves = mesh.get_local_rank("dp"), False

    class Leaving(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if leaves and replica:
                raise SystemExit(3)
            super().step()

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return Leaving(parameters, lr=0.05, momentum=0.9)

    x, y = batch(0, replica)
    with pipe_of(mesh, schedule="1f1b", optimizer=optimizer, shards=True) as pipe:
        pipe.prepare(x, target=y)
        pipe.save(shared_folder() / "begin")
        leaves = any(made_by(pipe))  # after the trial steps
        with pytest.raises(fxpipe.ExecutionError) as raised:
            pipe.step(x, target=y)
        pipe.load(shared_folder() / "begin")
        leaves = False
        return type(raised.value).__name__, repr(float(pipe.step(x, target=y)))


def beginning_apart(mesh: DeviceMesh) -> str:
    """What a rank is told where replicas begin with other weights."""
    replica = mesh.get_local_rank("dp")
    torch.manual_seed(replica)
    x, y = batch(0, replica)
    with (
        fxpipe.compile(Model(), mesh, loss=F.mse_loss, microbatches=2) as pipe,
        pytest.raises(fxpipe.RankError, match="replicas train differs") as error,
    ):
        pipe.step(x, target=y)
    return str(error.value)


def test_replicas_begin_with_the_same_weights() -> None:
    for told in on_ranks(4, beginning_apart, replicas=2):
        assert "device 0 of replica 1" in told
        assert "first.bias: " in told


@pytest.mark.deep
def test_all_go_on_from_a_checkpoint_after_one_rank_has_left_its_first_step() -> None:
    (first, loss), (second, other) = on_ranks(2, exiting, replicas=2)
    assert (first, second) == ("RankError", "ExecutionError")
    assert loss == other


def test_after_a_failure_in_one_replica_all_go_on_from_a_checkpoint() -> None:
    ranks = on_ranks(4, failing, replicas=2)
    for schedule in ("1f1b", "2bw"):
        expected = looped(2, "sgd", 6, schedule=schedule)
        for rank, told in enumerate(ranks):
            message, batches = told[schedule]
            assert ("device 1 of replica 1" in message) == (rank != 3), message
            assert batches == 3
            for key, value in told[f"{schedule} state"].items():
                assert torch.equal(value, expected[key]), key

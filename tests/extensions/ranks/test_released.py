"""Over ranks, a model that was given with data trains as in one process, and each rank gives back
the memory of the parameters of other ranks' stages when it first runs."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import fxpipe
from fxpipe.compiler import options
from fxpipe.extensions.ranks.channels import RankChannels
from tests.helpers.failing import Beside, at, fail, pipe_of
from tests.helpers.hollow import (
    assert_same,
    batch,
    compiled,
    trained,
    with_data,
)
from tests.helpers.profiles import deep
from tests.helpers.ranks import DeviceMesh, on_ranks
from tests.helpers.tiny import batch as tiny_batch


def train(mesh: DeviceMesh, whole: int) -> dict[str, Any]:
    options.WHOLE = whole
    model = with_data()
    before = {name: (id(p), p.shape, p.requires_grad) for name, p in model.named_parameters()}
    with compiled(mesh, model) as pipe:
        assert not any(tensor.is_meta for tensor in model.parameters())  # compiled, but not run
        made = trained(pipe)
        made["full"] = pipe.state_dict(full=True)
    after = {name: (id(p), p.shape, p.requires_grad) for name, p in model.named_parameters()}
    assert after == before
    made["with data"] = {name for name, p in model.named_parameters() if not p.is_meta}
    assert not any(buffer.is_meta for buffer in model.buffers())
    model.load_state_dict(made["full"], assign=True)
    model.eval()
    made["by hand"] = model(batch()[0])
    return made


@pytest.mark.parametrize("whole", [0, *deep(options.WHOLE)])
def test_each_parameter_keeps_its_data_on_the_rank_that_trains_it_alone(whole: int) -> None:
    model = with_data()
    with compiled(2, model) as pipe:
        expected = trained(pipe)
        final = pipe.state_dict()
    model.eval()
    ranks = on_ranks(2, train, whole)
    names = [name for found in ranks for name in found["with data"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    for found in ranks:
        assert_same(found, expected)
        assert found["full"].keys() == final.keys()
        assert all(torch.equal(value, final[name]) for name, value in found["full"].items())
        torch.testing.assert_close(found["by hand"], model(batch()[0]))


def left(mesh: DeviceMesh) -> list[bool]:
    """Whether a model lives once its pipe is closed and dropped, while the pipe's group lives, as
    long as threads may still end its links; before and after."""
    model = with_data()
    pipe = compiled(mesh, model)
    x, y = batch()
    pipe.step(x, target=y)
    group: Any = pipe._group
    alive = weakref.ref(model)
    found = [alive() is not None]
    pipe.close()
    del model, pipe
    gc.collect()
    assert group.closed
    return [*found, alive() is not None]


def test_a_closed_pipe_lets_go_of_the_model_before_its_links_have_ended() -> None:
    assert on_ranks(2, left) == [[True, False]] * 2


def kept(mesh: DeviceMesh, schedule: str) -> tuple[int, int]:
    """The most values that a rank keeps at once of what it has sent in steps of 16 micro-batches,
    and how many of them it keeps at the end of the last one."""
    counts: list[int] = []
    keep = RankChannels.keep

    def counted(self: RankChannels, device: int, *what: Any) -> None:
        keep(self, device, *what)
        counts.append(len(self._sent[device]))

    RankChannels.keep = counted  # type: ignore[method-assign,assignment]
    with pipe_of(mesh, schedule=schedule, microbatches=16) as pipe:
        x, y = tiny_batch(32)
        for _ in range(4):
            pipe.step(x, target=y)
    return max(counts), counts[-1]


@pytest.mark.parametrize("schedule", ["2bw", *deep("1f1b")])
def test_what_was_sent_is_let_go_of_while_the_step_runs(schedule: str) -> None:
    for most, last in on_ranks(2, kept, schedule):
        assert 1 <= last <= most <= 8


def failing_often(mesh: DeviceMesh) -> list[tuple[int, int]]:
    """The threads and open files after each of some steps that fail and some that do not."""
    beside, here, found = Beside(mesh), mesh.get_local_rank(), []
    beside.step()
    for _ in range(4):
        x, y = beside.batch()
        with at(3 if here == 1 else -1, fail), pytest.raises(fxpipe.ExecutionError):
            beside.pipe.step(x, target=y)
        beside.step()
        gc.collect()
        found.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    beside.pipe.close()
    return found


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="Linux tells of threads there")
def test_groups_that_a_failure_has_ended_leave_no_threads_and_no_files() -> None:
    for found in on_ranks(2, failing_often):
        for first, last in zip(found[0], found[-1], strict=True):
            assert last <= first + 1, found  # a thread may be about to end


class Branches(nn.Module):
    """A second head, which only training reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.body(x))
        out: Tensor = self.head(x)
        return out + self.other(x) if self.training else out


def evaluate_first(devices: DeviceMesh | int) -> tuple[list[Tensor], list[set[str]]]:
    """Outputs and losses; which parameters have no data after the first call and at the end."""
    torch.manual_seed(0)
    model = Branches()
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    values, without = [], []
    with fxpipe.compile(
        model,
        devices,
        microbatches=2,
        loss=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        partition=["head"],
    ) as pipe:
        pipe.eval()
        with torch.no_grad():
            values.append(pipe(x))
        without.append({name for name, p in model.named_parameters() if p.is_meta})
        pipe.train()
        values += [pipe.step(x, target=y).clone() for _ in range(2)]
        pipe.eval()
        with torch.no_grad():
            values.append(pipe(x))
        without.append({name for name, p in model.named_parameters() if p.is_meta})
    return values, without


def test_a_parameter_keeps_its_data_until_a_stage_of_another_rank_reads_it() -> None:
    expected, nothing = evaluate_first(2)
    assert nothing == [set(), set()]
    (first, on_first), (second, on_second) = on_ranks(2, evaluate_first)
    for found in (first, second):
        assert all(map(torch.equal, found, expected))
    head, other, body = ({f"{n}.weight", f"{n}.bias"} for n in ("head", "other", "body"))
    assert on_first == [head, head | other]
    assert on_second == [body, body]


def again(mesh: DeviceMesh) -> tuple[list[float], str]:
    """The losses of two pipes over a model, one after the other, and what a third pipe says, which
    is cut elsewhere."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    x, y = torch.ones(8, 4), torch.ones(8, 2)
    losses: list[float] = []
    for cut in ("2", "2", "1"):
        with fxpipe.compile(
            model,
            mesh,
            microbatches=2,
            loss=F.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            partition=[cut],
        ) as pipe:
            try:
                losses += [float(pipe.step(x, target=y)) for _ in range(2)]
            except (fxpipe.InputError, fxpipe.RankError) as error:
                return losses, str(error)
    return losses, ""


def test_a_model_that_a_pipe_has_left_in_parts_is_compiled_again_with_the_same_cut() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.ones(8, 4), torch.ones(8, 2)
    expected = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses, told in on_ranks(2, again):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert "parameter '1.weight' has no data" in told
        assert "an earlier pipe over ranks left it to another rank" in told


class Heads(nn.Module):
    """A model with methods of its own, as those of transformers have ``generate``."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encode(x))
        return out

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        return self.forward(x).argmax(1)

    def norms(self) -> list[float]:
        return [float(parameter.norm()) for parameter in self.parameters()]

    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def refused(does: Callable[[], Any]) -> str:
    """What is said of a call; empty if it is done."""
    try:
        does()
    except fxpipe.InputError as error:
        return str(error)
    return ""


def asked_of_a_part(mesh: DeviceMesh) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x, found = Heads(), torch.ones(8, 4), {}
    whole = nn.ModuleList([model])
    for _ in range(2):
        pipe: Any = fxpipe.compile(model, mesh, microbatches=2, loss=F.mse_loss, partition=["head"])
        pipe.step(x, target=torch.ones(8, 2))
        found = {
            "state": refused(model.state_dict),
            "state of what holds it": refused(whole.state_dict),
            "state of a copy": refused(AveragedModel(pipe).state_dict),
            "generate": refused(partial(pipe.generate, x)),
            "norms": refused(pipe.norms),
            "encode": refused(partial(pipe.encode, x)),
            "body": refused(model.body.state_dict),
            "clip": refused(partial(nn.utils.clip_grad_norm_, model.parameters(), 1.0)),
            "size": pipe.size(),
            "own": sorted(pipe.state_dict()),
        }
        state = pipe.state_dict(full=True)
        pipe.load_state_dict(state)
        pipe.close()
    model.load_state_dict(state, assign=True)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    found["by hand"] = model.generate(x)
    return found


def test_a_model_in_parts_tells_what_to_call_in_place_of_what_needs_the_whole() -> None:
    first, second = on_ranks(2, asked_of_a_part)
    for found, lacks in ((first, "head.weight"), (second, "body.weight")):
        for key, prefix in (("state", ""), ("state of what holds it", "0.")):
            assert found[key].startswith(f"'{prefix}{lacks}' has no data in this process")
            for cure in ("pipe.save_hub(folder)", "pipe.save(folder)", "torch.save(state, file)"):
                assert cure in found[key]
        assert f"'module.{lacks}' has no data" in found["state of a copy"]
        for name in ("generate", "norms"):
            assert f"{name}() of the model computes with '{lacks}'" in found[name]
            assert f"and one of them plain.{name}(...)" in found[name]
        assert "clip_grad_norm_ would see the gradients of this process alone" in found["clip"]
        assert found["size"] == 4 * 4 + 4 + 4 * 2 + 2
        assert found["by hand"].shape == (8,)
    assert [first["own"], second["own"]] == [
        ["body.bias", "body.weight"],
        ["head.bias", "head.weight"],
    ]
    assert not first["encode"]
    assert not first["body"]
    assert "encode() of the model computes with 'body.weight'" in second["encode"]
    assert "'weight' has no data" in second["body"]

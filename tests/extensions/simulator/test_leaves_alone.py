"""A leaf module costs its own stage only: gradients are the loop's, in halves in every stage."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import PartitionError
from fxpipe.ir.called import calls_in
from fxpipe.kernels.graph import GraphKernel
from tests.leaf_modules.draws import seeded
from tests.oracles import loop

pytestmark = pytest.mark.models


class Squared(torch.autograd.Function):
    """Reads a number on the way back, as a kernel of one's own may: no graph holds it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * (1 if float(x.detach().sum()) > 0 else 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found: Tensor = 2 * x * gradient * (1 if float(x.sum()) > 0 else 2)
        return found


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Squared.apply(self.layer(x))  # type: ignore[no-untyped-call]
        return y


class Routed(nn.Module):
    """One of two experts for each micro-batch: the other has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts[int(x.sum() > 0)](x)
        return y


class Normed(nn.Module):
    """Writes buffers: statistics, and a count that it assigns anew."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        y: Tensor = self.norm(x) * (1 if self.count > 0 else 0)
        return y


class Counted(nn.Module):
    """Reads what it has written in place."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count.clone() * (1 if x.sum() > 0 else 2)


class Several(nn.Module):
    """Returns a tensor, an integer tensor, None, a detached tensor and one of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return y, {"at": y.argmax(1), "none": None}, (y.detach(), x.view_as(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.unsqueeze(0))[0]
        return y.squeeze(0)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.5, self.training)


LEAVES: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind for kind in (Custom, Routed, Normed, Several, Recurrent)
}


class Chain(nn.Module):
    """Layers, some of which are leaf modules, one after the other."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.first, self.parts, self.last = nn.Linear(8, 8), nn.ModuleList(parts), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for part in self.parts:
            y = part(x)
            if isinstance(y, tuple):
                y, found, (same, given) = y
                y = y + F.one_hot(found["at"], 8) + same + given
            x = torch.tanh(y)
        out: Tensor = self.last(x)
        return out


def assert_trains(
    model: nn.Module, leaves: Sequence[Any], *, rate: float = 0.0, **options: Any
) -> None:
    """Check two steps against the loop: losses, gradients and state to the bit, stages in graphs
    of their own, and halves in all of them if the schedule has halves. Then a call in eval mode."""
    alone = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=rate) for m in (model, alone))
    with fxpipe.compile(
        model,
        microbatches=4,
        loss=F.mse_loss,
        extensions=[fxpipe.LeafModules(*leaves)],
        optimizer=optimizer if rate else None,
        **options,
    ) as pipe:
        for rows in (8, 9):
            x, y = torch.randn(rows, 8), torch.randn(rows, 8)
            loss = pipe.step(x, target=y)
            other.zero_grad() if rate else None
            expected = loop.train(alone, 4, x, loss=F.mse_loss, target=y)
            other.step()
            assert torch.equal(loss, expected.loss)
            assert any(calls_in(stage.graph.graph.nodes) for stage in pipe.plan.stages)
            for stage in pipe.plan.stages:
                assert isinstance(stage.kernel, GraphKernel)
                assert (stage.input_grad is None) == ("zb" not in options.get("schedule", ""))
        if not rate:
            loop.assert_same(loop.gradients(model), loop.gradients(alone))
        loop.assert_same(model.state_dict(), alone.state_dict())
        for each in (pipe, alone):
            each.eval()
        with torch.no_grad():
            x = torch.randn(8, 8)
            assert torch.equal(pipe(x), torch.cat([alone(part) for part in x.tensor_split(4)]))


@pytest.mark.smoke
@pytest.mark.parametrize("kind", LEAVES)
def test_it_trains_as_by_the_loop_with_halves_in_all_stages(kind: str) -> None:
    torch.manual_seed(0)
    model = Chain([nn.Linear(8, 8), LEAVES[kind](), nn.Linear(8, 8)])
    assert_trains(model, ["parts.1"], devices=2, schedule="zb-h1", partition=["parts.2"])


@settings(max_examples=6, deadline=None)
@given(
    kinds=st.lists(st.sampled_from([*LEAVES, "Linear"]), min_size=2, max_size=4),
    cut=st.integers(0, 3),
    schedule=st.sampled_from(["zb-h1", "1f1b", "gpipe", "zb-h2"]),
)
def test_any_of_them_in_any_stages_train_as_by_the_loop(
    kinds: list[str], cut: int, schedule: str
) -> None:
    torch.manual_seed(0)
    parts = [nn.Linear(8, 8) if kind == "Linear" else LEAVES[kind]() for kind in kinds]
    leaves = [f"parts.{k}" for k, kind in enumerate(kinds) if kind != "Linear"] or ["parts.0"]
    at = f"parts.{cut}" if cut < len(kinds) else "last"
    assert_trains(Chain(parts), leaves, devices=2, schedule=schedule, partition=[at])


@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_one_that_is_called_twice_trains_as_by_the_loop(schedule: str) -> None:
    torch.manual_seed(0)
    leaf = Normed()
    model = Chain([leaf, nn.Linear(8, 8), leaf, Routed()])
    assert_trains(model, ["parts.0", "parts.3"], devices=2, schedule=schedule, partition=["last"])


def test_calls_of_one_leaf_share_a_stage() -> None:
    leaf = Routed()
    model = Chain([leaf, nn.Linear(8, 8), leaf])
    with (
        fxpipe.compile(
            model,
            2,
            microbatches=2,
            loss=F.mse_loss,
            partition=["parts.1"],
            extensions=[fxpipe.LeafModules("parts.0")],
        ) as pipe,
        pytest.raises(PartitionError, match=r"the calls of 'parts\.0'"),
    ):
        pipe.step(torch.randn(8, 8), target=torch.randn(8, 8))


def test_buffers_are_written_once_where_forwards_are_recomputed() -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"schedule": "1f1b", "recompute": "always"}
    model = Chain([Normed(), Counted()])
    assert_trains(model, [Normed, Counted], devices=2, partition=["last"], **options)


def test_an_expert_that_no_micro_batch_takes_has_no_gradient() -> None:
    torch.manual_seed(0)
    model = Chain([Routed(), nn.Linear(8, 8)])
    with torch.no_grad():
        model.first.bias.fill_(9)
    assert_trains(model, ["parts.0"], devices=2, schedule="zb-h1", partition=["parts.1"])
    unused = model.get_submodule("parts.0.experts.0")
    assert all(parameter.grad is None for parameter in unused.parameters())


def test_a_view_of_what_it_is_given_is_not_written_over() -> None:
    class Returns(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x * (1 if x.sum() > 0 else 2), y.view_as(y)

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.leaf = nn.Linear(8, 8), Returns()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            doubled = x * 2
            made, same = self.leaf(x, doubled)
            y: Tensor = made + doubled.neg() + same  # nothing reads ``doubled`` after that
            return y

    torch.manual_seed(0)
    model, x = Reads().eval(), torch.randn(4, 8)
    leaves = [fxpipe.LeafModules("leaf")]
    with fxpipe.compile(model, 1, microbatches=1, extensions=leaves) as pipe, torch.no_grad():
        assert torch.equal(pipe(x), model(x))


def test_weights_that_it_shares_with_other_stages_get_both_gradients() -> None:
    torch.manual_seed(0)
    model = Chain([Custom(), nn.Linear(8, 8)])
    model.last.weight = model.get_submodule("parts.0.layer").weight  # type: ignore[assignment]
    assert_trains(model, ["parts.0"], devices=2, schedule="zb-h1", partition=["last"])


@pytest.mark.parametrize("frozen", [["parts.0.layer.weight"], ["parts.0", "first"]], ids=str)
def test_frozen_weights_have_no_gradients(frozen: list[str]) -> None:
    torch.manual_seed(0)
    model = Chain([Custom(), nn.Linear(8, 8)])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)))
    assert_trains(model, ["parts.0"], devices=2, schedule="1f1b", partition=["last"])


def test_an_updated_weight_is_read_by_the_next_step() -> None:
    torch.manual_seed(0)
    model = Chain([Custom(), Routed(), nn.Linear(8, 8)])
    assert_trains(
        model, [Custom, Routed], rate=0.1, devices=2, schedule="zb-h1", partition=["parts.1"]
    )


@pytest.mark.parametrize("schedule", ["2bw", "1f1b-async"])
def test_where_batches_overlap_it_reads_the_weights_of_its_batch(schedule: str) -> None:
    """The same model without leaf modules is the reference: its steps have delayed weights, too."""

    def trained(leaves: list[str]) -> list[Tensor]:
        torch.manual_seed(0)
        model = Chain([nn.Linear(8, 8), nn.Linear(8, 8)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        extensions = [fxpipe.LeafModules(*leaves)] if leaves else []
        with fxpipe.compile(
            model,
            2,
            microbatches=4,
            loss=F.mse_loss,
            schedule=schedule,
            optimizer=optimizer,
            partition=["parts.1"],
            extensions=extensions,
        ) as pipe:
            losses = [pipe.step(torch.randn(8, 8), target=torch.ones(8, 8)) for _ in range(4)]
            pipe.flush()
        return [*losses, *model.parameters()]

    for ours, expected in zip(trained(["parts.0", "parts.1"]), trained([]), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"devices": 1},
        {"devices": 2, "schedule": "zb-h1", "partition": ["parts.1"]},
        {"devices": 3, "schedule": "gpipe", "partition": ["parts.1", "parts.2"]},
        {"devices": 2, "schedule": "1f1b", "recompute": "always", "partition": ["last"]},
    ],
    ids=str,
)
def test_it_draws_the_same_for_any_cut_and_schedule(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Chain([Dropped(), nn.Linear(8, 8), Dropped()])
    alone = copy.deepcopy(model)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    leaves = [fxpipe.LeafModules(Dropped)]
    with fxpipe.compile(
        model, microbatches=4, loss=F.mse_loss, extensions=leaves, **options
    ) as pipe:
        torch.manual_seed(5)
        loss = pipe.step(x, target=y)
    drawing = [alone.get_submodule("parts.0"), alone.get_submodule("parts.2")]
    with seeded(drawing, 5, 4):
        expected = loop.train(alone, 4, x, loss=F.mse_loss, target=y)
    assert torch.equal(loss, expected.loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_a_loss_that_reads_numbers_leaves_halves_to_all_stages() -> None:
    seen: list[float] = []

    def loss(made: Tensor, target: Tensor) -> Tensor:
        value = F.mse_loss(made, target)
        seen.append(value.item())
        return value

    torch.manual_seed(0)
    model = Chain([nn.Linear(8, 8)])
    alone = copy.deepcopy(model)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    with fxpipe.compile(model, 2, microbatches=4, loss=loss, schedule="zb-h1") as pipe:
        made = pipe.step(x, target=y)
        assert all(stage.input_grad is not None for stage in pipe.plan.stages)
    expected = loop.train(alone, 4, x, loss=F.mse_loss, target=y)
    assert torch.equal(made, expected.loss)
    assert len(seen) == 4
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_what_it_keeps_is_predicted() -> None:
    """Twice the layers in it: what a micro-batch keeps in its stage grows by what they save."""

    class Deep(nn.Module):
        def __init__(self, layers: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    def peaks(layers: int) -> Sequence[float]:
        model = Chain([Deep(layers)])
        extensions = [fxpipe.LeafModules("parts.0")]
        with fxpipe.compile(
            model,
            2,
            microbatches=4,
            loss=F.mse_loss,
            schedule="gpipe",
            partition=["last"],
            extensions=extensions,
        ) as pipe:
            pipe.prepare(torch.randn(400, 8), target=torch.randn(400, 8))
            return [device.peak for device in pipe.simulate().memory]

    first, other = peaks(4), peaks(8)
    weights = 4 * (8 * 8 + 8) * 4
    # each tanh saves its result; four micro-batches wait at the peak
    assert other[0] - first[0] == 4 * 4 * 100 * 8 * 4 + 2 * weights
    assert other[1] == first[1]

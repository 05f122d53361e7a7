"""What other pipelines get wrong about models, inputs and state; each is right here.

The behaviours are those of torchgpipe 0.0.7 and of torch.distributed.pipelining in PyTorch 2.13.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe import InputError
from tests.oracles import loop


def assert_as_the_loop(
    model: nn.Module, *batches: Tensor, microbatches: int = 4, **options: Any
) -> fxpipe.Pipeline:
    """Losses, gradients and buffers of one step a batch, without zeroing gradients between."""
    alone = copy.deepcopy(model)
    options = {"devices": ["cpu"] * 3, "loss": mse_loss, **options}
    with fxpipe.compile(model, microbatches=microbatches, **options) as pipe:
        for x in batches:
            target = torch.randn(len(x), 4, dtype=x.dtype)
            made = pipe.step(x, target=target)
            expected = loop.train(alone, microbatches, x, loss=mse_loss, target=target)
            assert torch.equal(made, expected.loss)
        loop.assert_same(loop.gradients(model), loop.gradients(alone))
        loop.assert_same(pipe.state_dict(), alone.state_dict())
    return pipe


class Skipping(nn.Module):
    """What each of the first layers makes feeds the next one, and a late one as well."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for layer in self.down:
            x = layer(x).tanh()
            made.append(x)
        for layer in self.up:
            x = layer(x + made.pop()).tanh()
        return x


CUTS = [f"{part}.{i}" for part in ("down", "up") for i in range(3)][1:]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_an_ordinary_unet_is_taken_and_does_not_hang_in_six_stages(schedule: str) -> None:
    torch.manual_seed(0)
    assert_as_the_loop(
        Skipping(), torch.randn(8, 4), devices=["cpu"] * 6, partition=CUTS, schedule=schedule
    )


def test_a_skip_goes_straight_to_its_consumer_and_is_freed_right_after_its_use() -> None:
    """As torchgpipe promises of portals; here nobody declares a skip."""
    with fxpipe.compile(
        Skipping(), ["cpu"] * 6, partition=CUTS, microbatches=4, loss=mse_loss
    ) as pipe:
        pipe.prepare(torch.randn(8, 4), target=torch.randn(8, 4))
        printed = str(pipe.program)
    blocks = [block.splitlines()[1:] for block in re.split(r"^device ", printed, flags=re.M)[1:]]
    skips = set(re.findall(r"pop +(skip:\S+:(\d)->(\d)\[\d\])", printed))
    ways = {(source, target) for _, source, target in skips}
    assert ways == {("0", "4"), ("1", "3")}
    assert len(skips) == 4 * len(ways)
    for name, source, target in skips:
        holders = [at for at, lines in enumerate(blocks) if any(name in line for line in lines)]
        assert holders == sorted((int(source), int(target)))
        words = [line.split()[:2] for line in blocks[int(target)]]
        own = words[words.index(["pop", name]) : words.index(["free", name])]
        assert sum(word in ("forward", "backward") for word, _ in own) == 1


class Pairs(nn.Module):
    """Tuples in, between the stages and out; one of its parts passes through untouched."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            pair = (layer(pair[0]).tanh(), pair[1])
        return pair


def test_tuples_go_in_and_come_out_in_training_and_without_gradients() -> None:
    torch.manual_seed(0)
    model = Pairs()
    alone = copy.deepcopy(model)
    x, y = torch.randn(2, 8, 4).unbind()
    with fxpipe.compile(model, ["cpu"] * 3, microbatches=4) as pipe:
        ours, theirs = pipe((x, y)), alone((x, y))
        (ours[0] * ours[1]).sum().backward()
        (theirs[0] * theirs[1]).sum().backward()
        with torch.no_grad():
            quiet = pipe.eval()((x, y))
    assert isinstance(ours, tuple) and isinstance(quiet, tuple)
    for made in (ours, quiet):
        torch.testing.assert_close(made, theirs)
    assert not quiet[0].requires_grad
    loop.assert_same(loop.gradients(model), loop.gradients(alone), 1e-5)


class Branching(nn.Module):
    """No sequence: two branches, keyword inputs, and one layer called in both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.both = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.both(self.left(x).tanh()) + self.both(self.right(x).relu())
        return y


def test_a_model_need_not_be_a_sequence_and_may_share_parameters() -> None:
    torch.manual_seed(0)
    assert_as_the_loop(Branching(), torch.randn(8, 4), devices=["cpu"] * 2)


def test_the_keys_of_the_state_dict_are_the_models() -> None:
    model = Skipping()
    keys = list(model.state_dict())
    with fxpipe.compile(model, ["cpu"] * 3, example=(torch.randn(8, 4),)) as pipe:
        assert list(pipe.state_dict()) == keys
        pipe.load_state_dict(Skipping().state_dict())


def test_tied_weights_have_one_gradient_and_never_drift() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[2].weight = model[0].weight
    alone = copy.deepcopy(model)
    theirs = torch.optim.SGD(alone.parameters(), lr=0.1)
    with fxpipe.compile(
        model,
        ["cpu"] * 3,
        microbatches=4,
        loss=mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ) as pipe:
        for _ in range(3):
            x, y = torch.randn(2, 8, 4).unbind()
            pipe.step(x, target=y)
            theirs.zero_grad()
            loop.train(alone, 4, x, loss=mse_loss, target=y)
            theirs.step()
    assert model[2].weight is model[0].weight
    loop.assert_same(model.state_dict(), alone.state_dict())


def test_a_batch_of_5_in_4_micro_batches_makes_4() -> None:
    """There are 3 in torchgpipe, whose settings for the last one then hit another."""
    torch.manual_seed(0)
    pipe = assert_as_the_loop(Skipping(), torch.randn(5, 4))
    assert pipe.schedule.microbatches == 4


def test_a_batch_of_5_in_4_micro_batches_commits_deferred_statistics() -> None:
    """torchgpipe waits for a fourth micro-batch, for ever."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1))
    norm = copy.deepcopy(model[0])
    with fxpipe.compile(
        model, ["cpu"] * 2, microbatches=4, loss=mse_loss, extensions=["deferred_batchnorm"]
    ) as pipe:
        for _ in range(2):
            x, y = torch.randn(2, 5, 2, 3, 3).unbind()
            pipe.step(x, target=y)
            norm(x)
    loop.assert_same(dict(model[0].named_buffers()), dict(norm.named_buffers()), 1e-6)


def test_an_uneven_batch_of_10_in_4_trains_and_returns_10_rows() -> None:
    torch.manual_seed(0)
    model = Skipping()
    assert_as_the_loop(model, torch.randn(10, 4))
    with fxpipe.compile(model.eval(), ["cpu"] * 3, microbatches=4) as pipe:
        x = torch.randn(10, 4)
        torch.testing.assert_close(pipe(x), model(x))


def test_batches_may_grow_from_step_to_step() -> None:
    torch.manual_seed(0)
    assert_as_the_loop(Skipping(), torch.randn(6, 4), torch.randn(16, 4), torch.randn(9, 4))


def test_two_steps_without_zero_grad_add_up() -> None:
    """A second step does not rescale what is there already."""
    torch.manual_seed(0)
    assert_as_the_loop(Skipping(), torch.randn(8, 4), torch.randn(8, 4))


def test_inputs_of_unequal_batch_are_never_cut_silently() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z: Tensor = self.layer(x).sum() + self.layer(y).sum()
            return z

    pipe = fxpipe.compile(Adds(), ["cpu"], microbatches=2)
    with pipe, pytest.raises(InputError, match="x has 6, y has 4"):
        pipe.step(torch.randn(6, 4), torch.randn(4, 4))


class OddSkips(nn.Module):
    """An integer, a boolean and a detached value skip the middle stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        index, mask, fixed = h.argmax(1), h > 0, h.detach()
        y = self.middle(h.tanh())
        y = torch.where(mask, y, fixed) + nn.functional.one_hot(index, 4)
        z: Tensor = self.last(y.tanh())
        return z


def test_skips_may_be_integers_booleans_and_detached() -> None:
    torch.manual_seed(0)
    assert_as_the_loop(OddSkips(), torch.randn(8, 4), partition=["middle", "last"])


def test_autocast_around_a_step_reaches_every_device() -> None:
    torch.manual_seed(0)
    model = Skipping()
    alone = copy.deepcopy(model)
    x, y = torch.randn(2, 8, 4).unbind()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output.float(), target)

    with fxpipe.compile(model, ["cpu"] * 3, microbatches=4, loss=loss) as pipe:
        plain = pipe.step(x, target=y)
        loop.clear(model)
        with torch.autocast("cpu", torch.bfloat16):
            made, output = pipe.step(x, target=y, return_output=True)
            expected = loop.train(alone, 4, x, loss=loss, target=y)
    assert made != plain
    assert output.dtype == torch.bfloat16
    assert torch.equal(made, expected.loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_gradients_that_are_asked_for_do_not_fill_others() -> None:
    torch.manual_seed(0)
    model = Skipping()
    with fxpipe.compile(model, ["cpu"] * 3, microbatches=4) as pipe:
        x = torch.randn(8, 4, requires_grad=True)
        (found,) = torch.autograd.grad(pipe(x).square().sum(), x)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert x.grad is None
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    torch.testing.assert_close(found, expected)


class InPlace(nn.Module):
    """Each stage changes in place what the one before has made, and what skips it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        early = h * 2
        y = self.middle(h)
        y.add_(early)
        early.mul_(3.0)
        z: Tensor = self.last(y).add_(early)
        return z


def test_operations_in_place_work_across_stages() -> None:
    torch.manual_seed(0)
    assert_as_the_loop(InPlace(), torch.randn(8, 4), partition=["middle", "last"])


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.drop(self.norm(self.first(x))))
        return y


def test_compiling_leaves_running_statistics_alone() -> None:
    """No run on uninitialised memory, nor any that counts, before the first step."""
    model = Normed()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(8, 4)
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=4, loss=mse_loss) as pipe:
        pipe.prepare(x, target=x)
        loop.assert_same(model.state_dict(), before)
        pipe.step(x, target=x)
    assert model.norm.num_batches_tracked == 4
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_eval_of_a_compiled_model_is_heeded() -> None:
    model = Normed()
    x = torch.randn(8, 4)
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=4, loss=mse_loss) as pipe:
        pipe.step(x, target=x)
        made = pipe.eval()(x)
        before = {name: value.clone() for name, value in model.named_buffers()}
        torch.testing.assert_close(made, model(x))
        loop.assert_same(dict(model.named_buffers()), before)


class Views(nn.Module):
    """Every stage hands on a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).view(-1, 2, 2).transpose(1, 2)
        h = self.middle(h.reshape(-1, 4)).tanh()[:, [3, 2, 1, 0]].unflatten(1, (2, 2))
        y: Tensor = self.last(h.flatten(1)).view(-1, 2, 2).flatten(1)
        return y


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "zb-v"])
def test_a_stages_output_may_be_a_view_with_parted_backwards(schedule: str) -> None:
    torch.manual_seed(0)
    assert_as_the_loop(Views(), torch.randn(8, 4), schedule=schedule, devices=["cpu"] * 2)

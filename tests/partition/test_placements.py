"""Several stages a device, and recomputation: equal to the plain loop, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from examples.unet import UNet
from fxpipe.ir.recipe import Placement, Recipe, one_each, round_robin, vee
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import B, F, R, Task, U
from fxpipe.schedules import gpipe
from tests.helpers.profiles import deep
from tests.oracles import loop

MICROBATCHES = 3


def scattered(devices: int) -> tuple[int, ...]:
    """Two stages a device, neighbours among them, in no order that a formula has."""
    return tuple((7 * stage // 3) % devices for stage in range(2 * devices))


def recomputing(
    device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
) -> Iterator[Task]:
    """Fill and drain; every forward but the last micro-batch's runs again before its backward."""
    for stage in stages:
        for i in range(microbatches):
            yield F(i, stage)
    for stage in reversed(stages):
        for i in range(microbatches):
            if i < microbatches - 1:
                yield R(i, stage)
            yield B(i, stage)
    for stage in stages:
        yield U(stage)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return UNet(channels=1, base=2, depth=1)


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(7, 1, 8, 8), torch.randn(7, 1, 8, 8)


@pytest.mark.parametrize(
    ("placement", "devices"),
    [(round_robin(2), 2), (scattered, 3), *deep((one_each, 3), (vee, 1), (vee, 2))],
)
@pytest.mark.parametrize(
    "recipe", [gpipe, Recipe("recomputing", recomputing)], ids=lambda r: r.name
)
def test_stages_may_stand_anywhere_and_run_again(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    recipe: Recipe,
    placement: Placement,
    devices: int,
) -> None:
    x, y = batch
    ours, alone = copy.deepcopy(model), copy.deepcopy(model)
    expected = loop.train(alone, MICROBATCHES, x, loss=nn.functional.mse_loss, target=y)
    placed = recipe.placed(placement)
    with fxpipe.compile(
        ours, devices, schedule=placed, microbatches=MICROBATCHES, loss=nn.functional.mse_loss
    ) as pipe:
        loss = pipe.step(x, target=y)
        assert pipe.schedule.placement == placement(devices)
        assert len(pipe.plan.stages) == len(placement(devices))
        kept = 2 if recipe.name == "recomputing" else MICROBATCHES
        assert set(pipe.kept.values()) == {kept}
        pipe.eval()
        # inference runs no recomputation: it is one and the same for both
        made = pipe(x) if recipe is gpipe else None
    assert torch.equal(loss, expected.loss)
    loop.assert_same(loop.gradients(ours), loop.gradients(alone))
    # statistics count each micro-batch once, though its forward ran twice
    loop.assert_same(dict(ours.named_buffers()), dict(alone.named_buffers()))
    if made is not None:
        with torch.no_grad():
            parts = [alone.eval()(part) for part in x.tensor_split(MICROBATCHES)]
        assert torch.equal(made, torch.cat(parts))


class Masked(nn.Module):
    """Dropout, and a buffer that its forward both reads and writes."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.drop(self.first(x)) * (1 + self.seen)
        self.seen += hidden.detach().mean() + 1
        out: Tensor = self.last(hidden.tanh())
        return out


@pytest.mark.parametrize("devices", [1, 2])
def test_a_recomputed_forward_draws_the_same_mask_and_reads_the_same_buffers(devices: int) -> None:
    torch.manual_seed(0)
    model = Masked()
    again = copy.deepcopy(model)
    x, y = torch.randn(6, 8), torch.randn(6, 1)
    for each, recipe in ((model, gpipe), (again, Recipe("recomputing", recomputing))):
        with fxpipe.compile(
            each, devices, schedule=recipe, microbatches=3, loss=nn.functional.mse_loss
        ) as pipe:
            torch.manual_seed(5)
            pipe.step(x, target=y)
    loop.assert_same(loop.gradients(again), loop.gradients(model))
    assert torch.equal(again.seen, model.seen)


def test_a_schedule_may_be_text() -> None:
    text = str(gpipe(2, 2))
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    for given in (text, Schedule.parse(text)):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        with fxpipe.compile(model, 2, schedule=given, loss=nn.functional.mse_loss) as pipe:
            pipe.step(x, target=y)
            assert pipe.schedule == gpipe(2, 2)


def test_a_placement_for_fewer_devices_is_named_and_their_number_works() -> None:
    recipe = Recipe(
        "mine", lambda device, devices, microbatches: [F(0)], placement=lambda _: (0, 1)
    )
    with pytest.raises(fxpipe.InputError, match=r"device 2.* gives no stage; .* or fewer devices"):
        recipe(3, 1)
    assert recipe(2, 1).devices == 2


def test_a_device_with_several_stages_asks_for_a_stages_name() -> None:
    recipe = Recipe("mine", lambda device, devices, microbatches: [F(0)], placement=vee)
    with pytest.raises(fxpipe.InputError, match=r"F0 names no stage .* holds 2: 0, 3; .*F\(0, 0\)"):
        recipe(2, 1)

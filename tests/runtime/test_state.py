"""Parameters, buffers and modules of every kind: as the loop leaves them, and so do checkpoints."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parametrizations

import fxpipe
from tests.helpers.one_optimizer import made_by
from tests.helpers.profiles import deep
from tests.oracles import loop


def linears(count: int) -> list[nn.Linear]:
    return [nn.Linear(4, 4) for _ in range(count)]


def assert_as_the_loop(
    make: Callable[[], nn.Module], bound: float = 1e-12, steps: int = 2, **options: Any
) -> None:
    """Losses, gradients and all state of some steps, with batches of changing size."""
    torch.manual_seed(0)
    model = make().double()
    torch.manual_seed(0)
    alone = make().double()  # some modules cannot be copied
    alone.load_state_dict(model.state_dict())
    options = {"devices": ["cpu"] * 2, "microbatches": 3, "loss": mse_loss, **options}
    with fxpipe.compile(model, **options) as pipe:
        assert pipe.state_dict().keys() == alone.state_dict().keys()
        for step in range(steps):
            x, y = torch.randn(2, 6 + step, 4, dtype=torch.float64).unbind()
            made = pipe.step(x, target=y)
            expected = loop.train(alone, options["microbatches"], x, loss=mse_loss, target=y)
            torch.testing.assert_close(made, expected.loss, rtol=1e-12, atol=1e-12)
        loop.assert_same(loop.gradients(model), loop.gradients(alone), bound)
        loop.assert_same(pipe.state_dict(), alone.state_dict(), bound)


class Hooked(nn.Sequential):
    """Hooks that change inputs and outputs, one that is called with keywords, one that counts."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__(*linears(4))
        self.register_buffer("calls", torch.zeros(()))
        self[0].register_forward_hook(lambda module, args, output: output.tanh() * 2)
        self[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self[2].register_forward_hook(
            lambda module, args, kwargs, output: output + args[0], with_kwargs=True
        )
        self[3].register_forward_hook(self._count)

    def _count(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.calls += 1


class Cast(nn.Sequential):
    """Half of it in autocast, with a region in it that is not."""

    def __init__(self) -> None:
        super().__init__(*linears(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        with torch.autocast("cpu", torch.bfloat16):
            x = self[1](x).relu()
            with torch.autocast("cpu", enabled=False):
                x = self[2](x.float())
        y: Tensor = self[3](x)
        return y


class SharedCounter(nn.Module):
    """A counter that every layer reads and increases, as a module of its own under many names."""

    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros((), dtype=torch.int64))


class Counting(nn.Module):
    def __init__(self, counter: SharedCounter) -> None:
        super().__init__()
        self.counter, self.layer = counter, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.counter.n += 1
        y: Tensor = self.layer(x) / self.counter.n.clone()
        return y


def counting() -> nn.Module:
    counter = SharedCounter()
    return nn.Sequential(*(Counting(counter) for _ in range(3)), *linears(2))


def one_norm_twice() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    first, second, third, fourth = linears(4)
    return nn.Sequential(first, norm, nn.Tanh(), second, norm, nn.Tanh(), third, fourth)


class ReadEverywhere(nn.Sequential):
    """A buffer that all stages read and none writes, and one that is not in the state dict."""

    scale: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__(*linears(3))
        self.register_buffer("scale", torch.randn(4))
        self.register_buffer("shift", torch.randn(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x * self.scale + self.shift).tanh()
        return x


class WrittenThenRead(nn.Sequential):
    """A buffer that the first layer writes and the last one reads."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__(*linears(4))
        self.register_buffer("average", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        y: Tensor = self[3](self[2](self[1](x).tanh()).tanh() * self.average)
        return y


class Tied(nn.Module):
    """One weight in the first and the last layer, under two names, and a bias that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = linears(3)
        self.last.weight = self.first.weight
        self.middle.bias.requires_grad_(False)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.middle(self.first(x).tanh()).tanh())
        return y


class Repeated(nn.Module):
    """A buffer repeats one number: it cannot be written, and nobody does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linears(2)
        self.register_buffer("gain", torch.full((1,), 2.0).expand(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x).tanh() * self.gain)
        return y


def weight_norm() -> nn.Module:
    first, second, third = linears(3)
    return nn.Sequential(parametrizations.weight_norm(first), second, nn.Tanh(), _normed(third))


def _normed(layer: nn.Module) -> nn.Module:
    normed: nn.Module = parametrizations.weight_norm(layer, dim=1)
    return normed


def spectral_norm() -> nn.Module:
    return nn.Sequential(*(parametrizations.spectral_norm(layer) for layer in linears(3)))


def orthogonal() -> nn.Module:
    first, second = linears(2)
    return nn.Sequential(parametrizations.orthogonal(first), nn.Tanh(), second)


def old_weight_norm() -> nn.Module:
    return nn.Sequential(*(nn.utils.weight_norm(layer) for layer in linears(3)))


@pytest.mark.parametrize(
    "make",
    [
        Hooked,
        counting,
        one_norm_twice,
        ReadEverywhere,
        WrittenThenRead,
        Tied,
        Repeated,
        weight_norm,
        spectral_norm,
        orthogonal,
        pytest.param(
            old_weight_norm,
            marks=pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated"),
        ),
    ],
)
def test_state_is_as_the_loop_leaves_it(make: Callable[[], nn.Module]) -> None:
    assert_as_the_loop(make)


def test_autocast_inside_of_a_model_is_kept() -> None:
    def make() -> nn.Module:
        return Cast().float()

    torch.manual_seed(0)
    model = make()
    alone = copy.deepcopy(model)
    x, y = torch.randn(2, 7, 4).unbind()
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=3, loss=mse_loss) as pipe:
        made = pipe.step(x, target=y)
    assert torch.equal(made, loop.train(alone, 3, x, loss=mse_loss, target=y).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


@pytest.mark.parametrize("make", [counting, one_norm_twice, WrittenThenRead, Tied])
@pytest.mark.parametrize("schedule", [*deep("gpipe"), "zb-h1"])
def test_shared_state_is_the_loops_under_schedules_that_reorder(make: Any, schedule: str) -> None:
    assert_as_the_loop(make, schedule=schedule)


def test_tied_weights_are_one_tensor_for_ever_and_have_one_optimizer_state() -> None:
    torch.manual_seed(0)
    model = Tied()
    alone = copy.deepcopy(model)
    theirs = torch.optim.Adam([p for p in alone.parameters() if p.requires_grad], lr=0.1)
    with fxpipe.compile(
        model,
        ["cpu"] * 3,
        microbatches=3,
        loss=mse_loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        partition=["middle", "last"],
    ) as pipe:
        for _ in range(5):
            x, y = torch.randn(2, 6, 4).unbind()
            pipe.step(x, target=y)
            theirs.zero_grad()
            loop.train(alone, 3, x, loss=mse_loss, target=y)
            theirs.step()
            assert model.last.weight is model.first.weight
        names = [name for name, _ in pipe.named_parameters()]
        assert "first.weight" in names
        assert "last.weight" not in names
        held = [
            id(p) for o in made_by(pipe) if o is not None for g in o.param_groups
            for p in g["params"]
        ]  # fmt: skip
        assert held.count(id(model.first.weight)) == 1
        states = pipe.state_dict()
        assert states["first.weight"].data_ptr() == states["last.weight"].data_ptr()
    loop.assert_same(model.state_dict(), alone.state_dict())


def test_modes_switch_freely_also_of_single_modules() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0), nn.Linear(4, 4), nn.BatchNorm1d(4)
    ).double()
    alone = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=3, loss=mse_loss) as pipe:
        for seed, mode in enumerate(("train", "eval", "norm", "train", "frozen", "norm", "eval")):
            for net in (pipe, alone):
                net.train(mode != "eval")
                net.get_submodule("0").requires_grad_(mode != "frozen")
                if mode == "norm":
                    net.get_submodule("1").eval()
            torch.manual_seed(seed)
            x, y = torch.randn(2, 7 + 3 * seed, 4, dtype=torch.float64).unbind()
            loop.clear(model, alone)
            made = pipe.step(x, target=y)
            expected = loop.train(alone, 3, x, loss=mse_loss, target=y)
            torch.testing.assert_close(made, expected.loss, rtol=1e-12, atol=1e-12)
            loop.assert_same(loop.gradients(model), loop.gradients(alone), 1e-12)
            loop.assert_same(model.state_dict(), alone.state_dict(), 1e-12)
        graphs = [graph.traced for graph in pipe._compiler.memo.values("graph")]
        assert len({id(graph.of or graph) for graph in graphs}) <= 2 * 4  # twice for each mode


class Named(nn.Module):
    """A model with attributes of its own, and a name for each of its inputs."""

    kind = "of the class"

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.config = {"width": 4}
        self.version = nn.Buffer(torch.zeros(1))

    def forward(self, first: Tensor, *, second: Tensor | None = None, **others: Any) -> Tensor:
        made: Tensor = self.layers(first if self.training else 2 * first)
        return made

    def width(self) -> int:
        return self.config["width"]

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        state.setdefault(f"{prefix}version", torch.ones(1))
        super()._load_from_state_dict(state, prefix, *rest)


def test_a_pipe_shows_the_attributes_and_the_signature_of_its_model() -> None:
    model = Named()
    pipe: Any
    with fxpipe.compile(model, devices=2, microbatches=2) as pipe:
        assert pipe.config is model.config and pipe.kind == model.kind and pipe.width() == 4
        assert not hasattr(pipe, "nothing")
        with pytest.raises(AttributeError, match="'Pipeline' object has no attribute 'nothing'"):
            pipe.nothing  # noqa: B018
        assert inspect.signature(pipe.forward) == inspect.signature(model.forward)


def test_an_attribute_of_the_model_that_is_set_on_a_pipe_is_set_in_the_model() -> None:
    class Scaled(nn.Linear):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    model, x = Scaled(4, 4), torch.randn(4, 4)
    with fxpipe.compile(model, devices=1, microbatches=2) as pipe, torch.no_grad():
        before = pipe(x)
        pipe.scale = 2.0
        assert model.scale == 2.0
        assert torch.equal(pipe(x), 2 * before)
        pipe.of_the_pipe = 3
        assert not hasattr(model, "of_the_pipe")


def test_the_mode_may_be_set_by_attributes_as_frameworks_do() -> None:
    model, x = Named(), torch.randn(4, 4)
    with fxpipe.compile(model, devices=2, microbatches=2) as pipe, torch.no_grad():
        for mode in (False, True):
            for module in nn.ModuleList([pipe]).modules():
                module.training = mode
            assert model.training is pipe.training is mode
            torch.testing.assert_close(pipe(x), model(x))


def test_a_forward_may_be_replaced_on_a_pipe() -> None:
    x = torch.randn(4, 4)
    with fxpipe.compile(Named(), devices=2, microbatches=2) as pipe, torch.no_grad():
        before, own = pipe(x), pipe.forward
        pipe.forward = lambda *args: 3 * own(*args)
        assert torch.equal(pipe(x), 3 * before)


def test_a_module_that_holds_a_pipe_saves_and_loads_it() -> None:
    model, other = Named(), Named()
    with fxpipe.compile(model, devices=2, microbatches=2) as pipe:
        holder = nn.ModuleDict({"net": pipe})
        assert list(holder.state_dict()) == [f"net.{name}" for name in model.state_dict()]
        state = {
            f"net.{name}": value
            for name, value in other.layers.state_dict(prefix="layers.").items()
        }
        holder.load_state_dict(state)  # what the model itself does with it
    loop.assert_same(model.layers.state_dict(), other.layers.state_dict())
    assert model.version == 1

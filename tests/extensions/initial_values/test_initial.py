"""A model on the meta device in one process: it gets values before it runs, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe import InputError, TraceError
from fxpipe.extensions.initial_values.initial import initialise
from tests.helpers.refusals import refused

SEED = 5
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 3


def without_data(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def compiled(model: nn.Module, **options: Any) -> fxpipe.Pipeline:
    defaults: dict[str, Any] = {
        "microbatches": 4,
        "loss": F.cross_entropy,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "example": ((X,), {"target": Y}),
    }
    return fxpipe.compile(model, 2, **{**defaults, **options})


def reset(model: nn.Module, function: Any = None) -> dict[str, Tensor]:
    """The values that a model gets after the seed."""
    with compiled(model) as pipe:
        torch.manual_seed(SEED)
        pipe.reset_parameters(function)
        found: dict[str, Tensor] = pipe.state_dict()
        return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


class Own(nn.Module):
    """Draws in its own way, after the layers inside of it, whose bias it reads and sets."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(6))
        self.register_buffer("shift", torch.empty(6))
        self.layer = nn.Linear(6, 6)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.scale.data.normal_(1.0, 0.1)
        with torch.no_grad():
            self.get_buffer("shift").copy_(torch.randn(6))
            self.layer.bias.copy_(torch.rand(6, device=self.layer.bias.device))
        nn.init.orthogonal_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x * self.scale + self.get_buffer("shift"))
        return out


class Tables(nn.Module):
    """Has a buffer that is in no state dict, made where the constructor says."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("table", torch.arange(3.0, device=device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.get_buffer("table")
        return out


class Free(nn.Module):
    """Has a parameter, and no method that draws it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * self.weight
        return out


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    model[1].weight = model[0].weight
    return model


def with_own() -> nn.Module:
    return nn.Sequential(Own(), nn.Tanh(), Own(), nn.Linear(6, 3))


@pytest.mark.smoke
@pytest.mark.parametrize("make", [Plain, with_own, tied])
def test_modules_draw_what_their_constructors_would_have_drawn(
    make: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(SEED)
    expected = make()
    after = torch.get_rng_state()
    assert_same(reset(without_data(make)), expected.state_dict())
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("kept", [0, 3, 7])
def test_a_process_that_keeps_one_tensor_draws_the_same_values(kept: int) -> None:
    torch.manual_seed(SEED)
    expected = with_own().state_dict()
    model = without_data(with_own)
    name, tensor = [*model.named_parameters(), *model.named_buffers()][kept]
    torch.manual_seed(SEED)
    initialise(model, [tensor], None)
    assert torch.equal(tensor, expected[name])
    others = (*model.parameters(), *model.buffers())
    assert [x is tensor for x in others] == [not x.is_meta for x in others]


def test_attention_which_draws_by_a_private_method_gets_its_constructors_values() -> None:
    def make() -> nn.Module:
        return nn.TransformerEncoderLayer(8, 2, 16)

    torch.manual_seed(SEED)
    expected = make().state_dict()
    model = without_data(make)
    torch.manual_seed(SEED)
    initialise(model, list(model.parameters()), None)
    assert_same(model.state_dict(), expected)


def test_a_function_initialises_modules_in_the_order_of_apply() -> None:
    def function(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point():
                nn.init.normal_(tensor, 1.0, 0.02)
            else:
                tensor.zero_()

    expected = Plain()
    torch.manual_seed(SEED)
    with torch.no_grad():
        expected.apply(function)
    assert_same(reset(without_data(Plain), function), expected.state_dict())


def test_a_function_is_called_for_a_shared_module_once_in_each_that_has_it() -> None:
    class Around(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.shared, self.own = shared, nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Any:
            return self.own(self.shared(x))

    def make() -> nn.Module:
        shared = nn.Linear(6, 6)
        return nn.Sequential(Around(shared), Around(shared), nn.Linear(6, 3))

    def function(module: nn.Module) -> None:
        for tensor in module.parameters(recurse=False):
            nn.init.normal_(tensor)

    expected = make()
    torch.manual_seed(SEED)
    expected.apply(function)
    assert_same(reset(without_data(make), function), expected.state_dict())


def test_a_model_with_data_draws_anew() -> None:
    torch.manual_seed(SEED)
    expected = Plain().state_dict()
    assert_same(reset(Plain()), expected)


@pytest.mark.smoke
def test_a_state_dict_gives_values_and_parameters_stay_the_same_objects() -> None:
    values = Plain().state_dict()
    model = without_data(Plain)
    weight = model.get_parameter("0.weight")
    vars(weight)["decays"] = True
    before = list(model.parameters())
    with compiled(model) as pipe, torch.no_grad():
        pipe.load_state_dict(values)
        assert_same(pipe.state_dict(), values)
        assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
        assert vars(weight)["decays"] and type(weight) is nn.Parameter
        plain = Plain()
        plain.load_state_dict(values)
        pipe.eval()
        plain.eval()
        assert torch.equal(pipe(X), torch.cat([plain(part) for part in X.split(2)]))


def test_modules_are_told_the_version_of_a_state_dict() -> None:
    class Newer(nn.Linear):
        _version = 2

        def _load_from_state_dict(
            self, state: dict[str, Tensor], prefix: str, metadata: dict[str, Any], *rest: Any
        ) -> None:
            if metadata.get("version") != 2:
                state[f"{prefix}weight"] = -state[f"{prefix}weight"]
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    def make() -> nn.Module:
        return nn.Sequential(Newer(6, 6), nn.Linear(6, 3))

    values = make().state_dict()
    with compiled(without_data(make)) as pipe:
        pipe.load_state_dict(values)
        assert_same(pipe.state_dict(), values)
        assert vars(pipe.state_dict())["_metadata"] == vars(values)["_metadata"]


@pytest.mark.smoke
def test_inside_the_block_that_builds_a_model_without_data_nothing_runs() -> None:
    model = without_data(Plain)
    with (
        torch.device("meta"),
        pytest.raises(InputError, match=r'default device is "meta" here.*leave the block'),
    ):
        compiled(model)
    with compiled(model) as pipe:
        pipe.reset_parameters()
        with (
            torch.device("meta"),
            pytest.raises(InputError, match=r'default device is "meta" here.*leave the block'),
        ):
            pipe.step(X, target=Y)
        pipe.step(X, target=Y)
        assert pipe.batches == 1


def test_a_checkpoint_gives_values_before_anything_is_compiled(tmp_path: Path) -> None:
    with compiled(Plain()) as pipe:
        pipe.step(X, target=Y)
        pipe.save(tmp_path / "run")
        pipe.checkpoint(tmp_path / "file")
        expected = {name: value.clone() for name, value in pipe.state_dict().items()}
        losses = [float(pipe.step(X, target=Y)) for _ in range(2)]
    for name in ("run", "file"):
        with compiled(without_data(Plain), example=None) as pipe:
            (pipe.load if name == "run" else pipe.restore)(tmp_path / name)
            assert_same(pipe.state_dict(), expected)
            assert [float(pipe.step(X, target=Y)) for _ in range(2)] == losses


def test_a_buffer_made_with_data_stays_as_it_is() -> None:
    with compiled(without_data(lambda: Tables("cpu"))) as pipe:
        pipe.reset_parameters()
        pipe.step(X, target=Y)
        assert pipe.get_buffer("table").tolist() == [0.0, 1.0, 2.0]


# what is refused


@pytest.mark.smoke
def test_a_step_without_values_is_refused_and_nothing_is_lost() -> None:
    with compiled(without_data(Plain)) as pipe:
        for call in (lambda: pipe.step(X, target=Y), lambda: pipe(X)):
            refused(InputError, call, "parameter '0.weight' has no data", "pipe.reset_parameters()")
        pipe.reset_parameters()
        pipe.step(X, target=Y)


@pytest.mark.smoke
def test_a_parameter_that_no_module_draws_is_refused_until_a_function_does() -> None:
    model = without_data(Free)
    with compiled(model) as pipe:
        refused(
            InputError,
            pipe.reset_parameters,
            "parameter 'weight' of the model gets no value from Free.reset_parameters",
        )
        assert all(parameter.is_meta for parameter in model.parameters())
        pipe.reset_parameters(lambda module: [nn.init.ones_(p) for p in module.parameters()])
        assert pipe.get_parameter("weight").tolist() == [1.0, 1.0, 1.0]


def test_a_table_that_only_a_constructor_makes_is_refused() -> None:
    with compiled(without_data(Tables)) as pipe:
        refused(InputError, pipe.reset_parameters, "buffer 'table' of the model", 'device="cpu"')
        pipe.load_state_dict(Tables().state_dict())
        refused(InputError, lambda: pipe.step(X, target=Y), "buffer 'table' has no data")


def test_a_function_that_raises_is_named_with_its_module() -> None:
    def function(module: nn.Module) -> None:
        raise ValueError("not today")

    model = without_data(Plain)
    with compiled(model) as pipe:
        part = "the initial values of 0 cannot be drawn (ValueError: not today)"
        refused(InputError, lambda: pipe.reset_parameters(function), part)
        assert all(parameter.is_meta for parameter in model.parameters())


def test_values_computed_from_a_tensor_that_is_kept_elsewhere_are_refused() -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = nn.Linear(6, 3), nn.Linear(6, 3)

        def reset_parameters(self) -> None:
            nn.init.trunc_normal_(self.online.weight)
            self.target.weight.copy_(2 * self.online.weight)

    model = without_data(Copies)
    target, online = model.get_parameter("target.weight"), model.get_parameter("online.weight")
    refused(
        InputError, lambda: initialise(model, [target], None), "the model", "another rank keeps"
    )
    assert target.is_meta
    torch.manual_seed(SEED)
    initialise(model, [online], None)
    both = without_data(Copies)
    torch.manual_seed(SEED)
    initialise(both, both.parameters(), None)
    assert torch.equal(both.get_parameter("online.weight"), online)
    assert torch.equal(both.get_parameter("target.weight"), 2 * online)


def test_a_hook_on_a_gradient_is_refused() -> None:
    model = without_data(Plain)
    model.get_parameter("0.weight").register_hook(lambda gradient: gradient)
    refused(TraceError, lambda: compiled(model), "parameter '0.weight' has a hook on its gradient")

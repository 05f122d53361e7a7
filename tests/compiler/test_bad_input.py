"""Wrong input: one error of the library's own, that names the thing and says what to do."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpipe
from fxpipe import (
    InputError,
    PartitionError,
)
from fxpipe.arguments import ELSEWHERE
from fxpipe.errors import near
from fxpipe.extend import Extension, register
from fxpipe.schedules import one_f_one_b
from tests.helpers.refusals import SGD, X, Y, compiled, refused, stepped
from tests.helpers.registered import registry_restored
from tests.helpers.tiny import Snapshot, Tiny
from tests.oracles import loop

# arguments of compile


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("chunks", "did you mean 'microbatches'?"),
        ("balance", "did you mean 'partition'?"),
        ("microbatchs", "did you mean 'microbatches'"),
        ("loss_fn", "did you mean 'loss'?"),
        ("xyzzy", "the known ones are 'batch_dims', 'clip_norm', "),
    ],
)
def test_an_argument_that_compile_does_not_have_is_refused_with_the_one_meant(
    name: str, hint: str
) -> None:
    given: Any = {name: 4}
    with pytest.raises(InputError) as raised:
        fxpipe.compile(nn.Linear(2, 2), ["cpu"], **given)
    assert str(raised.value).startswith(f"compile has no argument {name!r}; {hint}")


def test_an_extension_that_is_given_as_an_argument_is_refused_with_where_it_belongs() -> None:
    given: Any = {"tapestry": True}
    with registry_restored(), pytest.raises(InputError) as raised:
        register("extension", "tapestry", Extension)
        fxpipe.compile(nn.Linear(2, 2), ["cpu"], **given)
    assert str(raised.value).endswith("'tapestry'; write extensions=[\"tapestry\"]")


def test_what_other_libraries_call_an_argument_leads_to_one_that_is_there() -> None:
    assert set(ELSEWHERE.values()) <= set(inspect.signature(fxpipe.compile).parameters)


def test_the_signature_of_compile_is_what_its_definition_says() -> None:
    shown = inspect.signature(fxpipe.compile)
    assert shown == inspect.signature(inspect.unwrap(fxpipe.compile))
    kinds = {parameter.kind for parameter in shown.parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("devices", "part"),
    [
        ([], 'devices is empty; give at least one, such as ["cpu", "cpu"]'),
        (0, "devices is 0; give at least 1"),
        (-1, "devices is -1; give at least 1"),
        (10**30, "give at least 1, and at most 65536"),
        (True, "devices is True; give a list"),
        (2.0, "devices is 2.0; give a list"),
        (None, "devices is None; give a list"),
        ({"cpu"}, "devices is {'cpu'}; give a list"),
        ("cpu", "devices is the string 'cpu'; give a list, such as ['cpu']"),
        (["cpu", "cpux"], "there is no device 'cpux'; name one such as \"cpu\""),
        (["cpu", None], "there is no device None; name one"),
        (["cuda:0"] if not torch.cuda.is_available() else ["xpu:0"], "stages cannot run on"),
        (["meta"], "stages cannot run on meta here; name CPU"),
    ],
    ids=repr,
)
def test_devices_that_are_none_or_unknown_are_refused(devices: Any, part: str) -> None:
    refused(InputError, lambda: compiled(devices=devices), part)


@pytest.mark.parametrize(
    ("schedule", "part"),
    [
        ("1b1f", "there is no schedule '1b1f': did you mean '1f1b'?"),
        ("GPipe", "there is no schedule 'GPipe': did you mean 'gpipe'?"),
    ],
)
def test_an_unknown_schedule_is_refused_with_the_near_names(schedule: str, part: str) -> None:
    with pytest.raises(InputError) as raised:
        compiled(schedule=schedule)
    assert str(raised.value) == part


def test_a_name_that_is_too_long_for_a_file_is_refused() -> None:
    with pytest.raises(InputError, match="there is no schedule 'fff"):
        compiled(schedule="f" * 3000)


@pytest.mark.parametrize("schedule", [None, 3])
def test_what_is_no_schedule_is_refused(schedule: Any) -> None:
    refused(InputError, lambda: compiled(schedule=schedule), f"schedule is {schedule}; give a name")


@pytest.mark.parametrize("count", [0, -2, 2.0, True, "2"])
def test_micro_batches_below_one_or_no_number_are_refused(count: Any) -> None:
    text = f"microbatches is {count!r}; give a whole number of at least 1"
    refused(InputError, lambda: compiled(microbatches=count), text)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"partition": "middle"}, "or a list of submodule names, such as ['middle']"),
        ({"partition": 3}, 'partition is 3; give "auto", a list of submodule names'),
        ({"partition": [3]}, 'partition is [3]; give "auto", a list of submodule names'),
        ({"loss": "mse"}, "loss is 'mse'; give a function loss(output, *targets)"),
        ({"loss": nn.MSELoss}, "loss is the class MSELoss; give an object, MSELoss()"),
        ({"loss": nn.Linear(3, 1)}, "the loss has parameters of its own"),
        ({"optimizer": "adam"}, "optimizer is 'adam'; give a function from parameters"),
        (
            {"optimizer": [SGD] * 30},
            "optimizer is one list object; give a function from parameters",
        ),
        ({"optimizer": SGD([nn.Parameter(X)])}, "that is none of the Tiny's; make it over"),
        ({"example": X}, "example is no tuple; give a tuple of inputs such as (x,)"),
        ({"example": (X, X)}, "the inputs do not fit Tiny.forward: too many"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_arguments_that_are_wrong_are_refused(options: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError) as raised:
        compiled(**options)
    assert part in str(raised.value)


@pytest.mark.parametrize("model", [Tiny, lambda x: x, None], ids=["class", "function", "none"])
def test_what_is_no_module_is_refused(model: Any) -> None:
    refused(InputError, lambda: fxpipe.compile(model, ["cpu"]), "model is", "give an nn.Module")


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize("inside", [False, True])
def test_a_module_of_torch_jit_is_named(inside: bool) -> None:
    traced = torch.jit.trace(nn.Linear(3, 3), torch.randn(2, 3))
    model, name = (nn.Sequential(nn.ReLU(), traced), "1") if inside else (traced, "the model")
    refused(InputError, lambda: fxpipe.compile(model, 1), name, "torch.jit", "was made of")


@pytest.mark.parametrize("name", ["first.0.weight", "scale"])
def test_what_was_made_in_inference_mode_is_refused_and_its_copy_is_not(name: str) -> None:
    model = Tiny()
    model.register_buffer("scale", torch.ones(3))
    module, _, last = name.rpartition(".")
    made = model.get_submodule(module)
    with torch.inference_mode():
        value = getattr(made, last).clone()
        setattr(made, last, nn.Parameter(value) if module else value)
    refused(InputError, lambda: compiled(model), f"{name!r} was made under torch.inference_mode()")
    stepped(copy.deepcopy(model))


def test_a_tensor_without_data_that_is_no_buffer_is_refused() -> None:
    model = Tiny()
    vars(model.last)["scale"] = torch.ones(3, device="meta")
    refused(InputError, lambda: compiled(model), "'scale' of last is a tensor on the meta device")


def test_a_model_that_is_compiled_already_is_refused_until_its_pipe_is_closed() -> None:
    model = Tiny()
    with compiled(model) as pipe:
        cure = "use that pipe, whose calls may alternate between inputs and between losses"
        refused(InputError, lambda: compiled(model), "the model is compiled already", cure)
        refused(InputError, lambda: compiled(pipe), "the model is a pipe already")
        compiled(copy.deepcopy(model)).close()
    compiled(model).close()


@pytest.mark.parametrize("which", ["part", "whole"])
def test_a_part_of_a_compiled_model_and_its_whole_are_refused(which: str) -> None:
    part = Tiny()
    whole = nn.Sequential(part, nn.Linear(3, 3))
    first, second = (whole, part) if which == "part" else (part, whole)
    with compiled(first):
        error = refused(InputError, lambda: compiled(second), "compiled already", "close()")
        assert "first.0.weight" in str(error)
    compiled(second).close()


# cuts


@pytest.mark.parametrize(
    ("devices", "partition", "parts"),
    [
        (2, ["midle"], ["no submodule 'midle': did you mean 'middle'"]),
        (2, ["zzz"], ["no submodule 'zzz': the known ones are 'first', 'first.0'"]),
        (2, ["middle", "last"], ["names 2 cuts, which make 3 stages, for 2 devices; name 1"]),
        (
            3,
            ["last", "middle"],
            ["'middle' does not come behind the one at 'last'", "order"],
        ),
        (
            3,
            ["middle", "middle.0"],
            ["'middle.0' does not come behind the one at 'middle'"],
        ),
        (2, ["first"], ["no stage can begin at 'first': nothing runs before it; cut further on"]),
    ],
    ids=str,
)
def test_cuts_that_cannot_be_are_refused(
    devices: int, partition: list[str], parts: list[str]
) -> None:
    with pytest.raises(PartitionError) as raised:
        stepped(devices=["cpu"] * devices, partition=partition)
    for part in parts:
        assert part in str(raised.value)


def test_more_stages_than_the_model_can_be_cut_into_are_refused() -> None:
    error = refused(
        PartitionError,
        lambda: stepped(devices=["cpu"] * 60),
        "the model can be cut into at most ",
        " stages, not 60; give fewer devices",
    )
    most = int(str(error).split("at most ")[1].split()[0])
    stepped(devices=["cpu"] * most)


# inputs of a step; one pipe takes them all, and works after each


@pytest.fixture(scope="module")
def pipe() -> Iterator[fxpipe.Pipeline]:
    torch.manual_seed(0)
    with compiled(loss=functional.cross_entropy, microbatches=3) as pipe:
        pipe.step(X, target=Y)
        yield pipe


@pytest.mark.parametrize(
    ("inputs", "target", "parts"),
    [
        ((X,), Y[:5], ["(dimension 0): x has 6, target has 5; give tensors of one batch size"]),
        ((X[:4],), Y, ["x has 4, target has 6"]),
        ((X[:0],), Y[:0], ["x has no samples (dimension 0 is 0); give a batch that has some"]),
        ((torch.tensor(1.0),), None, ["no input is a tensor with a batch dimension; give"]),
        ((X, X), Y, ["the inputs do not fit Tiny.forward: too many positional arguments"]),
        ((X, Y), None, ["too many positional arguments; what the loss compares with is given as"]),
        ((), Y, ["the inputs do not fit Tiny.forward: missing a required argument: 'x'"]),
        ((X,), None, ["the loss does not fit the model's output and no target", "'target'"]),
        ((X,), (Y,) * 9, ["the model's output and 9 targets: too many positional arguments"]),
        ((X.to_sparse(),), Y, ["x is torch.sparse_coo, and stages take dense", "x.to_dense()"]),
        ((X.to("meta"),), Y, ["x is on meta; move it to the CPU (x.cpu())"]),
        ((X.repeat(1, 2),), Y, ["Tiny fails on the first micro-batch at ", "h = self.first(x)"]),
        ((X.long(),), Y, ["Tiny fails on the first micro-batch at ", "must have the same dtype"]),
        ((X,), Y.float(), ["the loss fails on the first micro-batch", "Float"]),
        ((X.clone().requires_grad_(),), Y, ["x requires a gradient, and a step", "x.detach()"]),
    ],
    ids=lambda value: value[0][:40] if isinstance(value, list) else "",
)
def test_inputs_that_do_not_fit_are_refused_and_change_nothing(
    pipe: fxpipe.Pipeline, inputs: tuple[Any, ...], target: Any, parts: list[str]
) -> None:
    before = Snapshot.of(pipe)
    with pytest.raises(InputError) as raised:
        pipe.step(*inputs, target=target)
    text = str(raised.value)
    assert "\n" not in text
    for part in parts:
        assert part in text
    assert not list(before.differences(Snapshot.of(pipe)))
    pipe.step(X, target=Y)


def test_fewer_samples_than_micro_batches_are_single_ones() -> None:
    model, x = nn.Linear(4, 4), torch.randn(6, 4)
    with fxpipe.compile(model, 1, loss=functional.mse_loss, microbatches=3) as pipe:
        pipe.step(x, target=x)
        assert pipe.schedule.microbatches == 3
        loss = pipe.step(x[:2], target=x[:2])
        assert pipe.schedule.microbatches == 2
        torch.testing.assert_close(loss, functional.mse_loss(model(x[:2]), x[:2]))


def test_a_micro_batch_of_one_sample_that_batch_norm_refuses_is_told_as_such() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with fxpipe.compile(model, 1, loss=functional.mse_loss, microbatches=3) as pipe:
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))
        with pytest.raises(InputError, match=r"cannot train on a micro-batch of one .*drop_last"):
            pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))  # split into 2, 1 and 1


def test_fewer_samples_than_a_fixed_schedule_has_micro_batches_are_refused() -> None:
    schedule = one_f_one_b(2, 3)
    with (
        compiled(loss=functional.cross_entropy, schedule=schedule) as pipe,
        pytest.raises(InputError, match="microbatches is 3 and the batch has 2 samples; give at m"),
    ):
        pipe.step(X[:2], target=Y[:2])


def test_an_unknown_keyword_is_refused(pipe: fxpipe.Pipeline) -> None:
    with pytest.raises(InputError, match="got an unexpected keyword argument 'z'"):
        pipe.step(X, target=Y, z=X)


def test_a_single_row_is_shared_and_any_other_size_is_never_cut(pipe: fxpipe.Pipeline) -> None:
    class Scaled(Tiny):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            y = super().forward(x)
            return y if scale is None else y * scale

    with compiled(Scaled(), microbatches=3, loss=functional.cross_entropy) as scaled:
        scaled.step(X, torch.full((1, 3), 2.0), target=Y)
        refused(
            InputError,
            lambda: scaled.step(X, torch.full((3, 3), 2.0), target=Y),
            "x has 6, scale has 3, target has 6",
        )


# what cannot be done with a pipe


@pytest.mark.parametrize(
    "move",
    [
        lambda pipe: pipe.to("meta"),
        lambda pipe: pipe.half(),
        lambda pipe: pipe.double(),
        lambda pipe: pipe.cuda(),
        lambda pipe: pipe.to_empty(device="cpu"),
        lambda pipe: nn.ModuleList([pipe]).to(torch.float64),
    ],
)
def test_moving_or_casting_a_pipe_is_refused(
    pipe: fxpipe.Pipeline, move: Callable[[nn.Module], Any]
) -> None:
    before = copy.deepcopy(pipe.state_dict())
    with torch.no_grad():
        refused(InputError, lambda: move(pipe), "cannot be moved or cast", "compile it again")
    loop.assert_same(pipe.state_dict(), before)
    pipe.step(X, target=Y)


@pytest.mark.parametrize(
    "move",
    [
        lambda pipe: pipe.to("cpu"),
        lambda pipe: pipe.to(torch.float32),
        lambda pipe: pipe.cpu().float().requires_grad_(),
        lambda pipe: nn.ModuleList([pipe]).to("cpu")[0],
    ],
)
def test_a_move_or_cast_that_changes_nothing_does_nothing(
    pipe: fxpipe.Pipeline, move: Callable[[nn.Module], Any]
) -> None:
    assert move(pipe) is pipe
    pipe.step(X, target=Y)


@pytest.mark.parametrize(
    "hook",
    [
        lambda pipe, see: pipe.register_forward_pre_hook(lambda *_: see.append(1)),
        lambda pipe, see: pipe.register_forward_hook(lambda *_: see.append(1)),
        lambda pipe, see: pipe.register_full_backward_hook(lambda *_: see.append(1)),
        lambda pipe, see: pipe.register_full_backward_pre_hook(lambda *_: see.append(1)),
    ],
)
def test_hooks_of_a_pipe_run_in_calls_and_are_refused_in_steps(
    pipe: fxpipe.Pipeline, hook: Callable[[nn.Module, list[int]], Any]
) -> None:
    seen: list[int] = []
    handle = hook(pipe, seen)
    refused(InputError, lambda: pipe.step(X, target=Y), "hooks, which a step", "train by pipe(x)")
    assert not seen
    pipe(X.clone().requires_grad_()).sum().backward()
    assert seen == [1]
    handle.remove()
    pipe.step(X, target=Y)


def test_a_name_is_near_the_ends_of_longer_ones() -> None:
    names = ["transformer", *(f"transformer.h.{i}" for i in range(12)), "transformer.h.2.mlp"]
    assert near("h.2", names) == "did you mean 'transformer.h.2'?"
    assert near("2.mlp", names) == "did you mean 'transformer.h.2.mlp'?"
    assert "'transformer.h.11'" in near("h.12", names)
    assert near("transformer.h.2x", names).startswith("did you mean 'transformer.h.2'")
    assert near("", names).startswith("the known ones are 'transformer', 'transformer.h.0'")
    assert near("x", []) == "there are none"


@pytest.mark.parametrize("take", [copy.copy, pickle.dumps])
def test_copying_or_pickling_a_pipe_is_refused(
    pipe: fxpipe.Pipeline, take: Callable[[Any], Any]
) -> None:
    refused(InputError, lambda: take(pipe), "cannot be copied or pickled", "state_dict()")


def test_a_deep_copy_of_a_pipe_is_one_of_the_model(pipe: fxpipe.Pipeline) -> None:
    pipe.step(X, target=Y)
    other: nn.Module = copy.deepcopy(pipe)
    assert isinstance(other, Tiny)
    for mine, its in zip(pipe.parameters(), other.parameters(), strict=True):
        assert mine is not its and torch.equal(mine, its)


def test_a_closed_pipe_refuses_every_call() -> None:
    pipe = compiled(loss=functional.cross_entropy)
    pipe.close()
    for call in (lambda: pipe.step(X, target=Y), lambda: pipe(X), lambda: pipe.prepare(X)):
        refused(InputError, call, "the pipe is closed; compile the model again")


def test_looking_before_anything_is_compiled_is_refused() -> None:
    with compiled() as pipe:
        cure = "call step once, or give compile(..., example=inputs)"
        for name in ("plan", "schedule", "program"):
            refused(InputError, functools.partial(getattr, pipe, name), cure)
        refused(InputError, lambda: pipe.optimizer, "the pipe has no optimizer; give compile(")

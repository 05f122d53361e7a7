"""What a restore finds wrong before anything changes, and that it is told by name."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import fxpipe
from fxpipe.runtime.weights import checkpoint_file as checkpoint
from tests.helpers.checkpoints import (
    PLAIN,
    everything,
    header_of,
    make,
    run,
    same,
    write_as,
    write_one,
)
from tests.helpers.overlapping import ADAMW
from tests.oracles.delayed_loop import MSE


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_one(tmp_path_factory.mktemp("written") / "run")


@pytest.fixture
def trained(tmp_path: Path, written: Path) -> Path:
    shutil.copy(written, tmp_path / "run")
    return tmp_path / "run"


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values inside of JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in inner:
        yield (*at, key)
        if isinstance(item, dict | list):
            yield from places(item, (*at, key))


def with_other(value: Any, at: tuple[Any, ...], other: Any) -> Any:
    if not at:
        return other
    made = copy.copy(value)
    made[at[0]] = with_other(made[at[0]], at[1:], other)
    return made


WRONG: list[Any] = [None, True, -1, 0, 10**40, 1.5, "x", "0.0.weight", [], {}, {"dict": []}]
WRONG += [{"tensor": name} for name in ("none", "random", "parameters/0.0.weight")]
WRONG += [{"class": "History", "fields": {}}, float("nan")]


@pytest.mark.parametrize("steps", [0, 2])
def test_wrong_values_in_a_header_are_refused_and_change_nothing_or_do_no_harm(
    steps: int, tmp_path: Path
) -> None:
    data = make("mlp", 3, 4)[1]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def compiled() -> fxpipe.Pipeline:
        model = nn.Sequential(*make("mlp", 0, 1)[0].children())[:2]
        options: dict[str, Any] = {**PLAIN, "optimizer": ADAMW, "clip_norm": 1.0, "scaler": scaler}
        pipe = fxpipe.compile(model, 2, loss=MSE, **options)
        run(pipe, data[:steps])
        return pipe

    with compiled() as pipe:
        run(pipe, data)
        pipe.checkpoint(tmp_path / "run")
    content, tensors = header_of(tmp_path / "run")["content"], load_file(tmp_path / "run")

    pipes = [compiled()]

    @example(at=("optimizer", "fields", "parameters", "dict", 2, 0), wrong="0.0.weight")  # twice
    @given(at=st.sampled_from(sorted(places(content), key=str)), wrong=st.sampled_from(WRONG))
    @settings(max_examples=60, deadline=None)
    def check(at: tuple[Any, ...], wrong: Any) -> None:
        write_as(2, tmp_path / "wrong", with_other(content, at, wrong), tensors)
        before = everything(pipes[-1], scaler)
        try:
            pipes[-1].restore(tmp_path / "wrong")
        except fxpipe.CheckpointError:
            assert same(everything(pipes[-1], scaler), before)
        else:
            with pipes.pop() as pipe:
                run(pipe, data[:2])
            pipes.append(compiled())

    check()
    pipes.pop().close()


NAMED: list[tuple[str, Any, str]] = [
    ("history", None, "'history' of its Checkpoint is None"),
    ("history/newest", "x", "'newest' of its History is 'x'"),
    ("history/newest", 1, r"has 1 batches, and the versions \[0, 2\]"),
    ("clipping", {}, "state of clipping is {}"),
    ("clipping", {"scale": -1.0, "grown": 0, "norm": None, "skipped": 0}, "clipping is {'scale'"),
    ("clipping", {"scale": 1.0, "grown": 0, "norm": "x", "skipped": 0}, "clipping is {'scale'"),
    ("random", torch.zeros(3, dtype=torch.uint8), "random generator of cpu is invalid"),
    ("optimizer/groups/0/settings/lr", "evil", "'lr' for '0.0.weight' is 'evil'"),
    ("optimizer/groups/0/settings/betas", (1, 1), "AdamW cannot go on with what .* '0.0.wei"),
    ("optimizer/groups/0/settings/params", [], "'params' for '0.0.weight' is "),
    ("optimizer/parameters/0.0.bias/group", 3, "'0.0.bias' is in parameter group 3 of 1"),
    (
        "optimizer/parameters/0.0.bias/state/exp_avg",
        torch.zeros(5).double(),
        "'exp_avg', which AdamW keeps for '0.0.bias', is 5 of float64 .*, and 6 of float64",
    ),
    (
        "optimizer/parameters/0.0.bias/state/exp_avg",
        torch.zeros(6),
        "'exp_avg', .* is 6 of float32 in the checkpoint, and 6 of float64 here",
    ),
    ("optimizer/parameters/0.0.bias/state", {"exp_avg": torch.zeros(6)}, "'step', .* missing"),
    ("optimizer/parameters/0.0.bias/state/step", "x", "'step', .* is 'x' in the checkpoint"),
    ("history/older", {1: {"0.0.bias": torch.zeros(6)}}, "its version 1 of parameter '0.0.b"),
    ("history/older", {1: {"x": torch.zeros(6)}}, "its version 1 of parameter 'x' is none of"),
]
"""The place of a value, another value there, and what is told."""


@pytest.mark.parametrize("steps", [0, 1])
def test_what_is_wrong_is_named(steps: int, trained: Path, tmp_path: Path) -> None:
    model, data = make("mlp", 1, 4)
    scaler = torch.amp.GradScaler("cpu")
    with fxpipe.compile(model, 2, loss=MSE, optimizer=ADAMW, scaler=scaler, **PLAIN) as pipe:
        run(pipe, data[:steps])
        before = everything(pipe, scaler)
        for at, wrong, message in NAMED:
            saved: Any = checkpoint.read(trained)
            *path, last = at.split("/")
            holder = functools.reduce(inside, path, saved)
            if isinstance(holder, dict):
                holder[last] = wrong
            else:
                object.__setattr__(holder, last, wrong)
            checkpoint.write(saved, tmp_path / "wrong")
            with pytest.raises(fxpipe.CheckpointError, match=message):
                pipe.restore(tmp_path / "wrong")
            assert same(everything(pipe, scaler), before), at


def inside(value: Any, key: str) -> Any:
    if isinstance(value, list):
        return value[int(key)]
    return value[key] if isinstance(value, dict) else getattr(value, key)


def test_the_trial_of_a_state_changes_nothing_of_the_optimizer_and_draws_nothing(
    tmp_path: Path,
) -> None:
    class Counting(torch.optim.SGD):
        """Draws, and keeps a log and a count of its own."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1, momentum=0.9)
            self.log: list[int] = []
            self.count = torch.zeros(())

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            torch.rand(())
            self.log.append(1)
            self.count += 1
            super().step()

    model, data = make("mlp", 2, 4)
    options: dict[str, Any] = {**PLAIN, "optimizer": Counting, "schedule": "1f1b"}
    with fxpipe.compile(model, 2, loss=MSE, **options) as pipe:
        run(pipe, data)
        pipe.checkpoint(tmp_path / "run")
        pipe.restore(tmp_path / "run")
        saved: Any = checkpoint.read(tmp_path / "run")
        saved.optimizer.parameters["3.0.bias"].state["momentum_buffer"] = torch.zeros(1, 2, 3)
        checkpoint.write(saved, tmp_path / "wrong")
        state = torch.get_rng_state()
        with pytest.raises(fxpipe.CheckpointError, match=r"Counting keeps for '3\.0\.bias', is 1"):
            pipe.restore(tmp_path / "wrong")
        assert torch.equal(torch.get_rng_state(), state)
        for each in pipe.optimizers:
            assert isinstance(each, Counting)
            assert (len(each.log), float(each.count)) == (2, 2.0)


def test_an_optimizer_function_that_goes_by_the_stage_wants_the_stages_first(
    tmp_path: Path,
) -> None:
    def by_stage(parameters: Any) -> torch.optim.Optimizer:
        assert len(parameters) <= 4
        return torch.optim.SGD(parameters, lr=0.1 if len(parameters) == 4 else 0.2)

    (x, y), *_ = data = make("mlp", 2, 4)[1]
    options: dict[str, Any] = {**PLAIN, "partition": ["2"], "optimizer": by_stage}
    with fxpipe.compile(make("mlp", 0, 1)[0], 2, loss=MSE, **options) as pipe:
        run(pipe, data)
        pipe.checkpoint(tmp_path / "run")
    with fxpipe.compile(make("mlp", 0, 1)[0], 2, loss=MSE, **options) as pipe:
        with pytest.raises(fxpipe.CheckpointError, match=r"call prepare\(\) before restore\(\)"):
            pipe.restore(tmp_path / "run")
        pipe.prepare(x, target=y)
        pipe.restore(tmp_path / "run")
        assert pipe.batches == 2

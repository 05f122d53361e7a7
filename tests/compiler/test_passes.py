"""The lists of passes: each asks for what its passes take, and is the only one."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.compiler.options import Options
from fxpipe.compiler.passes import LISTS, FoundPass
from fxpipe.errors import PassError
from fxpipe.extend import Extension
from fxpipe.ir.plan import Plan
from fxpipe.ir.recipe import find_recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.passes.runner import VERIFIERS, Pass, run_all

ROOT = Path(__file__).parents[2]
EVERY = [each for passes in LISTS.values() for each in passes]


@pytest.mark.parametrize("each", EVERY, ids=lambda each: each.name)
def test_a_pass_requires_what_it_takes(each: Pass) -> None:
    function = each.function
    if isinstance(function, FoundPass):
        if not function.part.there:
            pytest.skip("its extension is not there")
        function = function.find()
    signatures = [inspect.signature(function)]
    if isinstance(function, type):
        signatures.append(inspect.signature(function.__call__))
    taken = {p.name: p for signature in signatures for p in signature.parameters.values()}
    taken.pop("self", None)
    given = {*each.needs}
    assert given <= taken.keys()
    assert {name for name, p in taken.items() if p.default is p.empty} <= given


@pytest.mark.parametrize("name", ["zb-h1", "2bw"])
def test_replicas_that_clip_sum_first_and_then_clip(name: str) -> None:
    facts = {
        "recipe": find_recipe(name),
        "devices": 2,
        "microbatches": 3,
        "short": False,
        "recompute": "never",
        "recomputes": False,
        "replicated": True,
        "clips": True,
    }
    schedule: Schedule = run_all(LISTS["schedule"], facts)["schedule"]
    for device, row in enumerate(schedule.rows):
        once = [task.kind for task in row if task.microbatch is None]
        assert once == ["A", "C", "U"], device
    alone = run_all(LISTS["schedule"], facts | {"replicated": False})["schedule"]
    assert "A" not in alone.kinds and "C" in alone.kinds


def test_nothing_else_of_the_library_calls_these_passes() -> None:
    names = {getattr(each.function, "__name__", each.name) for each in EVERY}
    importing = [
        (path.relative_to(ROOT).as_posix(), alias.name)
        for path in sorted(ROOT.glob("fxpipe/**/*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fxpipe.passes.")
        for alias in node.names
        if alias.name in names
    ]
    others = {path for path, _ in importing if path.startswith("fxpipe/compiler/")}
    assert others == {"fxpipe/compiler/passes.py"}, importing


@pytest.mark.parametrize("extensions", [["deferred_batchnorm"], [fxpipe.LeafModules("1")]])
def test_a_pass_leaves_what_it_is_given_as_it_is(
    extensions: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, seen = Pass.__call__, set[str]()

    def watched(each: Pass, facts: Mapping[str, Any]) -> Any:
        given = {name: facts[name] for name in each.needs if type(facts[name]) in VERIFIERS}
        before = {name: str(value) for name, value in given.items()}
        made = call(each, facts)
        assert {name: str(value) for name, value in given.items()} == before, each.name
        seen.add(each.name)
        return made

    monkeypatch.setattr(Pass, "__call__", watched)
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)]
    x = torch.randn(8, 4)
    with fxpipe.compile(nn.Sequential(*layers), 2, microbatches=2, extensions=extensions) as pipe:
        pipe(x).sum().backward()
    with fxpipe.compile(
        nn.Sequential(*layers),
        2,
        microbatches=2,
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        clip_norm=1.0,
        recompute="always",
        extensions=extensions,
    ) as pipe:
        pipe.step(x, target=x)
    assert {"seed_randomness", "cut", "lower", "free"} <= seen
    assert ("defer_batchnorm" in seen) == ("deferred_batchnorm" in extensions)


class Nowhere(Extension):
    def passes(self, options: Options) -> Any:
        return {"plan": [("cuts", Pass(nothing, "plan", ""))]}


def nothing(plan: Plan) -> None:
    """Look at a plan."""


def test_a_pass_of_an_extension_behind_none_of_its_list_is_refused() -> None:
    x = torch.randn(8, 4)
    with (
        fxpipe.compile(nn.Linear(4, 4), 1, extensions=[Nowhere()]) as pipe,
        pytest.raises(
            PassError, match=r"Nowhere puts pass 'nothing' after 'cuts', which .*'plan': .*'cut'"
        ),
    ):
        pipe(x)

"""Take one extension after another away, and see in a process of its own that the rest works.

    python -m tests.extensions.taking_away NAME=MODULE,MODULE …

The parent imports what a first step needs of other libraries, but nothing of fxpipe, and forks a
child for each extension. In the child the modules of
the extension, and all that is in them, cannot be imported. It then imports fxpipe, trains a step,
lowers, verifies and prints every schedule of the library; none of that may load
an extension but those that are there by default. Then it asks for all names
that the registry knows: each is found, or the error names a module that is gone. A pipe prints, and
predicts if the simulator is there. A line that cannot be traced is called as it is if leaf modules
are there, and else refused by its name; so is a mesh without ranks. Prints a JSON object: name → ""
or the last lines of the error.
"""

from __future__ import annotations

import importlib.abc
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, get_args

import rich.table  # noqa: F401
import safetensors.torch  # noqa: F401
import torch
import torch._dynamo
import torch._functorch.aot_autograd
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss


class Gone(importlib.abc.MetaPathFinder):
    """Finds none of these modules."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if any(f"{name}.".startswith(f"{module}.") for module in self._modules):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


SHARED = {
    f"fxpipe.extensions.{name}"
    for name in ("attributes", "shares", "shown", "sums", "tables", "tasks")
}
"""What extensions share, which is none of them."""


MEMORY_LIMITS = "fxpipe.extensions.memory_limits"
METRICS = "fxpipe.extensions.metrics"
SIMULATOR = "fxpipe.extensions.simulator"
STAGE_TABLE = "fxpipe.extensions.stage_table"
LEAF_MODULES = "fxpipe.compiler.leaf_modules"
RANKS = "fxpipe.extensions.ranks"


def extensions(but: Sequence[str] = ()) -> list[str]:
    """The modules of other extensions that are loaded."""
    return [
        name
        for name in sys.modules
        if name.startswith("fxpipe.extensions.")
        and name not in SHARED
        and not name.startswith((*but,))
    ]


SCHEDULES = (
    "fxpipe.extensions.copies",
    "fxpipe.extensions.list_schedules",
    "fxpipe.extensions.more_schedules",
    "fxpipe.extensions.overlapping",
)
"""The extensions that have schedules of the library."""


def use_the_rest() -> None:
    """Use what must work without any extension, and loads none."""
    import fxpipe
    from fxpipe.ir.recipe import RECIPES
    from tests.helpers.plans import chain_program

    assert not extensions(), f"import fxpipe loads {extensions()}"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    loss = mse_loss(model(x), y)
    loss.backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=2, loss=mse_loss) as pipe:
        torch.testing.assert_close(pipe.step(x, target=y), loss.detach())
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        assert str(pipe.plan) and str(pipe.program)
    assert not extensions(), f"a step loads {extensions()}"
    for recipe in RECIPES.values():
        schedule = recipe(2, 4).verify()
        assert fxpipe.Schedule.parse(str(schedule)) == schedule
        if "A" not in schedule.kinds:
            chain_program(schedule).verify()
    assert not extensions(SCHEDULES), f"what the core does loads {extensions(SCHEDULES)}"


def ask_for_all(gone: Sequence[str]) -> None:
    """Ask for every name that the registry knows; an extension may need another that is gone.
    A notebook shows a picture if there are pictures."""
    from fxpipe import extend
    from fxpipe.errors import InputError
    from fxpipe.schedules import gpipe

    for door in get_args(extend.Door):
        for name in extend.names(door):
            try:
                extend.find(door, name)
            except InputError as error:
                lost = str(error).partition(" needs the extension ")[2].partition(",")[0]
                assert lost in gone, error
    pictures = not {"fxpipe.extensions.draw", SIMULATOR} & {*gone}
    assert ("image/svg+xml" in gpipe(2, 2)._repr_mimebundle_()) == pictures


def predict(gone: Sequence[str]) -> None:
    """Ask a pipe for what the simulator tells."""
    import fxpipe

    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.ones(4, 3)
    given: dict[str, Any] = {"microbatches": 2, "loss": mse_loss}
    table = STAGE_TABLE not in gone
    with fxpipe.compile(model, ["cpu"] * 2, partition=["1"], **given) as pipe:
        pipe.step(x, target=torch.ones(4, 2))
        assert "Pipeline of Sequential over 2 devices" in str(pipe)
        assert ("not measured yet" in str(pipe)) == table
        if SIMULATOR not in gone:
            assert pipe.simulate().step_time > 0 and "not measured yet" not in str(pipe)
            assert METRICS in gone or "peak_memory/0" in pipe.metrics
            return
        assert METRICS in gone or "peak_memory/0" not in pipe.metrics
        refused(lambda: pipe.simulate(), SIMULATOR)
    limits = fxpipe.Partition(at=["1"], memory_limits=10**9)
    with fxpipe.compile(model, ["cpu"] * 2, partition=limits, **given) as pipe:
        step = partial(pipe.step, x, target=torch.ones(4, 2))
        refused(step, SIMULATOR, *({MEMORY_LIMITS} & {*gone}))


class Branches(nn.Module):
    """Branches on the values of a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh() if x.sum() > 0 else x.sin()


def meet_a_branch(gone: Sequence[str]) -> None:
    """Train a model with a line that cannot be traced: it is called as it is, or named."""
    import fxpipe

    model, x = nn.Sequential(nn.Linear(3, 4), Branches(), nn.Linear(4, 2)), torch.ones(4, 3)
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=2, loss=mse_loss) as pipe:
        try:
            pipe.step(x, target=torch.ones(4, 2))
        except fxpipe.TraceError as error:
            assert LEAF_MODULES in gone
            assert "else x.sin()" in str(error) and "fxpipe.LeafModules('1')" in str(error)
        else:
            assert LEAF_MODULES not in gone and model[0].weight.grad is not None


def give_a_mesh(gone: Sequence[str]) -> None:
    """Compile for a mesh, here of one process."""
    import fxpipe

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    mesh = init_device_mesh("cpu", (1,))
    if RANKS in gone:
        refused(lambda: fxpipe.compile(nn.Linear(2, 2), mesh), RANKS)
    else:
        fxpipe.compile(nn.Linear(2, 2), mesh).close()


def refused(call: Callable[[], object], *names: str) -> None:
    """Call what needs these extensions, and expect to be told of one."""
    from fxpipe.errors import InputError

    try:
        call()
    except InputError as error:
        assert any(f"needs the extension {name}" in str(error) for name in names), error
    else:
        raise AssertionError(f"it does without {names}")


def taken_away(modules: Sequence[str]) -> str:
    """Fork, and use the rest without these modules. Returns the last lines of the error, or ""."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        told = ""
        try:
            os.close(reading)
            sys.meta_path.insert(0, Gone(modules))
            use_the_rest()
            ask_for_all(modules)
            predict(modules)
            meet_a_branch(modules)
            give_a_mesh(modules)
        except BaseException:
            told = "".join(traceback.format_exc().splitlines(keepends=True)[-8:])
        with os.fdopen(writing, "w") as out:
            out.write(told or "works")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told_by_child:
        told = told_by_child.read()
    os.waitpid(child, 0)
    return "" if told == "works" else told or "the process ended"


if __name__ == "__main__":
    assert not [name for name in sys.modules if name.startswith("fxpipe")]
    given = [text.partition("=") for text in sys.argv[1:]]
    print(json.dumps({name: taken_away(modules.split(",")) for name, _, modules in given}))

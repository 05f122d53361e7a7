"""Stages that are divided over a dimension of a mesh train like one process without any mesh."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fxpipe
from fxpipe.errors import ExecutionError, InputError
from fxpipe.extensions.tensor_parallel.collectives import communicates
from fxpipe.extensions.tensor_parallel.times import ColumnLink
from fxpipe.ir.recipe import find_recipe
from fxpipe.kernels.graph import GraphKernel
from fxpipe.passes.partition import measure
from fxpipe.passes.partition.measure import _Times
from tests.extensions.tensor_parallel.models import (
    WIDTH,
    data,
    looped,
    loss,
    made,
    near,
    plan_of,
)
from tests.helpers.flushing import FLUSHING, TRAINING
from tests.helpers.profiles import DEEP
from tests.helpers.ranks import DeviceMesh, Failed, on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = ("attention", "mlp", "embed", "head")
CUTS: dict[int, Any] = {1: [], 2: ["layers.1"], 4: ["layers.0.mlp", "layers.1", "layers.1.mlp"]}


def pipe_of(mesh: DeviceMesh, parts: Any = ALL, model: Any = None, **options: Any) -> Any:
    model = made() if model is None else model
    parallelize_module(model, mesh["tp"], plan_of(len(model.layers), parts))
    stages = find_recipe(options.get("schedule", "1f1b")).stages(mesh["pp"].size())
    defaults: dict[str, Any] = {
        "microbatches": 4 // (mesh["dp"].size() if "dp" in (mesh.mesh_dim_names or ()) else 1),
        "loss": loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "partition": CUTS.get(stages, "auto"),
    }
    return fxpipe.compile(model, mesh, **{**defaults, **options})


def own(mesh: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of this rank's replica."""
    x, y = data()
    if "dp" not in (mesh.mesh_dim_names or ()):
        return x, y
    replica, count = mesh["dp"].get_local_rank(), mesh["dp"].size()
    return x.chunk(count)[replica], y.chunk(count)[replica]


def trained(
    _: DeviceMesh, shape: dict[str, int], cases: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The losses of two steps and the weights after them, in each case."""
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    found = []
    x, y = own(mesh)
    for case in cases:
        with pipe_of(mesh, **case) as pipe:
            seen: dict[str, Any] = {
                f"loss {step}": pipe.step(x, target=y).clone() for step in range(2)
            }
            seen |= pipe.state_dict(full=True)
            found.append(seen)
    return found


CASES: list[dict[str, Any]] = [
    {"schedule": "zb-h1", "clip_norm": 0.5},
    {"schedule": "looped-bfs", "recompute": "always", "parts": ("attention", "mlp", "sequence")},
]
CASES += [{"schedule": name} for name in TRAINING if DEEP]


@pytest.mark.smoke
def test_losses_and_weights_are_those_of_one_process() -> None:
    for found in on_ranks(4, trained, {"pp": 2, "tp": 2}, CASES):
        for case, seen in zip(CASES, found, strict=True):
            near(seen, looped(made(), clip=case.get("clip_norm")), str(case))


def test_they_are_so_beside_replicas_whose_weights_are_sharded_in_any_order_of_the_mesh() -> None:
    cases: list[dict[str, Any]] = [
        {"schedule": "1f1b"},
        {"schedule": "looped-bfs", "extensions": [fxpipe.Sharding("zero3")], "clip_norm": 0.5},
    ]
    if DEEP:
        every: list[Any] = [fxpipe.Sharding("zero3")]
        cases += [{"schedule": name, "extensions": every} for name in FLUSHING]
        others = fxpipe.Sharding("zero2"), fxpipe.Replicas(shard_optimizer=True), fxpipe.Replicas()
        cases += [{"extensions": [each], "clip_norm": 0.5} for each in others]
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        cases.append({"extensions": every, "clip_norm": 0.5, "scaler": scaler})
    for found in on_ranks(8, trained, {"dp": 2, "tp": 2, "pp": 2}, cases):
        for case, seen in zip(cases, found, strict=True):
            near(seen, looped(made(), clip=case.get("clip_norm")), str(case))


class Tied(nn.Module):
    """A stack of layers, of which some share a weight, in a width of any multiple of the ranks."""

    def __init__(self, widths: list[int], tied: bool, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * width, bias=bias) for width in widths)
        self.down = nn.ModuleList(nn.Linear(2 * width, WIDTH, bias=bias) for width in widths)
        if tied:
            self.tie()

    def tie(self) -> None:
        for up in self.up:
            if up.weight.shape == self.up[0].weight.shape:
                up.weight = self.up[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.tanh(up(x)))
        return x


@st.composite
def drawn(draw: Any) -> dict[str, Any]:
    widths = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    return {
        "widths": widths,
        "tied": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "ends": draw(st.lists(st.sampled_from(["pair", "up", "none"]), min_size=4, max_size=4)),
        "schedule": draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"])),
    }


def stack(case: dict[str, Any]) -> Tied:
    torch.manual_seed(0)
    return Tied(case["widths"], case["tied"], case["bias"])


def of_drawn(_: DeviceMesh, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from torch.distributed.tensor.parallel import RowwiseParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    found = []
    for case in cases:
        model = stack(case)
        plan: dict[str, Any] = {}
        for i in range(len(case["widths"])):
            if case["tied"] or case["ends"][i] == "pair":  # a shared weight is divided once
                plan |= {f"up.{i}": ColwiseParallel(), f"down.{i}": RowwiseParallel()}
            elif case["ends"][i] == "up":
                plan[f"up.{i}"] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tp"], plan)
        if case["tied"]:
            assert model.up[0].weight is not model.up[1].weight  # each was divided by itself
            model.tie()
        with fxpipe.compile(
            model,
            mesh,
            schedule=case["schedule"],
            microbatches=4,
            loss=nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ) as pipe:
            seen = {f"loss {step}": pipe.step(x, target=x).clone() for step in range(2)}
            found.append(seen | pipe.state_dict(full=True))
    return found


@settings(max_examples=20 if DEEP else 1, deadline=None)
@given(st.lists(drawn(), min_size=2, max_size=3))
def test_drawn_models_train_like_one_process(cases: list[dict[str, Any]]) -> None:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    expected = []
    for case in cases:
        model = stack(case)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = {}
        for step in range(2):
            optimizer.zero_grad()
            total = torch.zeros(())
            for part in x.chunk(4):
                each = nn.functional.mse_loss(model(part), part) / 4
                each.backward()
                total += each.detach()
            optimizer.step()
            seen[f"loss {step}"] = total
        expected.append(seen | {n: p.detach() for n, p in model.named_parameters()})
    for found in on_ranks(4, of_drawn, cases):
        for case, seen, wanted in zip(cases, found, expected, strict=True):
            near(seen, wanted, str(case))


# what the ranks of a stage agree on


def looked_at(_: DeviceMesh) -> dict[str, Any]:
    """What a rank has of a plan that was cut by measured times, by clocks that differ."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Times, "enough", lambda _: False)
        patch.setattr(measure, "_ROUNDS", 2 + 3 * mesh["tp"].get_local_rank())
        pipe = pipe_of(mesh, partition="auto")
        x, y = data()
        pipe.step(x, target=y)
    nodes = [
        node
        for stage in pipe.plan.stages
        for module in (stage.kernel.forward_graph, stage.kernel.backward_graph)
        for node in module.graph.nodes
        if communicates(node)
    ]
    names = {node.args[-1] for node in nodes}
    state = pipe.state_dict()
    found = {
        "cut": [stage.modules for stage in pipe.plan.stages],
        "names": names,
        "count": len(nodes),
        "leaf modules": pipe.traced.calls,
        "kinds": {n: type(x).__name__ for n, x in state.items()},
        "program": str(pipe.program),
    }
    model = pipe._model
    plain = not any(isinstance(p, DTensor) for p in model.parameters())
    pipe.close()
    again = sum(isinstance(p, DTensor) for p in model.parameters())
    return found | {"plain": plain, "again": again}


@pytest.mark.smoke
def test_all_ranks_have_one_cut_and_one_program_and_groups_named_by_dimension() -> None:
    first, *others = on_ranks(4, looked_at)
    assert first["names"] == {"tp"}
    assert first["count"] > 0
    assert first["plain"] and first["again"] > 0 and not first["leaf modules"]
    assert first["kinds"]["embed.weight"] == "DTensor"
    assert first["kinds"]["layers.0.n1.weight"] == "Tensor"
    for other in others:
        for key in ("cut", "names", "count", "program", "again"):
            assert other[key] == first[key], key


def weighed(_: DeviceMesh) -> list[tuple[float, float]]:
    """The seconds of each stage's forward and backward where a byte takes one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    with pytest.MonkeyPatch.context() as patch:
        where = "fxpipe.extensions.tensor_parallel.extension.way_of"
        patch.setattr(where, lambda dim: ColumnLink(2, 0.0, 1.0))
        with pipe_of(mesh, ("mlp",), partition="auto") as pipe:
            x, y = data()
            pipe.step(x, target=y)
            costs = [stage.costs for stage in pipe.plan.stages]
            last = max(span.end for span in pipe.simulate().spans)
    found = [(each.forward, each.backward) for each in costs if each]
    assert last > 4 * max(map(sum, found))  # four micro-batches
    return found


def test_predictions_count_the_bytes_of_collectives() -> None:
    value = 2 * 6 * WIDTH * 4  # the bytes of a micro-batch behind each block
    moved = value * 2 / 2  # two ranks send half of it there and half back
    for found in on_ranks(4, weighed):
        # the sum of the block's output; the sums of the gradients of the inputs of w1 and w3
        total = [sum(each) for each in zip(*found, strict=True)]
        assert total == pytest.approx([2 * moved, 2 * 2 * moved], rel=1e-3)


def failing(_: DeviceMesh) -> dict[str, Any]:
    """What ranks are told when one column fails in a part of a stage, and that they go on."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    x, y = data()
    told: dict[str, Any] = {}
    with pipe_of(mesh) as pipe:
        told["loss 0"] = pipe.step(x, target=y).clone()
        for operation in ("forward", "backward"):
            begin = time.monotonic()
            with pytest.MonkeyPatch.context() as patch:
                if mesh.get_local_rank("pp") == mesh.get_local_rank("tp") == 1:
                    patch.setattr(GraphKernel, operation, broken)
                with pytest.raises(ExecutionError) as raised:
                    pipe.step(x, target=y)
            told[operation] = type(raised.value).__name__, "here" in str(raised.value)
            assert time.monotonic() - begin < 10
        told["loss 1"] = pipe.step(x, target=y).clone()
        told |= pipe.state_dict(full=True)
    return told


def broken(*_: Any) -> Any:
    raise OSError("here")


def test_a_failure_in_one_column_ends_the_step_on_all_ranks_and_all_go_on() -> None:
    expected = looped(made())
    for rank, told in enumerate(on_ranks(4, failing)):
        near(told, expected, "after failures")
        kind = "ExecutionError" if rank == 3 else "RankError"
        assert told["forward"] == told["backward"] == (kind, True)


def compiling(_: DeviceMesh) -> dict[str, Any]:
    """What ranks are told when the model itself fails in one column, and that they go on."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    x, y = data()
    told: dict[str, Any] = {}
    with pipe_of(mesh) as pipe:
        block: Any = pipe._model.layers[1]
        failing = block.register_forward_pre_hook(broken) if mesh.get_rank() == 3 else None
        begin = time.monotonic()
        with pytest.raises(fxpipe.FxpipeError) as raised:
            pipe.step(x, target=y)
        told["first"] = type(raised.value).__name__, "here" in str(raised.value)
        assert time.monotonic() - begin < 10
        if failing is not None:
            failing.remove()
        told |= {f"loss {step}": pipe.step(x, target=y).clone() for step in range(2)}
        told |= pipe.state_dict(full=True)
    ones = torch.ones(1)
    torch.distributed.all_reduce(ones, group=mesh.get_group("tp"))
    assert ones.item() == 2  # the mesh is as it was
    return told


def test_a_failure_in_one_column_while_it_is_compiled_ends_on_all_ranks_and_all_go_on() -> None:
    expected = looped(made())
    for rank, told in enumerate(on_ranks(4, compiling)):
        near(told, expected, "after a failure")
        assert told["first"] == ("InputError" if rank == 3 else "RankError", True)


def saved(_: DeviceMesh, folder: Path, load: bool, shape: dict[str, int]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    x, y = data()
    adam = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01)}
    with pipe_of(mesh, **adam) as pipe:
        if load:
            pipe.prepare(x, target=y)
            pipe.load(folder)
        pipe.step(x, target=y)
        pipe.save(folder)
        state: dict[str, Any] = pipe.state_dict(full=True)
        pipe.load_state_dict(state)
        near(pipe.state_dict(full=True), state, "loaded")
    return state


def test_a_folder_loads_with_another_number_of_parts_and_in_one_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    on_ranks(4, saved, folder, False, {"pp": 2, "tp": 2})
    ranks = on_ranks(4, saved, folder, True, {"tp": 4, "pp": 1})
    x, y = data()
    losses = []
    for load in (False, True):
        with fxpipe.compile(
            made(),
            1,
            microbatches=4,
            loss=loss,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        ) as pipe:
            if load:
                pipe.load(folder)
                assert pipe.batches == 2
                near(ranks[1], pipe.state_dict(), "of four parts")
            for _ in range(0 if load else 2):
                pipe.step(x, target=y)
            losses.append(pipe.step(x, target=y).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def refused(_: DeviceMesh) -> None:
    """Whoever is slower may be told of the other's error."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    model = made()
    parallelize_module(model, mesh["tp"], plan_of(2, ALL))
    with pytest.raises(fxpipe.FxpipeError, match="is a DTensor, and the pipe has no mesh"):
        fxpipe.compile(model, 1, loss=loss)
    model = made(hidden=25)
    parallelize_module(model, mesh["tp"], plan_of(2, ("mlp",)))
    with pytest.raises(
        fxpipe.FxpipeError, match="has 25 entries in dimension 0, which 2 ranks of 'tp'"
    ):
        fxpipe.compile(model, mesh, loss=loss)
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    model = made()
    parallelize_module(model, other, plan_of(2, ("mlp",)))
    with pytest.raises(
        fxpipe.FxpipeError, match="over the dimension 'ep', and the pipe has the mesh"
    ):
        fxpipe.compile(model, mesh, loss=loss)
    model = made()
    table = distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)])
    model.register_buffer("table", table)
    with pytest.raises(fxpipe.FxpipeError, match="buffer 'table' of the model is a DTensor"):
        fxpipe.compile(model, mesh, loss=loss)


@pytest.mark.smoke
def test_what_cannot_be_divided_is_refused_by_name() -> None:
    on_ranks(2, refused)


def another_cut(_: DeviceMesh) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    model = made()
    parallelize_module(model, mesh["tp"], plan_of(2, ALL))
    with pytest.raises(InputError, match="the mesh that the pipe was given has no dimension for"):
        fxpipe.compile(model, mesh["pp"], loss=loss)
    other = mesh["tp"].get_local_rank() == 1
    pipe = pipe_of(mesh, partition=["layers.0.mlp"] if other else ["layers.1"])
    x, y = data()
    pipe.step(x, target=y)
    return "accepted"


def test_a_column_with_another_cut_is_noticed_before_anything_runs() -> None:
    with pytest.raises(Failed, match="differs between ranks"):
        on_ranks(4, another_cut)

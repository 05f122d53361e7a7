"""Experts over a dimension of their own, losses in parts, and failures at drawn places."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

import fxpipe
from fxpipe.extensions.tensor_parallel.collectives import communicates, name_groups
from fxpipe.ir.traced import Traced, WholeBackward
from fxpipe.kernels.graph import GraphKernel
from fxpipe.passes.graph.lazy_module import copied
from tests.extensions.ranks.control import counting
from tests.extensions.ranks.test_lost_ranks import survivors, told_of
from tests.extensions.tensor_parallel.models import data, looped, loss, made, near, plan_of
from tests.helpers.failing import die
from tests.helpers.profiles import DEEP, deep
from tests.helpers.ranks import DeviceMesh, on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

SGD: dict[str, Any] = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}


class Experts(nn.Module):
    """Token t goes to expert t mod E. Over a mesh each rank has some of the experts, and sends
    each token to the rank of its expert and back."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.randn(4, 8, 8) / 8**0.5)
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        y = x.reshape(-1, 4, 8).transpose(0, 1)
        if self.mesh is None:
            return x + torch.bmm(y, self.weight).transpose(0, 1).reshape(x.shape)
        mesh, size = self.mesh, self.mesh.size()
        whole = DTensor.from_local(y, mesh, [Replicate()], run_check=False)
        mine = whole.redistribute(placements=[Shard(1)]).to_local()  # this rank's tokens
        came = exchanged(mine, mesh).view(size, 4 // size, -1, 8).transpose(0, 1)
        z = torch.bmm(came.reshape(4 // size, -1, 8), self.weight.to_local())
        back = z.view(4 // size, size, -1, 8).transpose(0, 1).reshape(mine.shape)
        parts = DTensor.from_local(exchanged(back, mesh), mesh, [Shard(1)], run_check=False)
        z = parts.redistribute(placements=[Replicate()]).to_local()
        return x + z.transpose(0, 1).reshape(x.shape)


def exchanged(x: Tensor, mesh: DeviceMesh) -> Tensor:
    found: Tensor = functional.all_to_all_single_autograd(
        x.contiguous(), None, None, mesh.get_group()
    )
    return found


class Mixture(nn.Module):
    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.a, self.first = nn.Linear(8, 8), Experts(mesh)
        self.b, self.second = nn.Linear(8, 8), Experts(mesh)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.b(self.first(self.a(x))))
        return out


def mixture(mesh: DeviceMesh | None = None) -> Mixture:
    torch.manual_seed(0)
    return Mixture(mesh)


X = torch.randn(8, 8, 8, generator=torch.Generator().manual_seed(1))


def experts(_: DeviceMesh) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "pp"))
    model = mixture(mesh["ep"])
    for each in (model.first, model.second):
        parts = distribute_tensor(each.weight.detach(), mesh["ep"], [Shard(0)])
        each.weight = nn.Parameter(parts)
    options: dict[str, Any] = {**SGD, "schedule": "zb-h1", "partition": ["b"], "microbatches": 4}
    with fxpipe.compile(model, mesh, loss=F.mse_loss, **options) as pipe:
        found = {f"loss {step}": pipe.step(X, target=X).clone() for step in range(2)}
        assert "all_to_all_single" in str(pipe.plan) and "'ep'" in str(pipe.plan)
        return found | dict(pipe.state_dict(full=True))


@pytest.mark.deep
def test_experts_over_a_dimension_of_their_own_train_like_one_process() -> None:
    expected = looped(mixture(), same=X)
    for found in on_ranks(4, experts):
        near(found, expected, "experts")


def normed() -> nn.Sequential:
    """Layers in parts with BatchNorms between them."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.BatchNorm1d(8)]
    layers += [nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.BatchNorm1d(8)]
    return nn.Sequential(*layers).double()


def with_batchnorm(_: DeviceMesh) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    model, x = normed(), X[0].double()
    plan: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    plan |= {"4": ColwiseParallel(), "6": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    options: dict[str, Any] = {**SGD, "partition": ["4"], "microbatches": 2}
    with fxpipe.compile(model, mesh, loss=F.mse_loss, **options) as pipe:
        found = {f"loss {step}": pipe.step(x, target=x).clone() for step in range(2)}
        return found | dict(pipe.state_dict(full=True))


@pytest.mark.deep
def test_batchnorms_beside_parts_are_those_of_one_process() -> None:
    expected = looped(normed(), microbatches=2, same=X[0].double())
    assert expected["7.num_batches_tracked"] == 4
    for found in on_ranks(4, with_batchnorm):
        near(found, expected, "BatchNorm")


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m = made()

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        return loss(self.m(ids), target)


def in_parts(_: DeviceMesh) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    model, (x, y) = WithLoss(), data()
    plan = plan_of(2, ("attention", "mlp", "embed"))
    plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh["tp"], {f"m.{name}": how for name, how in plan.items()})
    every = fxpipe.LossWeight(lambda ids, target: torch.tensor(target.numel()))
    options: dict[str, Any] = {**SGD, "partition": ["m.layers.1"], "microbatches": 4}
    with loss_parallel(), fxpipe.compile(model, mesh, extensions=[every], **options) as pipe:
        found = {f"loss {step}": pipe.step(x, y).clone() for step in range(2)}
        return found | {n[2:]: x for n, x in pipe.state_dict(full=True).items()}


@pytest.mark.deep
def test_a_loss_of_which_each_rank_has_a_part_of_the_classes_is_that_of_one_process() -> None:
    for found in on_ranks(4, in_parts):
        near(found, looped(made()), "loss parallel")


def refused(_: DeviceMesh) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    model, (x, y) = made(), data()
    plan = plan_of(2, ("mlp",))
    plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh["tp"], plan)
    with (
        fxpipe.compile(model, mesh, loss=loss) as pipe,
        pytest.raises(fxpipe.FxpipeError, match=r"returns a DTensor that is .*output_layouts="),
    ):
        pipe.step(x, target=y)
    torch.manual_seed(mesh.get_local_rank("tp"))
    model = type(model)()
    parallelize_module(model, mesh["tp"], plan_of(2, ("mlp",)))
    with (
        fxpipe.compile(model, mesh, loss=loss) as pipe,
        pytest.raises(fxpipe.RankError, match="what is not divided differs between ranks"),
    ):
        pipe.step(x, target=y)
    return "refused"


@pytest.mark.smoke
def test_an_output_in_parts_and_columns_with_other_weights_are_refused() -> None:
    assert on_ranks(2, refused) == ["refused"] * 2


class Branching(nn.Module):
    """What it computes depends on the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        out: Tensor = self.down(torch.tanh(up) if float(x.detach().sum()) > 0 else up)
        return out


def branching() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8), Branching())


def beside_a_leaf(_: DeviceMesh) -> list[float]:
    """The losses where a module that cannot be traced has whole parameters; one with parts is
    refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    options: dict[str, Any] = {**SGD, "partition": ["2"], "microbatches": 2, "loss": F.mse_loss}
    model, x = branching(), X[0]
    parts: Any = {"2.up": ColwiseParallel(), "2.down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], parts)
    with (
        fxpipe.compile(model, mesh, **options) as pipe,
        pytest.raises(fxpipe.FxpipeError, match=r"'2' is called as it is.*'2\.up\.weight' in it"),
    ):
        pipe.step(x, target=x)
    model, parts = branching(), {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], parts)
    with fxpipe.compile(model, mesh, **options) as pipe:
        return [pipe.step(x, target=x).item() for _ in range(2)]


@pytest.mark.filterwarnings("ignore")
def test_a_module_that_is_called_as_it_is_has_whole_parameters_or_is_refused() -> None:
    expected = looped(branching(), microbatches=2, same=X[0])
    losses = [expected[f"loss {step}"].item() for step in range(2)]
    for found in on_ranks(4, beside_a_leaf):
        assert found == pytest.approx(losses, rel=1e-6)


def without_one(traced: Traced, at: int) -> Traced:
    """A graph and its backward without one of their collectives."""
    traced = copied(traced)
    assert traced.backward is not None
    backward = fx.Graph()
    backward.output(backward.graph_copy(traced.backward.graph, {}))
    every = [n for graph in (traced.graph, backward) for n in graph.nodes if communicates(n)]
    node = every[at % len(every)]
    node.replace_all_uses_with(node.args[0])
    node.graph.erase_node(node)
    return replace(traced, backward=replace(traced.backward, graph=backward))


def dropped(_: DeviceMesh, columns: int, at: int) -> str:
    """What a rank is told where the graphs of some columns lack a collective."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    model, (x, y) = made(), data()
    parallelize_module(model, mesh["tp"], plan_of(2, ("attention", "mlp")))
    with pytest.MonkeyPatch.context() as patch:
        if mesh.get_local_rank("tp") < columns:
            where = "fxpipe.extensions.tensor_parallel.extension.name_groups"
            patch.setattr(where, lambda *of: without_one(name_groups(*of), at))
        options: dict[str, Any] = {**SGD, "partition": ["layers.1"]}
        with (
            fxpipe.compile(model, mesh, loss=loss, microbatches=4, **options) as pipe,
            pytest.raises(fxpipe.FxpipeError) as raised,
        ):
            pipe.step(x, target=y)
    return str(raised.value)


@pytest.mark.parametrize(("columns", "at"), [(1, 0), *deep((2, 1), (2, -1), (1, -1), (2, 0))])
def test_a_collective_that_is_dropped_is_noticed_before_the_step(columns: int, at: int) -> None:
    """By agreement where one column lacks it, else where the plan is compared with the model."""
    what = "differs between ranks" if columns == 1 else "differ"
    for told in on_ranks(4, dropped, columns, at):
        assert what in told


@pytest.mark.smoke
def test_a_collective_of_another_group_or_not_waited_for_is_refused() -> None:
    c10d = torch.ops._c10d_functional
    for group, reads, what in (
        ("3", False, r"over a process group \('3'\) that is no dimension"),
        ("0", True, "read before it is waited for"),
    ):
        graph = fx.Graph()
        x = graph.placeholder("x")
        made_by = graph.call_function(c10d.all_reduce.default, (x, "sum", group))
        wait = graph.call_function(c10d.wait_tensor.default, (made_by,))
        graph.output((wait, *([graph.call_function(torch.neg, (made_by,))] if reads else [])))
        back = fx.Graph()
        back.output(())
        spec = torch.utils._pytree.tree_structure(())
        traced = Traced(fx.GraphModule(nn.Module(), graph), (), (), {}, ("x",), (), (), spec)
        traced = replace(traced, backward=WholeBackward(back, {}, {}))
        with pytest.raises(fxpipe.TraceError, match=what):
            name_groups(traced, {"0": "tp"})


COUNT = 200 if DEEP else 4


def failing(_: DeviceMesh, seed: int) -> tuple[int, dict[str, Any]]:
    """Fail on drawn ranks, in drawn parts of stages at drawn times, between steps that do not."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    here = 2 * mesh.get_local_rank("pp") + mesh.get_local_rank("tp")
    model, (x, y) = made(), data()
    parallelize_module(model, mesh["tp"], plan_of(2, ("attention", "mlp", "embed", "head")))
    generator = torch.Generator().manual_seed(seed)
    told = 0
    options: dict[str, Any] = {**SGD, "schedule": "zb-h1", "partition": ["layers.1"]}
    with fxpipe.compile(model, mesh, loss=loss, microbatches=4, **options) as pipe:
        found = {"loss 0": pipe.step(x, target=y).clone()}
        for _attempt in range(COUNT):
            draws = torch.randint(1000, (3,), generator=generator).tolist()
            name = ("forward", "input_grad", "weight_grad")[draws[0] % 3]
            rank, left = draws[1] % 4, [draws[2] % 4]
            real = getattr(GraphKernel, name)

            def broken(*args: Any, real: Any = real, left: list[int] = left) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise OSError("here")
                return real(*args)

            begin = time.monotonic()
            with pytest.MonkeyPatch.context() as patch:
                if rank == here:
                    patch.setattr(GraphKernel, name, broken)
                with pytest.raises(fxpipe.ExecutionError, match="here"):
                    pipe.step(x, target=y)
            assert time.monotonic() - begin < 10
            told += 1
        found["loss 1"] = pipe.step(x, target=y).clone()
        return told, found | dict(pipe.state_dict(full=True))


@pytest.mark.parametrize("seed", [0, *deep(1)])
def test_after_drawn_failures_no_rank_waits_and_no_number_is_wrong(seed: int) -> None:
    for told, found in on_ranks(4, failing, seed):
        assert told == COUNT
        near(found, looped(made()), "after failures")


def killed(_: DeviceMesh, folder: str, where: str) -> str:
    """Of two ranks that have the parts of the last stage one is killed; what the others are told,
    of which one waits in a collective."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    model, (x, y) = made(), data()
    parallelize_module(model, mesh["tp"], plan_of(2, ("attention", "mlp", "embed", "head")))
    options: dict[str, Any] = {**SGD, "partition": ["layers.1"], "microbatches": 4}
    with fxpipe.compile(model, mesh, loss=loss, **options) as pipe:
        victim: Any = model.layers[1].mlp
        if where == "compile":
            if mesh.get_rank() == 3:
                victim.register_forward_pre_hook(lambda *_: die())
        else:
            pipe.step(x, target=y)
        with pytest.MonkeyPatch.context() as patch:
            if mesh.get_rank() == 3 and where != "compile":
                patch.setattr(GraphKernel, where, lambda *_: die())
            with told_of(3, 10) as raised:
                pipe.step(x, target=y)
        with told_of(3, 1):
            pipe.step(x, target=y)
    return str(raised.value)


@pytest.mark.skipif(os.name != "posix", reason="processes are killed as POSIX does")
@pytest.mark.parametrize("where", ["backward", *deep("forward", "compile")])
def test_a_rank_that_is_killed_beside_one_with_another_part_is_named_by_all(where: str) -> None:
    for told in survivors(4, {3}, killed, where):
        assert told.startswith("rank 3 (device 1, part 1, ")


def late(mesh: DeviceMesh | int, schedule: str) -> list[float]:
    """The losses of steps whose batches overlap."""
    model, (x, y) = made(), data()
    if not isinstance(mesh, int):
        parallelize_module(model, mesh["tp"], plan_of(2, ("attention", "mlp", "embed", "head")))
    options: dict[str, Any] = {**SGD, "partition": ["layers.1"], "schedule": schedule}
    with fxpipe.compile(model, mesh, loss=loss, microbatches=4, **options) as pipe:
        return [pipe.step(x, target=y).item() for _ in range(4)]


def late_in_parts(_: DeviceMesh, schedule: str) -> list[float]:
    return late(init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")), schedule)


@pytest.mark.deep
@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_batches_overlap_as_in_one_process(schedule: str) -> None:
    expected = late(2, schedule)
    for found in on_ranks(4, late_in_parts, schedule):
        assert found == pytest.approx(expected, rel=1e-6)


def told(_: DeviceMesh, shape: tuple[int, ...], names: tuple[str, ...]) -> Counter[str]:
    """What a rank tells others and asks of the store in a step that is like earlier ones."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model, (x, y) = made(), data()
    if "tp" in names:
        parallelize_module(model, mesh["tp"], plan_of(2, ("attention", "mlp", "embed", "head")))
    with fxpipe.compile(
        model, mesh, loss=loss, microbatches=4, partition=["layers.1"], **SGD
    ) as pipe:
        for _step in range(3):
            pipe.step(x, target=y)
        with counting() as found:
            pipe.step(x, target=y)
    del (
        found["messages"],
        found["looks"],
    )  # the tree has more ranks, and its root looks now and then
    return found


def test_a_warm_step_asks_nothing_of_the_store_and_exchanges_what_one_without_parts_does() -> None:
    whole = on_ranks(2, told, (2,), ("pp",))
    parts = on_ranks(4, told, (2, 2), ("pp", "tp"))
    assert whole + parts == [{"the call": 1, "end": 1}] * 6


def examples(mesh: DeviceMesh, folder: str, steps: int) -> list[float]:
    """The script of the example, as one of four processes."""
    from examples.llama_mesh import train

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(mesh.get_rank()))
        return train(folder, steps, (1, 2, 2))


@pytest.mark.deep
def test_the_example_trains_like_one_process_which_goes_on_from_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from examples.llama_mesh import train

    parts = on_ranks(4, examples, str(tmp_path / "parts"), 2)
    whole = train(str(tmp_path / "whole"), 3, (1, 1, 1))
    for losses in parts:
        assert losses == pytest.approx(whole[:2], rel=1e-6)
    assert train(str(tmp_path / "parts"), 1, (1, 1, 1)) == pytest.approx(whole[2:], rel=1e-6)

"""Plans: each way that is proposed compiles, fits, and is as fast as was predicted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxpipe
from fxpipe import Cluster, Device, Link
from fxpipe.errors import InputError, PartitionError
from fxpipe.extensions.paper.found import Ranking, Way
from fxpipe.extensions.paper.layouts import layouts
from fxpipe.extensions.paper.profile import Profile

pytestmark = pytest.mark.models
smoke = pytest.mark.smoke

SMALL = Device(
    flops=1e12,
    bandwidth=1e11,
    memory=1e9,
    link=Link(1e-6, 1e10),
    network=Link(1e-5, 1e9),
)


class Block(nn.Module):
    """A residual block of two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(self.norm(x))
        return y


class Tower(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, blocks: int, width: int = 32, words: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), tokens.flatten())


def tower(blocks: int = 8) -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return Tower(blocks), torch.zeros(4, 16, dtype=torch.long)


def planned(cluster: Cluster | Device, batch: int = 32, **options: Any) -> Ranking:
    model, tokens = tower()
    example = (tokens,), {"target": tokens}
    return fxpipe.plan(model, cluster, batch=batch, example=example, loss=loss, **options)


@contextmanager
def fake_ranks(size: int) -> Iterator[None]:
    """Inside, this process is the first of so many ranks whose messages go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_ways_are_sorted_fit_and_use_all_devices() -> None:
    found = planned(Cluster(Cluster(SMALL, 4), 2), optimizer=torch.optim.AdamW)
    assert len(found) == 10
    assert [way.seconds for way in found] == sorted(way.seconds for way in found)
    for way in found:
        shape = way.layout.shape
        assert shape["dp"] * shape["pp"] * shape["tp"] == 8
        assert way.candidate.microbatches * way.samples * shape["dp"] == 32
        assert way.memory <= SMALL.memory
        assert 0 < way.mfu <= 1
        assert way.limit in {*way.waits, "computing"}
    text = str(found)
    assert "lost:" in text
    assert "slower; waits for" in text


def options_on_cpu(way: Way) -> dict[str, Any]:
    """The options of a way, for one process with CPU devices."""
    return {key: x for key, x in way.options.items() if key != "extensions"}


def test_each_way_compiles_into_stages_that_begin_where_it_says() -> None:
    found = planned(Cluster(SMALL, 4), batch=16, keep=6)
    seen = set()
    for way in found:
        devices = way.layout.stages
        seen.add((devices, way.candidate.recipe.name))
        batch = way.candidate.microbatches * way.samples
        model = Tower(8)
        tokens = torch.randint(50, (batch, 16))
        options = options_on_cpu(way)
        if devices == 1:
            del options["partition"]
        example = ((tokens,), {"target": tokens})
        with fxpipe.compile(model, ["cpu"] * devices, example=example, **options, costs=SMALL) as p:
            assert len(p.plan.stages) == len(way.begins) + 1
            predicted = p.simulate().step_time
        # links and sums over replicas apart, what the graphs take is what was counted
        assert predicted == pytest.approx(way.seconds, rel=0.6)
    assert len(seen) > 2


@smoke
def test_the_mesh_of_a_way_goes_into_compile() -> None:
    found = planned(Cluster(SMALL, 8), tensors={"blocks.*.mlp": "columns/rows"}, tp=2, pp=2)
    way = found[0]
    assert way.layout.shape == {"dp": 2, "pp": 2, "tp": 2}
    with fake_ranks(8):
        whole = way.device_mesh("cpu")
        assert whole.mesh_dim_names == ("dp", "pp", "tp")
        assert whole.mesh.shape == (2, 2, 2)


@smoke
def test_tensor_parallelism_divides_products_and_sums_what_they_give() -> None:
    model, tokens = tower(2)
    tensors = {"blocks.*.mlp": "columns/rows"}
    profile = Profile(model, (tokens,), {}, loss, (tokens,), tensors, 1)
    whole = profile.parts(4, 1, SMALL).parts
    parts = profile.parts(4, 2, SMALL).parts
    names = [part.name for part in parts]
    assert names == ["embed", "blocks.0", "blocks.1", "head"]
    block, divided = whole[1], parts[1]
    weights = 2 * 32 * 128 * 4 + (128 + 32) * 4
    assert block.parameters - divided.parameters == weights / 2
    value = 4 * 16 * 32 * 4
    # a ring of two sends the whole value; forward sums what the rows give, backward the gradient
    assert divided.sums == {"F": (value, 2), "I": (value, 2)}
    assert whole[1].sums == {}
    assert divided.flops == block.flops / 2
    assert parts[3].work == whole[3].work


def test_hidden_sums_make_tensor_parallelism_faster() -> None:
    options: dict[str, Any] = {"tensors": {"blocks.*.mlp": "columns/rows"}, "tp": 4, "pp": 1}
    shown, hidden = (planned(Cluster(SMALL, 4), hidden=x, **options)[0] for x in (0.0, 1.0))
    assert hidden.seconds < shown.seconds
    assert shown.waits["tensor sums"] > hidden.waits["tensor sums"]


def test_what_is_extrapolated_is_what_a_whole_simulation_gives() -> None:
    from fxpipe.extensions.paper import predicting

    even = replace(SMALL, bandwidth=inf)  # on which larger micro-batches are no faster
    found = planned(Cluster(even, 4), batch=128, pp=2, keep=20)
    long = [way for way in found if way.candidate.microbatches > 32]
    assert long
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predicting, "_ROUND", 1000)
        again = planned(Cluster(even, 4), batch=128, pp=2, keep=20)
    known = {str(way): way for way in again}
    for way in long:
        if str(way) in known:
            assert way.seconds == pytest.approx(known[str(way)].seconds, rel=1e-6)
            assert way.memory == pytest.approx(known[str(way)].memory, rel=1e-6)


@smoke
def test_what_replicas_share_takes_less_memory_and_other_exchanges() -> None:
    width, layers, bandwidth = 64, 8, 1e6
    slow = Device(1e12, 1e12, memory=1e9, link=Link(0, bandwidth))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        x = torch.zeros(1, width)
    options: dict[str, Any] = {"batch": 2, "example": ((x,), {"target": x}), "loss": mse_loss}
    options |= {"optimizer": torch.optim.Adam, "dp": 2, "pp": 1, "keep": 1}
    found = {
        kind: fxpipe.plan(model, Cluster(slow, 2), sharding=kind, **options)[0]
        for kind in ("never", "zero1", "zero2", "zero3")
    }
    weights = 4 * width * width * layers
    state = 2 * weights  # of Adam, of which each replica has half
    saved = found["never"].memory - found["zero1"].memory
    assert saved == pytest.approx(state / 2, rel=0.01)
    assert found["zero2"].memory <= found["zero1"].memory
    assert found["zero3"].memory < found["zero2"].memory
    # each sends half of its gradients and half of the sums, or of the new weights, or all three
    exchange = weights / 2 / bandwidth
    expected = {"never": 2, "zero1": 3, "zero2": 2, "zero3": 2}
    for kind, ways in expected.items():
        assert found[kind].seconds == pytest.approx(ways * exchange, rel=0.01), kind
    kinds = {kind: way.options["extensions"] for kind, way in found.items()}
    assert kinds["zero1"] == [fxpipe.Replicas(shard_optimizer=True)]
    assert kinds["zero2"] == [fxpipe.Sharding("zero2")]
    assert kinds["zero3"] == [fxpipe.Sharding("zero3")]
    assert kinds["never"] == []


@smoke
def test_a_parameter_larger_than_a_share_stays_whole() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 1, bias=False))
        x, y = torch.zeros(1, 64), torch.zeros(1, 1)
    options: dict[str, Any] = {"batch": 4, "example": ((x,), {"target": y}), "loss": mse_loss}
    options |= {"optimizer": torch.optim.Adam, "dp": 4, "pp": 1, "keep": 1}
    kept, shared = (
        fxpipe.plan(model, Cluster(SMALL, 4), sharding=kind, **options)[0].memory
        for kind in ("never", "zero1")
    )
    assert kept - shared == pytest.approx(2 * 4 * 256, rel=0.01)  # the state of the small one


def test_without_a_flush_2bw_is_planned() -> None:
    found = planned(Cluster(SMALL, 4), flush=False, optimizer=torch.optim.SGD)
    assert {way.candidate.recipe.name for way in found} == {"2bw"}


@pytest.mark.parametrize("bandwidth", [1e8, 1e9, 1e10, 1e12])
def test_without_a_flush_the_choice_is_that_of_pipedream_2bws_formulas(bandwidth: float) -> None:
    """Appendix A of its paper: the time of a batch is that of the slowest stage's computations and
    transfers, or of its sums over replicas, which hide beside them."""
    width, layers, devices, batch, rate = 64, 8, 8, 64, 1e9
    device = Device(rate, inf, memory=1e9, link=Link(0, bandwidth))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        x = torch.zeros(1, width)
    example = (x,), {"target": x}
    found = fxpipe.plan(
        model, Cluster(device, devices), batch=batch, example=example, loss=mse_loss, flush=False
    )

    def seconds(replicas: int, stages: int) -> float:
        samples, weights = batch / replicas, 4 * width * width * layers / stages
        computing = samples * 6 * width * width * layers / stages / rate
        sums = 2 * weights * (replicas - 1) / replicas / bandwidth
        return max(computing, sums)

    expected = {(w, devices // w): seconds(w, devices // w) for w in (1, 2, 4, 8)}
    for way in found:
        formula = expected[way.layout.replicas, way.layout.stages]
        assert way.seconds == pytest.approx(formula, rel=0.2)
    fastest = min(expected.values())
    assert expected[found[0].layout.replicas, found[0].layout.stages] <= 1.1 * fastest


def test_what_lacks_memory_recomputes_and_what_fits_nowhere_says_what_is_needed() -> None:
    roomy = planned(Cluster(SMALL, 4), pp=4)
    assert {way.recompute for way in roomy} == {"never"}
    modes = set[str]()
    for share in (0.9, 0.7, 0.5):
        tight = replace(SMALL, memory=share * min(way.memory for way in roomy))
        with suppress(PartitionError):
            modes |= {str(way.recompute) for way in planned(Cluster(tight, 4), pp=4)}
    assert "always" in modes
    tiny = replace(SMALL, memory=1e4)
    with pytest.raises(PartitionError, match=r"nothing fits: a device has 9.8 KiB, and the way"):
        planned(Cluster(tiny, 4))


@smoke
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dp": 3}, "dp is 3; give a number that divides the 4 devices"),
        ({"dp": 2, "pp": 4}, "dp, tp and pp are 2, None and 4, which do not divide the 4 devices"),
        ({"tp": 3}, "tp is 3; give a number that divides the 4 devices of a host"),
        ({"tp": 2}, "tp is 2; say how submodules are divided"),
        ({"tensors": {"blocks.*.mlp": "cols"}}, "'cols'"),
        ({"tensors": {"block.*": "rows"}}, "tensors names no submodule 'block.*'"),
        ({"hidden": 2}, "hidden is 2; give a share"),
        ({"batch": 0}, "batch is 0"),
        ({"batch": 3, "dp": 2}, "a batch of 3 cannot be shared equally"),
        ({"batch": 1, "pp": 1}, "a batch of 1 cannot be shared equally"),
        ({"held": (1,)}, "held is"),
        ({"sharding": "zero4"}, "sharding is 'zero4'"),
        ({"sharding": "zero2"}, "sharding is 'zero2'; give optimizer="),
        ({"sharding": "zero3", "flush": False, "optimizer": torch.optim.SGD}, 'give "zero1"'),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told.replace("*", r"\*").replace("(", r"\(")):
        planned(Cluster(SMALL, 4), **options)


@smoke
def test_layouts_use_each_device_once() -> None:
    cluster = Cluster(Cluster(SMALL, 4), 3)
    for layout in layouts(cluster, divided=True):
        places = {
            layout.device(r, s) + t
            for r in range(layout.replicas)
            for s in range(layout.stages)
            for t in range(layout.group)
        }
        assert places == {*range(12)}


@smoke
def test_a_model_with_data_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    before = [*model.parameters()]
    values = [p.clone() for p in before]
    x = torch.zeros(4, 8)
    fxpipe.plan(model, Cluster(SMALL, 2), batch=8, example=((x,), {"target": x}), loss=mse_loss)
    for old, now, value in zip(before, model.parameters(), values, strict=True):
        assert now is old
        assert torch.equal(now, value)
        assert now.grad is None


def make_tower() -> dict[str, Any]:
    """For the command line."""
    tokens = torch.zeros(4, 16, dtype=torch.long)
    return {"model": Tower(4), "example": ((tokens,), {"target": tokens}), "loss": loss}


@smoke
def test_the_command_line_prints_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    from fxpipe.extensions.cli import main

    factory = "tests.extensions.paper.test_plan:make_tower"
    assert main(["plan", "--model", factory, "--cluster", "4xA100", "--batch", "16"]) == 0
    out = capsys.readouterr().out
    assert "dp × pp × tp" in out
    assert "MFU" in out
    for wrong, told in (
        (["--model", "nowhere", "--cluster", "4xA100"], "write package.module:factory"),
        (["--model", "nowhere:f", "--cluster", "4xA100"], "cannot be made"),
        (["--model", factory, "--cluster", "A100"], "the cluster is 'A100'"),
    ):
        assert main(["plan", *wrong, "--batch", "16"]) == 2
        assert told in " ".join(capsys.readouterr().err.split())

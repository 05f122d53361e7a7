"""Predictions of published runs of transformers, from the operations of one layer on paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

import fxpipe.schedules as fs
from benchmarks.models.megatron import GPT, TENSORS, loss
from fxpipe import Cluster, Device, Link, Sizes, Time, round_robin
from fxpipe.extensions.paper.presets import A100, TPU_V3
from fxpipe.extensions.paper.profile import ModelPart, Profile
from fxpipe.extensions.simulator import Simulation, simulate_schedule
from fxpipe.ir.recipe import Recipe

GB = 1e9
VOCABULARY = 51200
HELD = 2 + 4 + 12
"""Bytes of a parameter: weights in 16 bits, sums of gradients in 32, and weights and two states of
Adam in 32."""

Row = Mapping[str, str]


@cache
def profile(hidden: int, heads: int, sequence: int) -> Profile:
    """One layer of a GPT with its embedding and its head."""
    with torch.device("meta"):
        model = GPT(1, hidden, heads, VOCABULARY).bfloat16()
        tokens = torch.zeros(1, sequence, dtype=torch.long)
    return Profile(model, (tokens,), {}, loss, (tokens,), TENSORS, least=1, sums=4)


@dataclass(frozen=True)
class Run:
    """A run of Megatron-LM.

    Attributes:
        layers, hidden, heads, sequence: of the model.
        devices: of a pipeline, or groups of them.
        group: tensor-parallel devices of a stage.
        chunks: stages of a device.
        samples: of a micro-batch.
        microbatches: of a pipeline.
        ends: whether the embedding and the head count as a layer each where layers are dealt out.
        recompute: whether layers recompute, each by itself.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    devices: int
    group: int
    chunks: int
    samples: int
    microbatches: int
    ends: bool
    recompute: bool

    @property
    def stages(self) -> int:
        return self.devices * self.chunks

    def layers_of(self, stage: int) -> float:
        """How many layers a stage has."""
        last = self.stages - 1
        if not self.ends:
            return self.layers / self.stages
        return (self.layers + 2) / self.stages - (stage == 0) - (stage == last)

    def parts(self, device: Device) -> tuple[ModelPart, ModelPart, ModelPart]:
        """The embedding, a layer, and the head with its norm and the loss."""
        made = profile(self.hidden, self.heads, self.sequence)
        embedding, layer, *head = made.parts(self.samples, self.group, device).parts
        return embedding, layer, _joined(head)

    def costs(self, device: Device, link: Link) -> dict[Any, Any]:
        """The times of tasks, in seconds."""
        embedding, layer, head = self.parts(device)
        costs: dict[Any, Any] = {"U": 0.0, "A": 0.0}
        for stage in range(self.stages):
            some = [(self.layers_of(stage), layer)]
            some += [(1, embedding)] * (stage == 0) + [(1, head)] * (stage == self.stages - 1)

            def time(halves: str, some: Any = some) -> Time:
                pairs = [(n, part, half) for n, part in some for half in halves]
                return Time(
                    sum(n * part.seconds[half] for n, part, half in pairs),
                    sum(n * part.sums.get(half, (0, 0))[0] for n, part, half in pairs),
                    link,
                    0.0,
                    sum(n * part.sums.get(half, (0, 0))[1] for n, part, half in pairs),
                )

            costs |= {(letter, stage): time(letter) for letter in "FIW"}
            costs["B", stage] = time("FIW" if self.recompute else "IW")
        return costs

    def sizes(self, device: Device) -> Sizes:
        """The bytes that devices hold."""
        embedding, layer, head = self.parts(device)
        value = 2 * self.samples * self.sequence * self.hidden // self.group
        known: dict[str, dict[int, int]] = {}
        for stage in range(self.stages):
            n, last = self.layers_of(stage), stage == self.stages - 1
            ends = [embedding] * (stage == 0) + [head] * last

            def total(name: str, n: float = n, ends: Any = ends) -> int:
                return int(n * getattr(layer, name) + sum(getattr(end, name) for end in ends))

            elements = total("elements")
            for name, size in (
                ("saved", total("saved")),
                ("deferred", total("deferred")),
                ("parameters", 2 * elements),
                ("gradients", 4 * elements),
                ("optimizer", 12 * elements),
            ):
                known.setdefault(name, {})[stage] = size
        values = {f"y{stage}": value for stage in range(self.stages)}
        return Sizes(values, **known)  # type: ignore[arg-type]

    def simulated(self, recipe: Recipe, cluster: Cluster, occupies: float) -> Simulation:
        """A step on a cluster, whose transfers occupy the devices that send for a share."""
        device, devices = cluster.device, range(self.devices)
        links = {
            (a, b): replace(cluster.link_between(a * self.group, b * self.group), occupies=occupies)
            for a in devices
            for b in devices
        }
        if self.chunks > 1:
            recipe = recipe.placed(round_robin(self.chunks))
        schedule = recipe(self.devices, self.microbatches)
        costs = self.costs(device, cluster.link_between(0, self.group - 1))
        if "I" not in schedule.kinds:
            costs = {key: time for key, time in costs.items() if key[0] not in "IW"}
        return simulate_schedule(schedule, costs, links=links, sizes=self.sizes(device))


def _joined(parts: list[ModelPart]) -> ModelPart:
    whole = ModelPart("head")
    for part in parts:
        for half, seconds in part.seconds.items():
            whole.seconds[half] += seconds
        for half, (size, times) in part.sums.items():
            before = whole.sums.get(half, (0.0, 0))
            whole.sums[half] = before[0] + size, before[1] + times
        for name in ("saved", "deferred", "tensors"):
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
    return whole


# --- Zero Bubble, Table 4

ZERO_BUBBLE: dict[str, Recipe] = {
    "1f1b": fs.one_f_one_b,
    "1f1b-i": fs.interleaved_one_f_one_b,
    "zb-1p": fs.zb_h1,
    "zb-2p": fs.zb_h2,
}


def hosts(device: Device) -> Cluster:
    """Hosts of eight, as many as may be needed."""
    return Cluster(Cluster(device, 8), 512)


def zero_bubble(row: Row, efficiency: float) -> float:
    """Samples a GPU and second, or GB of the fullest GPU."""
    name, devices, layers = row["schedule"], int(row["pipeline"]), int(row["layers"])
    chunks = (layers + 2) // devices if name == "1f1b-i" else 1
    run = Run(
        layers,
        int(row["hidden"]),
        int(row["heads"]),
        int(row["sequence"]),
        devices,
        1,
        chunks,
        int(float(row["microbatch"])),
        int(row["microbatches"] or 3 * devices),
        ends=True,
        recompute=False,
    )
    device = replace(A100, efficiency=efficiency)
    # Megatron-LM waits for what it sends; zero bubble's own schedules do not
    found = run.simulated(ZERO_BUBBLE[name], hosts(device), occupies=1.0 if "1f1b" in name else 0.0)
    if row["unit"].startswith("GB"):
        return max(memory.peak for memory in found.memory) / GB
    seconds = found.makespan
    if name == "zb-2p":  # its steps overlap: updates are validated after they are made
        spans: dict[int, tuple[float, float]] = {}
        for x in found.spans:
            if x.instruction.letter in tuple("FIWB"):
                start, _ = spans.get(x.device, (x.start, 0.0))
                spans[x.device] = min(start, x.start), x.end
        seconds = max(end - start for start, end in spans.values())
    return run.microbatches * run.samples / devices / seconds


# --- Megatron-LM, SC'21, Table 1

SAMPLES, CHUNKS = (1, 2, 4), (1, 2)
"""Micro-batches and chunks are not published; the best of these is taken."""


def megatron(row: Row, efficiency: float) -> float:
    """TFLOP/s a GPU, as the paper counts them, of the best micro-batch and number of chunks."""
    return max(_megatron_all(row, efficiency).values())


def _megatron_all(row: Row, efficiency: float) -> dict[tuple[int, int], float]:
    layers, hidden, heads = (int(row[key]) for key in ("layers", "hidden", "heads"))
    replicas, group, devices = (int(row[key]) for key in ("data", "tensor", "pipeline"))
    sequence, total = int(row["sequence"]), int(row["devices"])
    batch = int(row["unit"].rpartition(" ")[2])
    device = replace(A100, efficiency=efficiency)
    found: dict[tuple[int, int], float] = {}
    for samples in SAMPLES:
        for chunks in CHUNKS if devices > 1 else (1,):
            count = batch // replicas // samples
            if batch % (replicas * samples) or count < devices:
                continue
            if chunks > 1 and (count % devices or layers % (devices * chunks)):
                continue
            run = Run(
                layers, hidden, heads, sequence, devices, group, chunks, samples, count,
                ends=False, recompute=True,
            )  # fmt: skip
            recipe = fs.one_f_one_b if chunks == 1 else fs.interleaved_one_f_one_b
            seconds = _long(run, recipe, hosts(device))
            embedding, layer, head = run.parts(device)
            elements = layer.elements * layers / devices + max(embedding.elements, head.elements)
            ring = 2 * (replicas - 1) / replicas
            network = device.network if total > 8 else device.link
            # sums of gradients in 16 bits, and the update, after the flush
            seconds += ring * 2 * elements / network.bandwidth
            seconds += HELD * elements / device.bandwidth / device.streaming
            work = 96.0 * batch * sequence * layers * hidden**2
            work *= 1 + sequence / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
            found[samples, chunks] = work / seconds / total / 1e12
    return found


def _long(run: Run, recipe: Recipe, cluster: Cluster) -> float:
    """The seconds of a step; of many micro-batches as those of few and of further rounds."""
    few, count = 3 * run.devices + run.microbatches % run.devices, run.microbatches
    if count <= few + run.devices:
        return run.simulated(recipe, cluster, 1.0).makespan
    first, then = (
        replace(run, microbatches=few + more).simulated(recipe, cluster, 1.0).makespan
        for more in (0, run.devices)
    )
    return first + (then - first) * (count - few) / run.devices


# --- GPipe, Transformer-48


@cache
def transformer_48() -> Profile:
    """GPipe's Transformer with 48 layers, as a decoder of tokens."""
    with torch.device("meta"):
        model = GPT(48, 2048, 32, 32000).bfloat16()
        tokens = torch.zeros(1, 1024, dtype=torch.long)
    return Profile(model, (tokens,), {}, loss, (tokens,), {}, least=1)


def gpipe(row: Row, efficiency: float) -> float:
    """The speed-up over two devices: in Table 2 over one micro-batch, in Table 3 over 32. Stages
    are cut evenly, as GPipe does."""
    devices, count = int(row["pipeline"]), int(row["microbatches"])
    before = 1 if row["unit"].endswith("M=1") else count
    device = replace(TPU_V3 if "TPU" in row["hardware"] else P100, efficiency=efficiency)
    parts = transformer_48().parts(4, 1, device)

    def rate(devices: int, count: int) -> float:
        cuts = [*parts.cut(devices), len(parts.parts)]
        costs: dict[Any, float] = {"F": 0.0, "B": 0.0, "U": 0.0}
        for stage in range(devices):
            own = parts.parts[cuts[stage] : cuts[stage + 1]]
            forward = sum(part.seconds["F"] for part in own)
            costs["F", stage] = forward
            # the forward again, and both halves
            costs["B", stage] = sum(part.work for part in own)
        sizes = Sizes({f"y{stage}": 4 * 1024 * 2048 * 2 for stage in range(devices)})
        schedule = fs.gpipe(devices, count)
        return count / simulate_schedule(schedule, costs, links=device.link, sizes=sizes).makespan

    return rate(devices, count) / rate(2, before)


P100 = Device(
    flops=21.2e12,
    single=10.6e12,
    bandwidth=732e9,
    streaming=0.9,
    units=56,
    launch=5e-6,
    link=Link(2e-5, 11e9),
    name="P100",
)
"""NVIDIA P100 SXM2. Data sheet of 2016: 21.2 TFLOP/s in half precision, 732 GB/s, 56
multiprocessors; without NVLink, as in GPipe's Table 3."""


def fitted(predict: Callable[[float], float], published: float) -> float:
    """The efficiency with which a prediction, which grows with it, is what was published."""
    low, high = 0.05, 1.5
    for _ in range(18):
        middle = (low + high) / 2
        low, high = (middle, high) if predict(middle) < published else (low, middle)
    return (low + high) / 2

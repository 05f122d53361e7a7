"""Trainings that run on CPU devices and on simulated ones, and must come to the same bits.

Kernels are the same on both, and so must be what they get: rows of inputs fill cache lines, since
matrix products round by alignment, and dropout scales by powers of two, since CUDA's scales in
double precision.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy

import fxpipe

Batch = tuple[Tensor, Tensor]

Places = Sequence[Any] | DeviceMesh
"""The devices of a process, or of ranks that all train, each replica of them with other batches."""

LOSS = 512
"""Bytes that a device allocates for a scalar."""


class UNet(nn.Module):
    """Convolutions with BatchNorm, and skips over what lies between."""

    def __init__(self) -> None:
        super().__init__()

        def block(into: int, out: int, stride: int = 1) -> nn.Module:
            convolution = nn.Conv2d(into, out, 3, stride, padding=1, bias=False)
            return nn.Sequential(convolution, nn.BatchNorm2d(out), nn.ReLU())

        self.down = block(1, 4)
        self.deep = block(4, 6, stride=2)
        self.wide = nn.Sequential(nn.Upsample(scale_factor=2), block(6, 4))
        self.up = block(8, 4)
        self.last = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(x)
        y: Tensor = self.last(self.up(torch.cat([self.wide(self.deep(h)), h], 1)))
        return y

    @staticmethod
    def batch(generator: torch.Generator) -> Batch:
        return torch.randn(8, 1, 6, 6, generator=generator), _classes(3, 8, generator=generator)


class Tied(nn.Module):
    """A transformer of tokens with dropout, whose first and last layer share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(8, 2, 12, 0.5, batch_first=True) for _ in range(2))
        )
        self.last = nn.Linear(8, 9, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.blocks(self.embedding(x)))
        return y.transpose(1, 2)

    @staticmethod
    def batch(generator: torch.Generator) -> Batch:
        x, y = (_classes(9, 8, 5, generator=generator) for _ in range(2))
        y[0, 1:] = -100  # micro-batches of different weights
        return x, y


class Dropout(nn.Module):
    """Layers with dropout and skips, four parts of like cost."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 12), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.5), nn.LayerNorm(12))
        self.third = nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Dropout(0.75))
        self.last = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y: Tensor = self.last(self.third(self.second(h) + h) * h)
        return y

    @staticmethod
    def batch(generator: torch.Generator) -> Batch:
        return torch.randn(8, 16, generator=generator), _classes(3, 8, generator=generator)


class Leaf(Dropout):
    """The same, with one part that fxpipe is told not to trace."""


def _classes(count: int, *shape: int, generator: torch.Generator) -> Tensor:
    return torch.randint(count, shape, generator=generator)


CUTS: Mapping[str, Mapping[int, list[str]]] = {
    "unet": {2: ["wide"], 4: ["deep", "wide", "up"]},
    "tied": {2: ["blocks.1"], 4: ["blocks.0", "blocks.1", "last"]},
    "dropout": {2: ["third"], 4: ["second", "third", "last"]},
    "leaf": {2: ["third"], 4: ["second", "third", "last"]},
}
"""Model → number of stages → where it is cut."""

OVERLAPPING = ("2bw", "pipedream", "1f1b-async")
"""Schedules in which a step returns while its batch is in flight. What they compute may depend on
where the model is cut, which costs decide for other numbers of stages than those in ``CUTS``."""

TOLD = frozenset({"copy to the host", "copy from the host"})
"""Why hosts of ranks wait at the end of a step: they tell each other its loss."""

MODELS: Mapping[str, Any] = {"unet": UNet, "tied": Tied, "dropout": Dropout, "leaf": Leaf}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Setting:
    """What is trained, and how.

    Attributes:
        model: a name in ``MODELS``.
        options: those of ``fxpipe.compile``.
        steps: how many batches a run has.
        extra: words for what happens beside steps: ``evaluation`` between them, ``resume`` (a
            checkpoint is saved, a step made, and the checkpoint loaded), ``scaler``, ``side`` (the
            caller's current streams are not the default ones), ``late`` (losses of the last run are
            read when the pipe is closed).
        inputs: where batches are: ``cpu``, ``pinned`` (the same memory for each, overwritten after
            the step), ``device`` or ``outside`` (on the last device).
        stages: how many stages the model is cut into.
    """

    model: str = "dropout"
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 4
    extra: str = ""
    inputs: str = "cpu"
    stages: int = 2

    @property
    def flushes(self) -> bool:
        """Whether a step ends with all of its batch done."""
        return self.options.get("schedule") not in OVERLAPPING

    @property
    def may_wait(self) -> frozenset[str]:
        """The reasons for which the host may wait for a device in a step."""
        pinned = {"event.synchronize"} if self.inputs == "pinned" else set()
        return frozenset(pinned | ({"item"} if self.has("scaler") else set()))

    def has(self, word: str) -> bool:
        """Whether a word is in ``extra``."""
        return word in self.extra.split()

    def __str__(self) -> str:
        told = [f"{name}={value}" for name, value in self.options.items()]
        return " ".join(filter(None, [self.model, *told, self.extra, self.inputs]))


@dataclass
class Trained:
    """What a run made: losses, other outputs, and the state and gradients at its end.

    Attributes:
        waits: step → reason → how often the host waited for a device in it.
        bytes: the bytes that all devices together had allocated after the last two steps, without
            losses.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    waits: list[Mapping[str, int]] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)

    def differs(self, other: Trained) -> Sequence[str]:
        """The names of what is not the same to the bit, or not finite."""
        assert self.values.keys() == other.values.keys()
        return [
            name
            for name, value in self.values.items()
            if not torch.equal(value, other.values[name]) or not value.isfinite().all()
        ]


def train(
    setting: Setting,
    devices: Places,
    look: Callable[[], Any] | None = None,
    *,
    runs: int = 1,
    begin: Callable[[int], None] = lambda run: None,
    folder: Path | None = None,
) -> list[Trained]:
    """Train in a setting on devices, one run after another with the same pipe.

    Args:
        setting: the setting.
        devices: their names, of which ``stream:0`` is a stream of the first, or a mesh.
        look: ``cuda.take`` where devices are simulated.
        runs: how many runs.
        begin: called before each run.
        folder: where ranks save; a process by itself makes a folder of its own.
    """
    replica = devices["dp"].get_local_rank() if isinstance(devices, DeviceMesh) else 0
    places = devices if isinstance(devices, DeviceMesh) else [*map(_place, devices)]
    torch.manual_seed(0)
    model = MODELS[setting.model]()
    options: dict[str, Any] = {"optimizer": sgd, "microbatches": 4, **setting.options}
    if setting.stages in CUTS[setting.model]:
        options["partition"] = CUTS[setting.model][setting.stages]
    if setting.has("scaler"):
        options["scaler"] = torch.amp.GradScaler("cuda" if look else "cpu", init_scale=1024.0)
    if setting.model == "leaf":
        options["extensions"] = [*options.get("extensions", ()), fxpipe.LeafModules("second")]
    side = setting.has("side") and look is not None
    pipe = fxpipe.compile(model, places, loss=cross_entropy, **options)
    made: list[Trained] = []
    index = devices.get_rank() if isinstance(devices, DeviceMesh) else 0
    if setting.inputs == "outside":
        index = torch.cuda.device_count() - 1
    place = _Place(setting.inputs if look else "cpu", f"cuda:{index}")
    with _side_streams() if side else nullcontext(), pipe, tempfile.TemporaryDirectory() as own:
        folder = folder or Path(own)
        for run in range(runs):
            begin(run)
            trained, losses = Trained(), list[Tensor]()
            for step in range(setting.steps):
                seed = run * setting.steps + step + 1000 * replica
                x, y = place.put(*model.batch(torch.Generator().manual_seed(seed)))
                if look:
                    look()
                losses.append(pipe.step(x, target=y))
                if look:
                    trained.waits.append(look().waits)
                    if setting.flushes and step >= setting.steps - 2:
                        trained.bytes.append(_held(losses, trained.bytes))
                place.overwrite()
                x, y = place.put(*model.batch(torch.Generator().manual_seed(seed)))
                if setting.has("evaluation"):
                    pipe.eval()
                    with torch.no_grad():
                        trained.values[f"output {step}"] = pipe(x).cpu().clone()
                    pipe.train()
                if setting.has("resume") and step == 1:
                    pipe.save(folder)
                    trained.values["loss before"] = pipe.step(x, target=y).cpu() + 0
                    pipe.load(folder)
                place.overwrite()
            pipe.flush()
            # of all ranks, as costs may decide which of them has a stage
            for name, value in pipe.state_dict(full=True).items():
                trained.values[name] = value.cpu().clone()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    trained.values[f"gradient of {name}"] = parameter.grad.cpu().clone()
            if setting.has("late") and run + 1 == runs:
                pipe.close()
            for step, loss in enumerate(losses):
                trained.values[f"loss {step}"] = loss.cpu() + 0
            made.append(trained)
    return made


def _place(name: str) -> Any:
    kind, _, index = name.partition(":")
    return torch.cuda.Stream(int(index)) if kind == "stream" else name


@contextmanager
def _side_streams() -> Iterator[None]:
    """Other current streams than the default ones."""
    for device in _indices():
        torch.cuda.set_stream(torch.cuda.Stream(device))
    try:
        yield
    finally:
        for device in _indices():
            torch.cuda.synchronize(device)
            torch.cuda.set_stream(torch.cuda.default_stream(device))


def _held(losses: Sequence[Tensor], before: Sequence[int]) -> int:
    """The bytes that the devices have allocated, without losses. Threads drop a step's last objects
    after it has returned: waits until there is not more than after an earlier step."""
    gc.collect()
    kept = LOSS * sum(loss.is_cuda for loss in losses)
    for _ in range(2000):
        held = sum(map(torch.cuda.memory_allocated, _indices())) - kept
        if not before or held <= before[-1]:
            break
        time.sleep(0.005)
    return held


def _indices() -> range:
    return range(torch.cuda.device_count())


class _Place:
    """Puts batches where a setting wants them."""

    def __init__(self, kind: str, device: str) -> None:
        self._kind, self._device = kind, device
        self._memory: list[Tensor] = []

    def put(self, *batch: Tensor) -> Sequence[Tensor]:
        if self._kind in ("device", "outside"):
            return [tensor.to(self._device) for tensor in batch]
        if self._kind == "pinned":
            if not self._memory:
                self._memory = [torch.empty_like(tensor).pin_memory() for tensor in batch]
            for memory, tensor in zip(self._memory, batch, strict=True):
                memory.copy_(tensor)
            return self._memory
        return batch

    def overwrite(self) -> None:
        """The caller may do so once a step has returned."""
        for memory in self._memory:
            memory.fill_(1)


def compare(
    setting: Setting,
    places: Places,
    modes: Sequence[tuple[int, int]],
    folder: Path | None = None,
) -> list[str]:
    """Train on CPU devices, and on simulated ones a run in each mode (with its seed).

    Args:
        setting: the setting.
        places: the simulated devices; all ranks of a mesh call this.
        modes: the mode and seed of each run.
        folder: where ranks save.

    Returns:
        What is wrong in the first run in which anything is: values that differ, races, failures,
        waits of a warm step, memory that grows or stays, each with the mode and the seed.

    Raises:
        InputError: the setting is refused, also on CPU devices.
    """
    from tests.simcuda import cuda

    host: Places
    may_wait = setting.may_wait
    if isinstance(places, DeviceMesh):
        may_wait |= TOLD
        host, told = _mesh_on_host(places), f"rank {places.get_rank()} of {places.size()}"
    else:
        host, told = ["cpu"] * len(places), ", ".join(places)
    wanted = train(setting, host, runs=len(modes), folder=folder)
    races: list[tuple[int, str]] = []
    wrong: list[tuple[int, str]] = []
    now = 0

    def look() -> cuda.Noticed:
        noticed = cuda.take()
        races.extend((now, race) for race in noticed.races)
        assert not noticed.failure, noticed.failure
        return noticed

    def begin(run: int) -> None:
        nonlocal now
        mode, seed = modes[run]
        cuda.configure(cuda.Mode(mode), seed)  # runs what is left of the run before
        look()
        now = run
        if run == 1:
            gc.collect()
            gc.freeze()  # the pipe is compiled, and each collection would look at it again

    cuda.take()
    try:
        made = train(setting, places, look, runs=len(modes), begin=begin, folder=folder)
        cuda.configure(cuda.Mode.EAGER)
        look()
    except Exception as error:
        cuda.take()
        wrong.append((now, f"{type(error).__name__}: {error}"))
    else:
        for run, (own, other) in enumerate(zip(made, wanted, strict=True)):
            if different := own.differs(other):
                wrong.append((run, f"other values: {', '.join(different[:4])}"))
            if waits := {*own.waits[-1]} - may_wait:
                wrong.append((run, f"the host waits in a warm step: {waits}"))
            if setting.flushes and own.bytes[-1] > own.bytes[-2]:
                wrong.append((run, f"allocated bytes grow: {own.bytes}"))
        del made
    if races:
        wrong.append((races[0][0], f"{len(races)} races, the first: {races[0][1]}"))
    gc.unfreeze()
    gc.collect()
    if not wrong and any(left := [torch.cuda.memory_allocated(d) for d in _indices()]):
        wrong.append((now, f"bytes that stay allocated: {left}"))
    first = min((run for run, _ in wrong), default=0)
    mode, seed = modes[first]
    told = f"{setting} on {told}, run {first} in {cuda.Mode(mode).name}"
    return [f"{told} with seed {seed}: {problem}" for run, problem in wrong if run == first]


def _mesh_on_host(mesh: DeviceMesh) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(mesh.shape), mesh_dim_names=mesh.mesh_dim_names)

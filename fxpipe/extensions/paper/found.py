"""The ways to train that a plan has found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxpipe.extend import find
from fxpipe.extensions.paper.layouts import Layout
from fxpipe.extensions.planner.bounds import ALWAYS
from fxpipe.extensions.planner.candidates import Candidate
from fxpipe.extensions.tables import plain_table, table_text, time_text
from fxpipe.formatting import bytes_text
from fxpipe.passes.schedule import Recompute

Sharded = Literal["never", "zero1", "zero2", "zero3"]
"""What replicas share: nothing, the optimizer's state, gradients, too, or weights, too."""

_SMALL = 0.02
"""Causes that take a smaller share of a step are not named."""

_SHOWN = 3
"""How many of the ways that lost are shown, of the slower ones and of those that do not fit."""


def sharding_by(sharding: Sharded) -> Any:
    """The extension for ``compile`` with which replicas share this; None for nothing."""
    if sharding in ("zero2", "zero3"):
        return find("public", "Sharding")(sharding)
    return find("public", "Replicas")(shard_optimizer=True) if sharding == "zero1" else None


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        layout: replicas × stages × devices of a stage.
        candidate: schedule, micro-batches, recomputation and offloading.
        samples: of a micro-batch.
        seconds: of a step.
        memory: bytes of the fullest device.
        mfu: the share of the devices' peak FLOPs that the model's products make up.
        waits: cause → the share of a step that devices do not compute for it, in the mean.
        begins: the submodules at which the stages after the first begin.
        sharding: what replicas share.
        given: arguments of ``compile`` that the plan was given.
    """

    layout: Layout
    candidate: Candidate
    samples: int
    seconds: float
    memory: float
    mfu: float
    waits: Mapping[str, float]
    begins: tuple[str, ...]
    sharding: Sharded
    given: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def chunks(self) -> int:
        """CountedStages on each device."""
        return len(self.candidate.recipe.place(self.layout.stages)) // self.layout.stages

    @property
    def recompute(self) -> Recompute | dict[int, Recompute]:
        """As an argument of ``compile``."""
        modes = self.candidate.recompute
        return modes[0] if len({*modes}) == 1 else dict(enumerate(modes))

    @property
    def offload(self) -> str:
        return next(iter(self.candidate.offload), "never")

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of ``compile`` besides the model and the mesh."""
        extensions = []
        if self.sharding != "never":
            extensions.append(sharding_by(self.sharding))
        if self.offload != "never":
            extensions.append(find("extension", "offload")(self.offload))
        return {
            "schedule": self.candidate.recipe,
            "microbatches": self.candidate.microbatches,
            "recompute": self.recompute,
            "partition": list(self.begins),
            "extensions": extensions,
            **self.given,
        }

    def device_mesh(self, kind: str = "cuda") -> DeviceMesh:
        """The mesh of all devices, with the dimensions "dp", "pp" and, where several devices share
        a stage, "tp". All processes call this."""
        shape = {n: size for n, size in self.layout.shape.items() if n != "tp" or size > 1}
        return init_device_mesh(kind, (*shape.values(),), mesh_dim_names=(*shape,))

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh for ``compile``, of CUDA devices; ``device_mesh("cpu")`` makes one of others."""
        return self.device_mesh()

    @property
    def limit(self) -> str:
        """What the step waits for most."""
        name = max(self.waits, key=self.waits.__getitem__, default="")
        return name if name and self.waits[name] >= _SMALL else "computing"

    def __str__(self) -> str:
        text = f"{self.layout}, {self.candidate.recipe.name}"
        if self.chunks > 1:
            text += f", {self.chunks} stages a device"
        text += f", {self.candidate.microbatches} × {self.samples} samples"
        text += f", {self.sharding}" * (self.sharding != "never")
        if self.recompute != "never":
            text += ", recomputing" + self._some
        return text + ", offloading" * (self.offload != "never")

    @property
    def _some(self) -> str:
        """How many stages recompute, if not all do."""
        modes = self.candidate.recompute
        return "" if isinstance(self.recompute, str) else f" {modes.count(ALWAYS)} of {len(modes)}"


class Ranking(Sequence[Way]):
    """The ways that a plan has found, the fastest first.

    Attributes:
        lost: those that are slower, or do not fit.
    """

    def __init__(self, ways: Sequence[Way], keep: int, given: Mapping[str, Any]) -> None:
        memory = ways[0].layout.cluster.device.memory
        fit = [replace(way, given=given) for way in ways if way.memory <= memory]
        self._ways = fit[:keep]
        self.lost = [*fit[keep:], *(way for way in ways if way.memory > memory)]

    def __len__(self) -> int:
        return len(self._ways)

    def __getitem__(self, at: Any) -> Any:
        return self._ways[at]

    def __iter__(self) -> Iterator[Way]:
        return iter(self._ways)

    def __str__(self) -> str:
        """A table of the ways, and why the next ones lost."""
        table = plain_table()
        headings = "", "dp × pp × tp", "schedule", "micro-batches", "sharding", "recompute"
        for heading in headings:
            table.add_column(heading)
        for heading in ("step", "memory", "MFU"):
            table.add_column(heading, justify="right")
        table.add_column("waits for")
        for at, way in enumerate(self._ways):
            layout, candidate = way.layout, way.candidate
            name = candidate.recipe.name + (f" × {way.chunks}" if way.chunks > 1 else "")
            waits = sorted(way.waits.items(), key=lambda each: -each[1])
            causes = [f"{cause} {share:.0%}" for cause, share in waits if share >= _SMALL]
            table.add_row(
                str(at),
                f"{layout.replicas} × {layout.stages} × {layout.group}",
                name,
                f"{candidate.microbatches} × {way.samples}",
                way.sharding,
                (way.recompute if isinstance(way.recompute, str) else way._some.strip())
                + ", offload" * (way.offload != "never"),
                time_text(way.seconds),
                bytes_text(way.memory),
                f"{way.mfu:.0%}",
                ", ".join(causes[:2]) or "computing",
            )
        lines = [table_text(table)]
        if self.lost:
            lines.append("lost:")
            lines += [f"  {way}: {self._why(way)}" for way in self._nearest()]
        return "\n".join(lines)

    def _nearest(self) -> list[Way]:
        """Of the ways that lost the fastest that fit, and those that lack the least memory."""
        memory = self._ways[0].layout.cluster.device.memory
        fit = [way for way in self.lost if way.memory <= memory]
        others = [way for way in self.lost if way.memory > memory]
        fit.sort(key=lambda way: way.seconds)
        others.sort(key=lambda way: way.memory)
        return [*fit[:_SHOWN], *others[:_SHOWN]]

    def _why(self, way: Way) -> str:
        memory = way.layout.cluster.device.memory
        if way.memory > memory:
            return f"needs {bytes_text(way.memory)} of {bytes_text(memory)} on a device"
        slower = way.seconds / self._ways[0].seconds - 1
        return f"{slower:.1%} slower; waits for {way.limit}"

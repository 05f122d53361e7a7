"""The plain loop over micro-batches, on numbers that stand for how tensors were computed."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from fxpipe.ir.task import KINDS
from fxpipe.ir.value import HOST, Edge


def tensor(*origin: object) -> int:
    """The number of the tensor that an operation returns."""
    return hash(origin)


@dataclass
class Model:
    """The state of all stages over some steps, and the caller's results.

    Batches and versions count from the first step.

    Attributes:
        weights: (stage, version) → weights.
        gradients: (stage, batch) → the gradients of its backwards until the update, sorted: they
            may be added in any order, which changes the rounding of the sum alone.
        statistics: (stage, copy) → the buffers that its forwards wrote, in order.
        given: (value, the stage it comes from, whether it is a gradient, micro-batch, batch) →
            the caller's results; each stage that reads an input returns its own gradient of it.
        seen: (kind, stage, micro-batch, batch) → what a user-defined task has read.
    """

    weights: dict[tuple[int, int], int] = field(default_factory=dict)
    gradients: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    statistics: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    given: dict[tuple[str, int, bool, int, int], int] = field(default_factory=dict)
    seen: dict[tuple[str, int, int | None, int], int] = field(default_factory=dict)

    @staticmethod
    def fresh(stages: int) -> Model:
        return Model({(stage, 0): tensor("weights", stage) for stage in range(stages)})

    def forward(self, stage: int, version: int, inputs: list[int], copy: int = 0) -> int:
        """Return what a forward saves, which determines its outputs."""
        kept = tensor("forward", self.weights[stage, version], *inputs)
        self.statistics.setdefault((stage, copy), []).append(kept)
        return kept

    def gradient(self, stage: int, version: int, kept: int, arriving: list[int]) -> int:
        """Return what determines the gradients of a stage's inputs and weights."""
        return tensor("backward", self.weights[stage, version], kept, *arriving)

    def add(
        self, stage: int, batch: int, gradient: int, version: int, to: list[int] | None = None
    ) -> None:
        """Add the gradients of a stage's weights of a version, to a copy's sum ``to`` if given."""
        added = tensor("weights", self.weights[stage, version], gradient)
        own = self.gradients.setdefault((stage, batch), []) if to is None else to
        insort(own, added)

    def take(self, stage: int, batch: int, summed: list[int]) -> None:
        """Add the sum of a copy of a stage."""
        self.gradients.setdefault((stage, batch), []).append(tensor("of a copy", *summed))

    def reduce(self, stage: int, batch: int) -> None:
        """Sum a stage's gradients over the replicas."""
        added = self.gradients.get((stage, batch), [])
        self.gradients[stage, batch] = [tensor("sum over replicas", *added)]

    def norm(self, stage: int, batch: int) -> int:
        """The norm of a stage's gradients."""
        return tensor("norm", *self.gradients.get((stage, batch), []))

    def clip(self, stage: int, batch: int, norms: list[int]) -> None:
        """Scale a stage's gradients by the norms of all stages."""
        added = self.gradients.get((stage, batch), [])
        self.gradients[stage, batch] = [tensor("clip", *norms, 0, *added)]

    def update(self, stage: int, batch: int, reads: int, writes: int) -> None:
        weights = self.weights[stage, reads]
        added = self.gradients.pop((stage, batch), [])
        self.weights[stage, writes] = tensor("update", weights, *added)

    def look(self, kind: str, stage: int, i: int | None, batch: int, version: int) -> None:
        """Record what a user-defined task reads."""
        reads = KINDS[kind].reads
        gradients = self.gradients.get((stage, batch), []) if "gradients" in reads else []
        weights = self.weights[stage, version] if "parameters" in reads else 0
        self.seen[kind, stage, i, batch] = tensor("look", weights, *gradients)


def plain_loop(
    stages: int,
    edges: tuple[Edge, ...],
    microbatches: int,
    *,
    trains: bool,
    updates: bool,
    steps: int = 1,
    delays: Callable[[int, int | None], int] = lambda stage, microbatch: 0,
    before: str = "",
    after: str = "",
    reduces: bool = False,
    clips: bool = False,
    copies: Callable[[int, int], int] = lambda stage, microbatch: 0,
) -> Model:
    """Run steps on one device: micro-batch after micro-batch, stage after stage, and back.

    Args:
        stages: the number of stages.
        edges: the edges between them, those of gradients among them.
        microbatches: the number of micro-batches in a step.
        trains: whether there is a backward.
        updates: whether the weights are updated.
        steps: the number of steps.
        delays: stage and micro-batch (None for tasks once per step) → how many updates old its
            weights are.
        before: letters of user-defined tasks before the update, once per step and stage.
        after: letters of user-defined tasks after the update.
        reduces: whether gradients are summed over several replicas.
        clips: whether gradients are clipped by the norms of all stages.
        copies: stage and micro-batch → 0, or the number of the stage's copy that computes it.
    """
    model = Model.fresh(stages)
    for batch in range(steps):
        given: dict[tuple[int, int], list[int]] = {}
        for i in range(microbatches):
            old = [max(batch - delays(stage, i), 0) for stage in range(stages)]
            at = [copies(stage, i) for stage in range(stages)]
            _plain_microbatch(model, stages, edges, i, batch, old, trains, at, given)
        for (stage, _), summed in sorted(given.items()):
            model.take(stage, batch, summed)
        for stage in range(stages if reduces else 0):
            model.reduce(stage, batch)
        norms = [model.norm(stage, batch) for stage in range(stages)] if clips else []
        for stage in range(stages):
            if clips:
                model.clip(stage, batch, norms)
            for kind in before:
                model.look(kind, stage, None, batch, max(batch - delays(stage, None), 0))
            if updates or steps > 1:  # otherwise the caller updates, between steps
                model.update(stage, batch, batch, batch + 1)
            for kind in after:
                model.look(kind, stage, None, batch, batch + 1)
    return model


def _plain_microbatch(
    model: Model,
    stages: int,
    edges: tuple[Edge, ...],
    i: int,
    batch: int,
    old: list[int],
    trains: bool,
    at: list[int],
    given: dict[tuple[int, int], list[int]],
) -> None:
    gradients = [e for e in edges if e.gradient]
    edges = tuple(e for e in edges if not e.gradient)
    values = {e.value: tensor("caller", e.value, i, batch) for e in edges if e.source == HOST}
    kept = {}
    for stage in range(stages):
        inputs = [values[e.value] for e in edges if e.target == stage]
        kept[stage] = model.forward(stage, old[stage], inputs, at[stage])
        values |= {e.value: tensor(kept[stage], e.value) for e in edges if e.source == stage}
    model.given |= {
        (e.value, e.source, False, i, batch): values[e.value] for e in edges if e.target == HOST
    }
    if not trains:
        return
    back = {e: tensor("gradient", e.value, i, batch) for e in gradients if e.source == HOST}
    for stage in reversed(range(stages)):
        arriving = [back[e] for e in gradients if e.target == stage]
        found = model.gradient(stage, old[stage], kept[stage], arriving)
        to = given.setdefault((stage, at[stage]), []) if at[stage] else None
        model.add(stage, batch, found, old[stage], to)
        back |= {e: tensor(found, e.value) for e in gradients if e.source == stage}
    model.given |= {
        (e.value, e.source, True, i, batch): back[e] for e in gradients if e.target == HOST
    }

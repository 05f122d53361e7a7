"""The extension that shards gradients and weights over the replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from fxpipe.compiler.options import Options
from fxpipe.errors import InputError
from fxpipe.extend import Extension
from fxpipe.extensions.clipping.opcodes import Norm
from fxpipe.extensions.replicas.extension import Replicas, bucket_size
from fxpipe.extensions.replicas.lowering import gather_weights
from fxpipe.extensions.replicas.opcodes import AllGather, PartialBackward, ReduceScatter
from fxpipe.extensions.sharding.opcodes import (
    AwaitSums,
    PartialToOwners,
    ReduceToOwners,
    ShareNorms,
    UpdateShards,
)
from fxpipe.extensions.sharding.placing import add_shards
from fxpipe.extensions.sharding.views import remake_views
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.passes.runner import Pass

KINDS = ("zero2", "zero3")
GATHERS = ("runs", "step")


@dataclass(frozen=True)
class Sharding(Extension):
    """Let each replica keep the gradients' sums, the optimizer's state and, with "zero3", the
    weights of some parameters only (ZeRO, arXiv 1910.02054); see docs/ranks.md.

    Losses and weights are those of ``Replicas``, to the bit. The parameters of a stage are dealt
    out whole, about as many bytes to each replica. With one replica nothing changes.

    Attributes:
        kind: "zero2" for gradients and state: gradients go only to the replica that updates their
            parameter, and new weights to all. "zero3" also for weights: a stage gathers them before
            it computes, and drops the others' behind that.
        gathers: with "zero3", "runs" to gather before each run of tasks of a stage, or "step" once
            a step. A schedule with tasks G and D of its own stays as it is.
        ahead: whether to begin to gather the next run's stage while one computes, for which a
            device has memory for two whole stages. By default where a device has more than two.
        bucket_cap_mb: as for ``Replicas``: of how many MiB gradients are sent together, while the
            last backward computes the next ones.
    """

    kind: str
    gathers: str = "runs"
    ahead: bool | None = None
    bucket_cap_mb: float = 25

    def options(self, options: Options) -> Options:
        """The options with these. Raises InputError if it does not know a value, or there is no
        optimizer."""
        for name, known in (("kind", KINDS), ("gathers", GATHERS)):
            if getattr(self, name) not in known:
                raise InputError(
                    f"{name} of Sharding is {getattr(self, name)!r}; give "
                    f"{' or '.join(map(repr, known))}"
                )
        if self.ahead not in (None, True, False):
            raise InputError(f"ahead of Sharding is {self.ahead!r}; give True, False or None")
        if options.optimizer is None:
            raise InputError(
                "Sharding is given, and there is no optimizer; give optimizer=, such as lambda "
                "parameters: torch.optim.AdamW(parameters), or leave it out"
            )
        weights = self.kind == "zero3" and options.replicas > 1
        bucket = bucket_size(self.bucket_cap_mb)
        return replace(options, sharded=True, sharded_weights=weights, bucket_bytes=bucket)

    def check(self, options: Options) -> None:
        """Raise InputError if it cannot work with these options."""
        if any(isinstance(each, Replicas) for each in options.extensions):
            raise InputError("Sharding does what Replicas does, and more; leave Replicas out")
        if not options.shards:
            return
        recipe, devices = options.recipe, len(options.devices)
        delay = recipe.delay(devices, 2 * devices) if callable(recipe.delay) else recipe.delay
        if delay if not isinstance(delay, Sequence) else any(delay):
            raise InputError(
                f"schedule {recipe.name!r} keeps several versions of the weights, which Sharding "
                "does not divide; take one that ends with a flush, such as 'looped-bfs' or '1f1b', "
                "or fxpipe.Replicas(shard_optimizer=True)"
            )
        if options.places and options.sharded_weights:
            raise InputError("Sharding('zero3') is for CPU devices so far; give Sharding('zero2')")

    def passes(self, options: Options) -> Mapping[str, Sequence[tuple[str, Pass]]]:
        """What places gathers and drops, what makes views of weights anew, and what sends gradients
        to their owners alone."""
        if not options.shards:
            return {}
        change = self.shard if options.sharded_weights else self.keep
        found = {"program": [("lower", Pass(change, "program, updates", "program", apart=True))]}
        if options.sharded_weights:
            found["schedule"] = [("add_clip", Pass(self.add_shards, "schedule", "schedule"))]
            found["plan"] = [("divide", Pass(remake_views, "plan", "plan"))]
        return found

    def add_shards(self, schedule: Schedule) -> Schedule:
        """Add gathers and drops; a pass."""
        if schedule.overlaps:
            return schedule
        return add_shards(schedule, once=self.gathers == "step", ahead=self.ahead)

    def shard(self, program: Program, updates: bool) -> Program:
        """Program → Program: each replica updates its shard alone.

        before:  reduce_scatter s0;    all_gather s0;  barrier;  update s0 v0 -> v1
        after:   reduce_to_owners s0;  await_sums s0;  barrier;  update_shards s0 v0 -> v1

        Raises:
            InputError: it is for a call whose backward leaves gradients in ``.grad``.
        """
        if any(isinstance(x, ReduceScatter) for row in program.lists for x in row) and not updates:
            raise InputError(
                "with Sharding('zero3') no replica has the weights to which a backward through a "
                "call would add gradients; train with step(), or call the pipe under "
                "torch.no_grad() or in eval mode"
            )
        return _changed(program, weights=True)

    def keep(self, program: Program, updates: bool) -> Program:
        """Program → Program: each replica updates its share, and sends the new weights to all.

        before:  reduce_scatter s0;    all_gather s0;  barrier;  update s0 v0 -> v1
        after:   reduce_to_owners s0;  await_sums s0;  barrier;  update s0 v0 -> v1
                 gather_weights s0
        """
        return gather_weights(_changed(program, weights=False)) if updates else program


def _changed(program: Program, *, weights: bool) -> Program:
    def change(x: ins.Instruction) -> ins.Instruction:
        match x:
            case ReduceScatter():
                return ReduceToOwners(x.stage, x.batch)
            case PartialBackward():
                return PartialToOwners(*(getattr(x, field.name) for field in fields(x)))
            case AllGather():
                return AwaitSums(x.stage, x.batch)
            case Norm():
                return ShareNorms(x.stage, x.batch)
            case ins.Update() if weights:
                return UpdateShards(x.stage, x.reads, x.writes, x.batch)
        return x

    return replace(program, lists=tuple(tuple(map(change, row)) for row in program.lists))

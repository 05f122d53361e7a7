"""The extension that says how replicas share the work of an update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fxpipe.compiler.options import Options
from fxpipe.errors import InputError
from fxpipe.extend import Extension
from fxpipe.extensions.replicas.lowering import gather_weights
from fxpipe.passes.runner import Pass


@dataclass(frozen=True)
class Replicas(Extension):
    """How the replicas of a pipeline sum gradients and update weights; see docs/ranks.md.

    With one replica nothing changes.

    Attributes:
        shard_optimizer: let each replica keep the optimizer's state of some parameters only, update
            these, and send the new weights to the other replicas (ZeRO, stage 1, arXiv 1910.02054).
            The weights are the same to the bit; half as many bytes more are sent. The parameters of
            a stage are dealt out whole, about as many bytes to each replica. ``pipe.optimizer``
            then gives no ``state_dict``; ``pipe.save`` saves the state.
        bucket_cap_mb: the size in MiB of the buckets in which a stage's gradients are summed, as in
            ``DistributedDataParallel``. A bucket is sent while the last backward computes the next
            ones. ``math.inf`` sums all gradients of a stage at once. The sums are the same to the
            bit.
        in_order: add up gradients in the order of the replicas on CUDA devices, too, as CPU devices
            always do. Else NCCL adds them in an order of its own, which takes less memory.
    """

    shard_optimizer: bool = False
    bucket_cap_mb: float = 25
    in_order: bool = False

    def options(self, options: Options) -> Options:
        """The options with these. Raises InputError if a value is no flag or no size, or there is
        no optimizer to shard."""
        sharded = self.shard_optimizer
        for name in ("shard_optimizer", "in_order"):
            if not isinstance(flag := getattr(self, name), bool):
                raise InputError(f"{name} is {flag!r}; give True or False")
        if sharded and options.optimizer is None:
            raise InputError(
                "shard_optimizer=True, and there is no optimizer; give optimizer=, such as lambda "
                "parameters: torch.optim.AdamW(parameters), or leave shard_optimizer out"
            )
        bucket, in_order = bucket_size(self.bucket_cap_mb), self.in_order
        return replace(options, sharded=sharded, bucket_bytes=bucket, in_order=in_order)

    def passes(self, options: Options) -> Mapping[str, Sequence[tuple[str, Pass]]]:
        """With sharded optimizers, what exchanges new weights."""
        if not options.shards:
            return {}
        return {"program": [("lower", Pass(gather_weights, "program", "program", apart=True))]}


def bucket_size(cap: float) -> float:
    """The bytes of a bucket of so many MiB. Raises InputError if that is no size."""
    if not isinstance(cap, int | float) or isinstance(cap, bool) or cap <= 0:
        raise InputError(
            f"bucket_cap_mb is {cap!r}; give a number of MiB above 0, or math.inf to sum all "
            "gradients of a stage at once"
        )
    return cap * 2**20

"""Arguments and names that earlier versions had, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping

from fxpipe.errors import InputError

REMOVED = {
    "delay": "write schedule=fxpipe.schedules.two_bw.delayed(2), for a function of your own "
    'schedule=fxpipe.Recipe("name", function).delayed(2)',
    "loss_weight": "write extensions=[fxpipe.LossWeight(the same function)]",
    "dispatch": 'write extensions=[fxpipe.Dispatch("device")], or "thread"; "auto" is what is done '
    "without",
    "predict": "leave it out; batches read the weights that the delay says",
    "verbose": 'write logging.basicConfig() and logging.getLogger("fxpipe").setLevel("DEBUG"), '
    "which print every pass and its time",
    "stage_compiler": "write extensions=[fxpipe.Inductor()]",
    "deferred_batchnorm": "write extensions=[fxpipe.DeferredBatchNorm()]",
    "tracer": "leave it out; models are traced by torch.export",
    "cuda_graphs": "write extensions=[fxpipe.CudaGraphs()]",
    "shard_optimizer": "write extensions=[fxpipe.Replicas(shard_optimizer=True)]",
    "bucket_cap_mb": "write extensions=[fxpipe.Replicas(bucket_cap_mb=25)]",
    "offload": 'write extensions=[fxpipe.Offload("except_last")]',
    "leaf_modules": 'write extensions=[fxpipe.LeafModules("encoder", nn.LSTM)]',
    "fuse_accumulation": "leave it out; gradients are then added as in the plain loop, to the bit",
    "ordered_sums": "leave it out; gradients of replicas are added in the order of the replicas",
    "recompute_check": 'leave it out; to find what differs, train with recompute="never" too, '
    "and compare the losses",
}
"""Argument of ``fxpipe.compile`` → what to do now. docs/removed.md has the reasons."""

GONE = {
    "fxpipe.Generator": "write plain.load_state_dict(pipe.state_dict()) and plain.generate(...), "
    "with a model on one device; over ranks, every rank calls pipe.state_dict(full=True)",
    "fxpipe.Prediction": "leave it out; batches read the weights that the delay says",
    "fxpipe.Search": "write found = fxpipe.search_schedule(pipe.plan, microbatches), or for "
    "weights of one version before schedule=fxpipe.schedules.two_bw",
    "fxpipe.Symbolic": "leave it out; torch.export traces models. A tracer of your own is an "
    "extension, see docs/extensions.md",
    "fxpipe.prefetch": "iterate the loader, with pin_memory=True; a step copies its micro-batches "
    "beside the computations",
    "fxpipe.is_recomputing": "a module that counts its calls counts recomputations, too",
    "fxpipe.plan_training": 'compile with schedule="auto" for each number of devices, and compare '
    "pipe.simulate()",
    "fxpipe.Cluster": "fxpipe.plan_training, which read it, went too; compile with CPU devices, as "
    "many as the cluster has",
    "fxpipe.simulator": "write from fxpipe.extensions.simulator import Link, Sizes, Simulation",
    "pipe.optimizers": "pipe.optimizer has all groups, and the state of this process's stages",
    "pipe.sizes": "to know whether a size fits, pipe.prepare with it, and look at pipe.simulate()",
}
"""Attribute → the same."""

SCHEDULES = {
    "cdp-v1": 'write "2bw", which has its order and its delay',
    "cdp-v2": 'write "pipedream", which reads the newest weights that all micro-batches of a stage '
    "can read",
    "dualpipe": 'write "dualpipe-v", which has both directions in one V of stages',
    "pipedream-vertical": 'write "1f1b-async", which has its order and its delay',
    "search": 'write "1f1b", pipe.prepare(x, target=y), found = fxpipe.search_schedule(pipe.plan, '
    "microbatches), and then compile(..., schedule=found.schedule)",
}
"""Name of a schedule → the same."""


def gone(name: str) -> str:
    """What to do instead of an attribute that went away, for its AttributeError; else empty."""
    return f"; it was removed: {GONE[name]}" if name in GONE else ""


def refuse_removed(given: Mapping[str, object]) -> None:
    """Raise InputError for an argument that went away, TypeError for one that never was."""
    for name in given:
        if name in REMOVED:
            raise InputError(f"fxpipe.compile takes {name} no longer: {REMOVED[name]}")
        raise TypeError(f"compile() got an unexpected keyword argument {name!r}")

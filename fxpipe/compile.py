"""``fxpipe.compile``, which makes a pipeline of a model."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import nn

from fxpipe import arguments
from fxpipe.arguments import ScheduleLike
from fxpipe.compiler.auto import AutoCompiler, PendingPlacement
from fxpipe.compiler.capturing import check_cuda_graphs
from fxpipe.compiler.compiler import Compiler
from fxpipe.compiler.objective import Loss, Reduction, Weight
from fxpipe.compiler.options import Options, Tracer
from fxpipe.devices import Devices, read_group
from fxpipe.engine import Engine
from fxpipe.errors import InputError
from fxpipe.passes.inductor.compile_stages import StageCompiler
from fxpipe.passes.partition.options import Each, Partition, read_partition
from fxpipe.passes.schedule import RecomputeLike
from fxpipe.pipeline import Pipeline
from fxpipe.runtime.batch import BatchDims
from fxpipe.runtime.choice import Choice, Dispatch
from fxpipe.runtime.devices.cuda import home
from fxpipe.runtime.ranks.group import refuse_on_ranks
from fxpipe.runtime.weights.optimizer import GivenOptimizer, OptimizerLike
from fxpipe.torchtools.meta import bytes_without_data

_compiled: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Pipeline]] = weakref.WeakKeyDictionary()

_compiling = threading.RLock()
"""Held while that is looked at."""


def compile(
    model: nn.Module,
    devices: Devices,
    *,
    schedule: ScheduleLike = "1f1b",
    microbatches: int | None = None,
    memory_limits: Each | None = None,
    delay: int | None = None,
    predict: bool = False,
    recompute: RecomputeLike = "never",
    offload: RecomputeLike = "never",
    clip_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    loss: Loss | None = None,
    reduction: Reduction = "mean",
    loss_weight: Weight | None = None,
    optimizer: OptimizerLike | None = None,
    shard_optimizer: bool = False,
    ordered_sums: bool = True,
    bucket_cap_mb: float = 25,
    example: Any = None,
    batch_dims: BatchDims | None = None,
    deferred_batchnorm: bool = False,
    partition: str | Sequence[str] | Partition = "auto",
    tracer: Tracer = "export",
    leaf_modules: Sequence[str | type[nn.Module] | nn.Module] = (),
    fuse_accumulation: bool = False,
    recompute_check: bool = False,
    dispatch: Dispatch | Literal["auto"] = "auto",
    cuda_graphs: bool = False,
    stage_compiler: StageCompiler | None = None,
    verbose: bool = False,
) -> Pipeline:
    """Cut a model into stages over devices and make a pipeline that trains it.

    What the model's code reads besides tensors (attributes, globals, hooks, its functions) may
    change between steps: the model is then traced anew. docs/tracing.md lists what is noticed.

    Args:
        model: any module; its parameters are used as they are, never copied. On the meta device it
            gets its values later, by ``load``, ``load_state_dict`` or ``reset_parameters``; over
            ranks, each allocates what its own stages have.
        devices: names or torch.devices. A device may be listed several times; each entry then
            computes on a stream of its own. Or torch.cuda.Streams to compute on, also several of
            one GPU, such as those of green contexts. Or a number of CUDA devices, or of CPU devices
            where there is no CUDA. Each holds one stage, or as many as the schedule places there.
            Or a DeviceMesh: each process of it runs one device, and all of them call this. Its
            dimension "pp" has the devices of a pipeline, and "dp" replicas of the pipeline.
        schedule: a name ("1f1b", "gpipe"), a Schedule, its text, a path to its text,
            "path/to/file.py:name" for one of a Python file, which is run, or a function that writes
            one. With "search" the first step searches for one, for at most ten seconds, with the
            times that its stages were measured to take, and within ``memory_limits``, without a
            flush where a ``delay`` is given; see ``search_schedule``. With "auto" it takes the
            fastest that is predicted to keep ``memory_limits`` of the library's schedules with a
            flush, with one stage a device or two, and one that it searches for, with as many
            micro-batches and as much recomputation and offloading as are best, where they are not
            given. A larger batch than all before decides anew, but over replicas. docs/planner.md
            tells more.
        microbatches: into how many parts a batch is split; by default four per device. A batch of
            fewer samples, as the last of an epoch may be, is split into single samples.
        memory_limits: bytes that devices may hold: one number for all, or a list with one for each
            and None where there is no limit; see ``fxpipe.Partition``.
        delay: by how many versions the weights that a batch reads may be behind the newest, for
            schedules whose batches overlap; by default the schedule's own. With
            ``schedule="search"`` it is the most that may be found.
        predict: let a batch read predicted weights instead of weights that are ``delay`` versions
            old. The optimizer's momentum predicts what they will be when the batch's update
            comes: SpecTrain for SGD with momentum, XPipe for Adam and AdamW. Without a delay
            there is nothing to predict.
        clip_norm: the greatest norm that the gradients of a batch may have, over all stages, as in
            ``torch.nn.utils.clip_grad_norm_``. Before each update the stages exchange the norms of
            their gradients.
        scaler: a gradient scaler for half precision. Losses are scaled for backward only,
            gradients are unscaled before they are clipped, and a batch whose gradients are not
            finite updates no stage. The loss that ``step`` returns and ``grad_norm`` are unscaled.
        recompute: "never", "always", or "except_last" (all micro-batches but the last): let a stage
            keep only its inputs, and run its forward again before its backward. Or a mode for
            each stage: a list of modes, or a mapping from a stage's number to its mode; stages
            that are left out never recompute.
        offload: the same modes: let a stage store what it keeps for its backward outside of its
            device's memory, beside its computations, and fetch it in time: CUDA devices in pinned
            host memory, CPU devices in a file without a name, in the folder of Python's
            ``tempfile`` (TMPDIR). Where it recomputes these are its inputs.
        loss: ``loss(output, *targets)`` → a scalar, or one loss per sample. None where the model
            returns the loss, alone or as ``.loss``. A parameter that the loss function reads from
            the model directly gets no gradient from it, and where batches overlap the loss reads
            its newest version.
        reduction: whether the loss is a "mean", so that the loss of a micro-batch is weighted by
            its share of the samples, or a "sum" over them. Where a mean ``cross_entropy`` or
            ``nll_loss`` ignores targets or weights classes (also inside the loss that transformers
            compute from ``labels=``), it is weighted by its share of the targets that count. So
            the loss and the gradients are those of the whole batch.
        loss_weight: for any other mean over something else than samples, such as
            ``(losses * mask).sum() / mask.sum()``: ``loss_weight(*targets)`` → the micro-batch's
            weight in that mean, as ``lambda target, mask: mask.sum()``. Where the model returns
            the loss, the function is given the model's inputs. It takes precedence over what is
            found in the loss itself. Without it there is one warning if the loss is not that of
            the whole batch.
        optimizer: a torch optimizer over the model's parameters; or a function from parameters to
            one, called once per stage; or one whose argument is called ``named_parameters``, which
            is given pairs of name and parameter of the whole model, once. With it ``step`` updates
            the weights, and ``pipe.optimizer`` is one optimizer over all stages. Without it
            ``step`` adds to ``.grad``.
        shard_optimizer: let each of several replicas keep the optimizer's state for one part of
            every parameter alone, and update that part; then they give each other the new weights.
            It is the first stage of ZeRO. The weights are the same to the bit, and as many bytes
            are sent. Each parameter is cut flat, so the optimizer has to treat each element by
            itself, as SGD, Adam and AdamW do; any other is refused. ``pipe.optimizer`` then has the
            settings of its groups alone. With one replica nothing changes.
        ordered_sums: add the gradients of replicas in their order, so that sums are the same to the
            bit each time. False adds them as they come: from three replicas on only the last one
            is still to be added when all have come, and the last bits differ from run to run.
            Either way all replicas get the same sums.
        bucket_cap_mb: the size in MiB of the buckets in which the gradients of a stage are summed
            over replicas, as in ``DistributedDataParallel``. Each is on its way while the last
            backward computes the next ones. ``math.inf`` sums all of a stage at once. The sums are
            the same to the bit.
        example: a tuple of inputs of a batch, or ``(args, kwargs)`` with what ``step`` takes,
            ``target`` among them; the model is compiled for it at once. Without it the first call
            compiles.
        batch_dims: input → its batch dimension, where that is not 0, or None where every
            micro-batch gets the whole tensor: ``{"x": 1, "table": None, "target": 1}``. A part of
            a nested input is called ``"x['left']"``, one of several targets ``"target[0]"``. A
            call must have every input that is named here, but for optional inputs of the model.
            A sparse tensor cannot be split: give None for it.
        deferred_batchnorm: whether BatchNorm's running statistics are updated once per step, by
            the mean and the variance of the whole batch, as without micro-batches. They are
            gathered from those of the micro-batches, so the last bits may differ. Otherwise each
            micro-batch updates them, in order. Either way each micro-batch is normalised by its
            own statistics.
        partition: "auto", names of submodules, at each of which a stage begins, or a
            ``fxpipe.Partition`` with memory limits, device speeds, links, or submodules to keep
            together.
        tracer: "export" (torch.export), or "symbolic" (torch.fx, submodules of torch.nn are
            called as they are).
        leaf_modules: submodules (names, classes or the modules themselves) that are not traced but
            called as they are in every step, with their hooks, control flow and autograd
            functions. Autograd then runs backward in every stage. Where a line cannot be traced,
            such as a branch on the values of a tensor or ``torch.cond``, the smallest submodule
            around it that works as a leaf module is made one automatically, and so is a loss. The
            logger "fxpipe" then has a warning with the line, the submodule and what that costs.
            Stages with ``torch.cond``, ``while_loop`` and their like run one at a time, as PyTorch
            can trace these in one thread only. The sizes of what a leaf module returns must not
            depend on values: the model computes with the sizes of the first micro-batch. This is
            checked for the leaf modules that were made automatically.
        fuse_accumulation: let matrix products add parameters' gradients to the sums over
            micro-batches in their own kernels. It saves time in linear layers; gradients then
            equal the plain loop's to rounding, not to the bit.
        recompute_check: compare the result of each recomputation with that of its forward, to the
            bit. Where they differ, an error names the first node that does. It takes time, and on
            a CUDA device the host waits for each recomputation.
        dispatch: which threads run the devices' instruction lists, or launch them on CUDA devices:
            "device" has a thread for each device, "thread" has one for all, in an order in which
            it never has to wait. Results are the same to the bit. "auto" is "device" on CUDA
            devices, and the faster of the two on CPU devices. Python runs one thread at a time, so
            several threads hand the interpreter lock over at every operation. Where operations
            are shorter than that, one thread is faster, and ``profile`` shows the devices one
            after another. The choice is made for each compiled plan, from the time of operations
            on the first micro-batch, or in the first three steps where you named the cut, and the
            time of a hand-over on this machine, and is logged. Where operations of a larger
            micro-batch turn out to be long, each device gets a thread after all. The number of
            intra-op threads is the same either way. Tasks of your own, optimizers and leaf modules
            that wait for another device need "device".
        cuda_graphs: on CUDA devices, capture the computation of a stage into CUDA graphs in its
            first steps, and replay them from then on: one launch instead of one for each operation.
            Results are the same to the bit. For each micro-batch size a stage has fixed memory for
            as many micro-batches as the schedule has in flight there, the temporary memory of their
            operations included, and for one more set of parameter gradients; ``simulate`` counts
            none of it. Parameters are read at their addresses: where these change (an assigned
            state dict), the stage is captured again. Stages that draw random numbers, have leaf
            modules, or compute sizes from data run without graphs; the logger "fxpipe" has an info
            record of each, which ``verbose`` prints. Where batches overlap, call ``pipe.flush()``
            before ``torch.cuda.synchronize()`` as long as stages are being captured: nothing may
            wait for a device during a capture.
        stage_compiler: "inductor" has torch's inductor compile the graphs of every stage: of its
            forward, its backward and the halves of that, for each size of micro-batch that occurs,
            in steps and in calls. Results then equal the model's to rounding; they are still the
            same for any schedule, recomputation and way of dispatch, and random numbers stay those
            that are drawn without it. The first compilation takes minutes for a large model, in as
            many processes as there are processors, and needs a C++ compiler, on CUDA devices
            triton. What it makes is kept in the folder TORCHINDUCTOR_CACHE_DIR, so that the next
            start compiles nothing. "auto" compiles a graph only where a call then takes at most
            0.95 of its time, measured when it is compiled. What runs as it is, such as a stage with
            leaf modules, is an info record of the logger "fxpipe", and the table of stages says
            what is compiled. It excludes ``cuda_graphs``.
        verbose: print every pass and its time on standard error, with a line that shows what is
            running. The logger "fxpipe" has the passes as debug records, and two info records: one
            for the whole compilation and one for the choice of threads.

    Returns:
        The pipe: a module with the parameters, buffers and submodules of the model.

    Raises:
        InputError: an argument is wrong; the error says which and what to do.
        TraceError, PartitionError: with ``example``, see ``Pipeline.step``.
    """
    if isinstance(model, Pipeline):
        raise InputError("the model is a pipe already; compile the module that it was made of")
    group, places = read_group(devices)
    with ExitStack() as failed, group.calling("compile"):
        torch_devices = tuple(home(place) for place in places)
        arguments.check_model(model, torch_devices[0])
        with _compiling:
            _check_free(model)
        arguments.check_known("tracer", tracer, get_args(Tracer))
        arguments.check_stage_compiler(stage_compiler, cuda_graphs)
        given_optimizer = None if optimizer is None else GivenOptimizer(optimizer, model)
        arguments.check_flags(
            deferred_batchnorm=deferred_batchnorm,
            shard_optimizer=shard_optimizer,
            ordered_sums=ordered_sums,
            fuse_accumulation=fuse_accumulation,
            recompute_check=recompute_check,
            cuda_graphs=cuda_graphs,
            predict=predict,
            verbose=verbose,
        )
        if cuda_graphs:
            refuse_on_ranks(
                group,
                "cuda_graphs",
                "a capture waits for the device, which may wait for another rank; leave it out",
            )
            check_cuda_graphs(
                torch_devices[0],
                recompute_check=recompute_check,
                fuse_accumulation=fuse_accumulation,
            )
        who = arguments.read_dispatch(dispatch, torch_devices[0])
        cuts = read_partition(partition, memory_limits)
        cuts.check(model, len(places))
        decides = arguments.read_decides(schedule, delay, predict)
        # until it is decided what a step is like, calls have the stages of this schedule
        known = "zb-h1" if decides else schedule
        recipe, microbatches = arguments.read_schedule(known, len(places), microbatches, delay)
        where = PendingPlacement()
        recipe = replace(recipe, name=decides, placement=where) if decides else recipe
        recipe = recipe.predicting() if predict else recipe
        arguments.check_overlap(recipe, optimizer)
        if recipe.copies(len(places)):
            arguments.check_copies(recipe, torch_devices[0])
        arguments.check_clipping(clip_norm, scaler, optimizer)
        arguments.check_sharding(shard_optimizer, optimizer, predict)
        options = Options(
            model=model,
            devices=tuple(places),
            torch_devices=torch_devices,
            recipe=recipe,
            microbatches=microbatches,
            objective=arguments.read_objective(loss, reduction, loss_weight),
            optimizer=given_optimizer,
            shard_optimizer=shard_optimizer,
            ordered_sums=ordered_sums,
            bucket_cap_mb=arguments.check_bucket_cap(bucket_cap_mb),
            clip_norm=clip_norm,
            scaler=scaler,
            recompute=arguments.read_modes("recompute", recompute, recipe.stages(len(places))),
            offload=arguments.read_modes("offload", offload, recipe.stages(len(places))),
            batch_dims=arguments.read_batch_dims(batch_dims, model),
            deferred_batchnorm=deferred_batchnorm,
            partition=cuts,
            tracer=tracer,
            leaf_modules=arguments.read_leaf_modules(leaf_modules, model),
            fuse_accumulation=fuse_accumulation,
            recompute_check=recompute_check,
            dispatch=who,
            cuda_graphs=cuda_graphs,
            stage_compiler=stage_compiler,
            threads=group.members.threads or max(1, torch.get_num_threads() // len(places)),
            places=torch_devices if torch_devices[0].type == "cuda" else (),
            verbose=verbose,
            group=group,
            replicas=group.replicas,
            decides=decides,
            hollow=bytes_without_data(model, torch_devices[0]),
        )
        given = None if example is None else arguments.read_example(example)
        choice = Choice(1 if group.size > 1 else len(places), options.dispatch)
        compiler = AutoCompiler(options, choice, where) if decides else Compiler(options, choice)
        pipe = Pipeline(options, compiler, Engine(options, choice))
        failed.callback(pipe.close)
        group.agree("what fxpipe.compile was given", options.text if group.size > 1 else "")
        with _compiling:
            _check_free(model)  # as another thread may have compiled it meanwhile
            _compiled[model] = weakref.ref(pipe)
        if given is not None:
            args, kwargs = given
            pipe.prepare(*args, **kwargs)
        failed.pop_all()
        return pipe


def _check_free(model: nn.Module) -> None:
    """Raises InputError where the model, a submodule, or a module around it is compiled already."""
    owner = _compiled[model]() if model in _compiled else None
    if owner is not None and not owner.closed:
        raise InputError(
            "the model is compiled already, and two pipes would share its parameters; use that "
            "pipe, close() it first, or compile copy.deepcopy(model)"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for other, pipe in _compiled.items():
        owner = pipe()
        if owner is None or owner.closed:
            continue
        for parameter in other.parameters():
            if id(parameter) in names:
                raise InputError(
                    f"parameter {names[id(parameter)]!r} is also one of a {type(other).__name__} "
                    "that is compiled already, and two pipes would share it; close() that pipe "
                    "first, or compile copy.deepcopy(model)"
                )

"""``fxpipe.compile``: the one call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from fxpipe.arguments import (
    Devices,
    ScheduleLike,
    check_clipping,
    check_flag,
    check_model,
    check_optimizer,
    check_overlap,
    check_tracer,
    read_batch_dims,
    read_devices,
    read_dispatch,
    read_example,
    read_leaf_modules,
    read_objective,
    read_recompute,
    read_schedule,
)
from fxpipe.compiler.capturing import check_cuda_graphs
from fxpipe.compiler.compiler import Compiler
from fxpipe.compiler.objective import Loss, Reduction, Weight
from fxpipe.compiler.options import Options, Tracer
from fxpipe.engine import Engine
from fxpipe.errors import InputError
from fxpipe.passes.partition.options import Partition, read_partition
from fxpipe.passes.schedule.add_recompute import RecomputeLike
from fxpipe.pipeline import Pipeline
from fxpipe.runtime.batch import BatchDims
from fxpipe.runtime.choice import Choice, Dispatch
from fxpipe.runtime.devices.cuda import home
from fxpipe.runtime.weights.optimizer import OptimizerFactory

_compiled: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Pipeline]] = weakref.WeakKeyDictionary()

_compiling = threading.RLock()
"""Held while that is looked at."""


def compile(
    model: nn.Module,
    devices: Devices,
    *,
    schedule: ScheduleLike = "1f1b",
    microbatches: int | None = None,
    delay: int | None = None,
    predict: bool = False,
    recompute: RecomputeLike = "never",
    clip_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    loss: Loss | None = None,
    reduction: Reduction = "mean",
    loss_weight: Weight | None = None,
    optimizer: OptimizerFactory | None = None,
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
    verbose: bool = False,
) -> Pipeline:
    """Cut a model into stages over devices and make a pipeline that trains it.

    What the model's code reads besides tensors (attributes, globals, hooks, its functions) may
    change between steps: the model is then traced anew. docs/tracing.md lists what is noticed.

    Args:
        model: any module; its parameters are used as they are, never copied.
        devices: names or torch.devices; one may stand several times, and computes for each on a
            stream of its own. Or torch.cuda.Streams to compute on, also several of one GPU, such
            as those of green contexts. Or a number of CUDA devices, or of CPU devices where there
            is no CUDA. Each holds one stage, or as many as the schedule places there.
        schedule: a name ("1f1b", "gpipe"), a Schedule, its text, a path to its text, or a
            function that writes one.
        microbatches: into how many parts a batch is split; by default four a device. A batch of
            fewer samples, as the last of an epoch may be, is split into single ones.
        delay: by how many versions the weights that a batch reads may be behind the newest, for
            schedules whose batches overlap; by default the schedule's own.
        predict: let a batch read, instead of weights of ``delay`` versions ago, what the
            optimizer's momentum says they will be when its update comes: SpecTrain for SGD with
            momentum, XPipe for Adam and AdamW. Without a delay there is nothing to predict.
        clip_norm: the greatest norm that the gradients of a batch may have, over all stages, as
            ``torch.nn.utils.clip_grad_norm_`` has it; before each update the stages exchange the
            norms of theirs.
        scaler: a gradient scaler for half precision: losses are scaled for their backwards alone,
            gradients unscaled before they are clipped, and a batch whose gradients are not finite
            updates no stage. What ``step`` returns and ``grad_norm`` are as without it.
        recompute: "never", "always", or "except_last" (all micro-batches but the last): let a stage
            keep only its inputs, and run its forward again before its backward. Or a mode for
            each stage: a list of them, or a mapping from a stage's number to its mode; stages
            that are left out never recompute.
        loss: ``loss(output, *targets)`` → a scalar, or one loss per sample. None where the model
            returns the loss, alone or as ``.loss``. What it reads of the model by itself gets no
            gradient, and where batches overlap it is of the newest version.
        reduction: whether the loss is a "mean", so that a micro-batch's counts by its share of the
            samples, or a "sum" over them. Where a mean ``cross_entropy`` or ``nll_loss`` ignores
            targets or weights classes (and so in the loss that transformers make of ``labels=``),
            a micro-batch's counts by its share of the targets that count: the loss and the
            gradients are those of the whole batch.
        loss_weight: for any other mean over something else than samples, such as
            ``(losses * mask).sum() / mask.sum()``: ``loss_weight(*targets)`` → how much of it a
            micro-batch has, as ``lambda target, mask: mask.sum()``. Where the model returns the
            loss, it is given the model's inputs. It goes before all that the loss itself tells;
            without it a loss that is not that of the whole batch is warned of, once.
        optimizer: a function from parameters to a torch optimizer, called once a stage; with it
            ``step`` updates the weights. Without it ``step`` adds to ``.grad``.
        example: a tuple of inputs of a batch, or ``(args, kwargs)`` with what ``step`` takes,
            ``target`` among them; the model is compiled for it at once. Without it the first call
            compiles.
        batch_dims: input → its dimension that is the batch, where that is not 0, or None where
            every micro-batch gets the whole tensor: ``{"x": 1, "table": None, "target": 1}``. A
            part of a nested input is called ``"x['left']"``, one of several targets
            ``"target[0]"``. Every name must be there in a call, unless the model declares it and
            it is left out. A sparse tensor cannot be split: give None for it.
        deferred_batchnorm: whether BatchNorm's running statistics are updated once a step, by the
            mean and the variance of the whole batch, as without micro-batches; gathered from those
            of the micro-batches, they may differ from these in the last bits. Otherwise each
            micro-batch updates them, in order. Either way each is normalised by itself.
        partition: "auto", names of submodules, at each of which a stage begins, or a
            ``fxpipe.Partition`` with memory limits, device speeds, links, or submodules to keep
            together.
        tracer: "export" (torch.export), or "symbolic" (torch.fx, submodules of torch.nn are
            called as they are).
        leaf_modules: submodules, by name, by class or themselves, that are called as they are in
            every step, with their hooks, their control flow and their autograd functions, by
            either tracer. Autograd then drives backward in every stage. Where a line cannot be
            traced, such as a branch on the values of a tensor or ``torch.cond``, the smallest
            submodule around it that can be called so becomes one by itself, and so does a loss;
            the logger "fxpipe" then has a warning with the line, the submodule and what that costs.
            Stages with ``torch.cond``, ``while_loop`` and their like take turns on their devices,
            for PyTorch can trace these in one thread alone. What a leaf module returns must have a
            size that depends on no values, or the model computes with a size that it had in the
            first micro-batch; of those that nobody named this is checked.
        fuse_accumulation: let matrix products add parameters' gradients to the sums over
            micro-batches in their own kernels. It saves time in linear layers; gradients then
            equal the plain loop's to rounding, not to the bit.
        recompute_check: compare what each recomputation makes with what its forward made, to the
            bit, and fail where a stage computes something else the second time, with the first
            such node. It takes time, and on a CUDA device each recomputation is waited for.
        dispatch: who runs the devices' lists, or launches them on CUDA devices: a thread for each
            "device", or one "thread" for all, in an order in which it never has to wait. Results
            are the same to the bit. "auto" is "device" on CUDA devices, and on CPU devices what
            costs less. Python runs one thread at a time, so that several hand its lock over at
            every operation; where operations are shorter than that, one thread is faster, and
            ``profile`` shows the devices one after another. It is chosen for whatever is compiled,
            by what operations took on the first micro-batch and a hand-over takes on this machine,
            and told to the logger; where operations of a larger one turn out to be long, each
            device gets a thread after all. Operations have the same intra-op threads either way.
            Own tasks, optimizers or leaf modules that wait for those of other devices need
            "device".
        cuda_graphs: on CUDA devices, capture what a stage computes into CUDA graphs, in the first
            steps that come to it, and replay them from then on: one launch instead of one for
            each operation. Results are the same to the bit. For each size of micro-batches a stage
            has fixed memory for as many as the schedule has in flight there, each with what its
            operations need for a moment, and for the gradients of its parameters once more;
            ``simulate`` counts none of it. Parameters are read where
            they are: those that are elsewhere later (an assigned state dict) are captured anew.
            Stages that draw random numbers, have leaf modules, or compute sizes from data run as
            without it; the logger "fxpipe" has an info record of each, which ``verbose`` prints.
            Where batches overlap, call ``pipe.flush()`` before ``torch.cuda.synchronize()`` as
            long as something is captured: nobody may wait for a device meanwhile.
        verbose: print every pass and its time on standard error, with a line that says what goes
            on. The logger "fxpipe" has the same as debug records, and as info one for the whole and
            one for who runs the devices' lists.

    Returns:
        The pipe: a module with the parameters, buffers and submodules of the model.

    Raises:
        InputError: an argument is wrong; it says which and what to do.
        TraceError, PartitionError: with ``example``, see ``Pipeline.step``.
    """
    if isinstance(model, Pipeline):
        raise InputError("the model is a pipe already; compile the module that it was made of")
    places = tuple(read_devices(devices))
    homes = tuple(home(place) for place in places)
    check_model(model, homes[0])
    with _compiling:
        _check_free(model)
    check_tracer(tracer)
    check_optimizer(optimizer)
    check_flag("deferred_batchnorm", deferred_batchnorm)
    check_flag("verbose", verbose)
    check_flag("fuse_accumulation", fuse_accumulation)
    check_flag("recompute_check", recompute_check)
    check_flag("cuda_graphs", cuda_graphs)
    if cuda_graphs:
        check_cuda_graphs(
            homes[0], recompute_check=recompute_check, fuse_accumulation=fuse_accumulation
        )
    who = read_dispatch(dispatch, homes[0])
    cuts = read_partition(partition)
    cuts.check(model, len(places))
    recipe, microbatches = read_schedule(schedule, len(places), microbatches, delay)
    check_flag("predict", predict)
    recipe = recipe.predicting() if predict else recipe
    check_overlap(recipe, optimizer)
    check_clipping(clip_norm, scaler, optimizer)
    options = Options(
        model=model,
        devices=places,
        homes=homes,
        recipe=recipe,
        microbatches=microbatches,
        objective=read_objective(loss, reduction, loss_weight),
        optimizer=optimizer,
        clip_norm=clip_norm,
        scaler=scaler,
        recompute=read_recompute(recompute, recipe.stages(len(places))),
        batch_dims=read_batch_dims(batch_dims, model),
        deferred_batchnorm=deferred_batchnorm,
        partition=cuts,
        tracer=tracer,
        leaf_modules=read_leaf_modules(leaf_modules, model),
        fuse_accumulation=fuse_accumulation,
        recompute_check=recompute_check,
        dispatch=who,
        cuda_graphs=cuda_graphs,
        threads=max(1, torch.get_num_threads() // len(places)),
        places=homes if homes[0].type == "cuda" else (),
        verbose=verbose,
    )
    given = None if example is None else read_example(example)
    choice = Choice(len(places), options.dispatch)
    pipe = Pipeline(options, Compiler(options, choice), Engine(options, choice))
    with _compiling:
        _check_free(model)  # as another thread may have compiled it meanwhile
        _compiled[model] = weakref.ref(pipe)
    if given is not None:
        args, kwargs = given
        try:
            pipe.prepare(*args, **kwargs)
        except BaseException:
            pipe.close()
            raise
    return pipe


def _check_free(model: nn.Module) -> None:
    """Raises InputError where the model, or a part of it, or one around it, is compiled."""
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

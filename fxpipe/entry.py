"""``fxpipe.compile``: from a model to a pipeline."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from fxpipe import arguments
from fxpipe.arguments import ScheduleLike
from fxpipe.compiler import passes
from fxpipe.compiler.compiler import Compiler
from fxpipe.compiler.objective import Loss, Reduction
from fxpipe.compiler.options import Options
from fxpipe.devices import Devices, read_group
from fxpipe.engine import Engine
from fxpipe.errors import InputError
from fxpipe.extend import Extension
from fxpipe.parts import Parts
from fxpipe.passes.partition.measure import GivenCosts
from fxpipe.passes.partition.options import Each, Partition, read_partition
from fxpipe.passes.schedule import RecomputeLike
from fxpipe.pipeline import Pipeline
from fxpipe.runtime.batch import BatchDims
from fxpipe.runtime.choice import ThreadChoice
from fxpipe.runtime.weights.optimizer import GivenOptimizer, OptimizerLike
from fxpipe.torchtools.accelerator import home
from fxpipe.torchtools.meta import bytes_if_hollow, with_zeros

_compiled: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Pipeline]] = weakref.WeakKeyDictionary()

_compiling = threading.RLock()
"""Guards ``_compiled``."""


@arguments.with_near_names
def compile(
    model: nn.Module,
    devices: Devices,
    *,
    schedule: ScheduleLike = "1f1b",
    microbatches: int | None = None,
    memory_limits: Each | None = None,
    recompute: RecomputeLike = "never",
    loss: Loss | None = None,
    reduction: Reduction = "mean",
    optimizer: OptimizerLike | None = None,
    clip_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    example: Any = None,
    batch_dims: BatchDims | None = None,
    partition: str | Sequence[str] | Partition = "auto",
    costs: GivenCosts | None = None,
    extensions: Sequence[Extension | str] = (),
) -> Pipeline:
    """Cut a model into stages, one or more for each device, and return a pipeline that trains it.

    Most need no more than ``devices``, ``loss`` and ``optimizer``. The arguments come in groups:

    - how a step runs: ``schedule``, ``microbatches``, ``memory_limits``, ``recompute``
    - what it trains: ``loss``, ``reduction``, ``optimizer``, ``clip_norm``, ``scaler``
    - what it is compiled for, and how it is cut: ``example``, ``batch_dims``, ``partition``,
      ``costs``
    - whatever few need: ``extensions``

    The Python state that the model's code reads (attributes, globals, hooks, functions) may change
    between steps: the model is then traced again. docs/tracing.md lists the changes that are
    noticed.

    The logger "fxpipe" has every pass with its time as a debug record, and the whole compilation as
    an info record. From the fourth second on, a line on the terminal says what is compiled, and is
    gone when it is done.

    Args:
        model: any module. Its parameters are used in place, never copied. A model on the meta
            device gets its values later, by ``load``, ``load_state_dict`` or ``reset_parameters``;
            over ranks, each rank allocates the tensors of its own stages only. If the model has
            data, a rank with a CPU device gives back the memory of the other ranks' parameters when
            it first runs; they are then on the meta device. See docs/ranks.md. If a line cannot be
            traced, such as a branch on the values of a tensor, the smallest submodule around it
            that works as a leaf module becomes one: it is called as it is, in one stage, and
            autograd runs its backward. So does a loss. The logger "fxpipe" then warns of the line,
            the submodule and what it costs. The sizes of what it returns must not depend on values;
            this is checked. See ``fxpipe.LeafModules`` to ask for leaf modules.
        devices: where the stages run, one on each device or as many as the schedule places there:

            - a list of names or torch.devices. A device may be listed several times; each entry
              computes on a stream of its own.
            - a list of streams (torch.Stream, torch.cuda.Stream) to compute on. Several may belong
              to one GPU, such as those of green contexts.
            - a number: of CUDA devices or other accelerators with streams, or of CPU devices on
              a machine without.
            - a DeviceMesh. Each process of the mesh runs one device, and all of them call
              ``compile``. The mesh dimension "pp" has the devices of a pipeline, "dp" the replicas
              of the pipeline, and any other the parts of stages, where the model has DTensors.
        schedule: a name ("1f1b", "gpipe"), a Schedule, its text, or a function that writes a
            schedule. ``fxpipe.schedules.two_bw.delayed(2)`` is the schedule "2bw"
            whose batches read weights that are two versions behind the newest. With "auto" the
            first step takes the schedule that is predicted to be fastest within ``memory_limits``:
            one of the library's schedules with a flush, with one or two stages on each device. It
            also chooses ``microbatches``, ``recompute`` and which stages offload
            (``fxpipe.Offload``) unless you give them. A batch that is larger than all before makes
            it choose again, except over replicas. "auto-2bw" chooses all of this for "2bw", which
            has no flush. See docs/searching.md.
        microbatches: the number of parts that a batch is split into; by default four for each
            device. A batch with fewer samples than that, as the last of an epoch may be, is split
            into single samples.
        memory_limits: the bytes that devices may hold: one number for all, or a list with one for
            each device and None where there is no limit; see ``fxpipe.Partition``.
        recompute: "never", "always", or "except_last" (all micro-batches but the last). A stage
            that recomputes keeps only its inputs, and runs its forward again before its backward.
            Or a mode for each stage: a list of modes, or a mapping from stage numbers to modes;
            stages that the mapping leaves out never recompute.
        loss: ``loss(output, *targets)`` → a scalar, or one loss per sample; or a pair of it and a
            dict of numbers, which ``metrics`` has, or a dict with the loss as ``"loss"``. None if
            the model itself returns the loss, alone or as ``.loss``. A parameter of the model that
            the loss function reads directly gets no gradient from there, and if batches overlap,
            the loss reads its newest version.
        reduction: "mean" if the loss is a mean over samples, so that each micro-batch counts by its
            share of the samples, or "sum" if it is a sum over them. If a mean ``cross_entropy`` or
            ``nll_loss`` ignores targets or weights classes (also inside the loss that transformers
            compute from ``labels=``), each micro-batch counts by its share of the targets that
            count. So the loss and the gradients are those of the whole batch. For
            any other mean over something else than samples, give ``fxpipe.LossWeight``. The first
            step is compared with the loss of the joined outputs; if they differ, there is one
            warning, which says why.
        optimizer: a torch optimizer over the model's parameters, or a list of optimizers that
            have different ones; or a function from parameters to these, called once for all; or a
            function whose argument is called ``named_parameters``, called once, with pairs of name
            and parameter of the whole model.
            With an optimizer, ``step`` updates the weights, and ``pipe.optimizer`` is one optimizer
            over all stages. Without one, ``step`` adds to ``.grad``.
        clip_norm: the largest norm that the gradients of a batch may have, over all stages, as in
            ``torch.nn.utils.clip_grad_norm_``. Before each update the stages exchange the norms of
            their gradients.
        scaler: a gradient scaler for half precision. Losses are scaled for the backward only,
            gradients are unscaled before they are clipped, and a batch whose gradients are not
            finite updates no stage. The loss that ``step`` returns and ``grad_norm`` are unscaled.
        example: a tuple of inputs of a batch, or ``(args, kwargs)`` as ``step`` takes them,
            including ``target``. The model is then compiled for it at once. Without an example, the
            first call compiles.
        batch_dims: input → its batch dimension, for inputs whose batch dimension is not 0, or None
            if every micro-batch gets the whole tensor: ``{"x": 1, "table": None, "target": 1}``. A
            part of a nested input is called ``"x['left']"``, and one of several targets
            ``"target[0]"``. A call must have every input that is named here, except for optional
            inputs of the model.
        partition: "auto"; the names of submodules at each of which a stage begins; or a
            ``fxpipe.Partition`` with memory limits, device speeds or links.
        costs: a ``fxpipe.Device``, by whose FLOPs and bytes a second operations are timed. Nothing
            of the model is then run, timed or compared with its plan, so that the model and the
            example may be on the meta device, and larger than this machine. See docs/paper.md.
        extensions: parts of fxpipe, or of your own, that few pipes need; see docs/extensions.md.
            Such as ``[fxpipe.CudaGraphs()]``, or its name, ``["cuda_graphs"]``.

    Returns:
        The pipe: a module with the parameters, buffers and submodules of the model.

    Raises:
        InputError: an argument is wrong; the error says which one and what to do.
        TraceError, PartitionError: with ``example``, as in ``Pipeline.step``.
    """
    if isinstance(model, Pipeline):
        raise InputError("the model is a pipe already; compile the module that it was made of")
    group, places = read_group(devices)
    with ExitStack() as failed, group.calling("compile"):
        torch_devices = tuple(home(place) for place in places)
        divided = group.divided(model) if isinstance(model, nn.Module) else ()
        arguments.check_model(model, torch_devices[0])
        with _compiling:
            _check_free(model)
        given = (*divided, *arguments.with_automatic(arguments.read_extensions(extensions)))
        given_optimizer = None if optimizer is None else GivenOptimizer(optimizer, model)
        cuts = read_partition(partition, memory_limits)
        cuts.check(len(places))
        make: Callable[[Options, ThreadChoice], Compiler] = Compiler
        late = arguments.read_late(schedule)
        if late is not None:
            schedule, make = late()
        recipe, microbatches = arguments.given_schedule(schedule, len(places), microbatches)
        if recipe.copies(len(places)):
            Parts.check_copies.find(f"schedule {recipe.name!r}")(recipe, torch_devices[0])
        if clip_norm is not None or scaler is not None:
            clipping = Parts.check_clipping.find("compile(..., clip_norm=, scaler=)")
            clipping(clip_norm, scaler, optimizer)
        arguments.check_slices(recipe, given)
        options = Options(
            model=model,
            devices=tuple(places),
            torch_devices=torch_devices,
            recipe=recipe,
            microbatches=microbatches,
            objective=arguments.read_objective(loss, reduction),
            optimizer=given_optimizer,
            clip_norm=clip_norm,
            scaler=scaler,
            recompute=arguments.read_modes("recompute", recompute, recipe.stages(len(places))),
            batch_dims=arguments.read_batch_dims(batch_dims, model),
            partition=cuts,
            dispatch=None if torch_devices[0].type == "cpu" and costs is None else "device",
            threads=group.threads or max(1, torch.get_num_threads() // len(places)),
            places=() if torch_devices[0].type == "cpu" else torch_devices,
            extensions=given,
            group=group,
            replicas=group.replicas,
            decides="" if late is None else recipe.name,
            hollow=bytes_if_hollow(model),
            costs=arguments.given_costs(costs, model),
        )
        for extension in given:
            options = extension.options(options)
        arguments.check_overlap(options.recipe, optimizer)
        for extension in given:
            extension.check(options)
        if group.rank == 0 and not passes.of(options, "compile"):
            arguments.tell_compiled(model)
        inputs = None if example is None else arguments.read_example(example)
        choice = ThreadChoice(1 if group.size > 1 else len(places), options.dispatch)
        compiler = make(options, choice)
        pipe = Pipeline(options, compiler, Engine(options, choice))
        failed.callback(pipe.close)
        group.same_options(options)
        with _compiling:
            _check_free(model)  # another thread may have compiled it meanwhile
            _compiled[model] = weakref.ref(pipe)
        if inputs is not None:
            args, kwargs = inputs if costs is None else with_zeros(inputs)
            pipe.prepare(*args, **kwargs)
        failed.pop_all()
        return pipe


def _check_free(model: nn.Module) -> None:
    """Raise InputError if the model, a submodule, or a module around it is compiled already."""
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    for other, pipe in _compiled.items():
        owner = pipe()
        if owner is None or owner.closed:
            continue
        shared = next((own[id(p)] for p in other.parameters() if id(p) in own), None)
        if other is model or shared is not None:
            raise InputError(
                f"the model is compiled already, or its parameter {shared!r} is, in a "
                f"{type(other).__name__}, and two pipes would share it; use that pipe, whose calls "
                "may alternate between inputs and between losses (pipe(x), then backward of any "
                "loss), close() it first, or compile copy.deepcopy(model), which has weights of "
                "its own"
            )

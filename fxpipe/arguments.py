"""Check the arguments of ``compile`` one by one; each error says what to give instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, cast, get_args

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from fxpipe.compiler.leaf_modules.extension import LeafModules
from fxpipe.compiler.objective import Objective, Reduction
from fxpipe.errors import InputError, near
from fxpipe.extend import Extension, LateSchedule, find, names
from fxpipe.ir.recipe import Recipe, find_recipe, fixed
from fxpipe.ir.schedule import Schedule
from fxpipe.log import LOGGER
from fxpipe.passes.partition.measure import GivenCosts
from fxpipe.passes.schedule import Recompute, RecomputeLike
from fxpipe.runtime.batch import BatchDims

ScheduleLike = str | Schedule | Recipe | Callable[..., Any]
_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

ELSEWHERE = {
    **dict.fromkeys(("chunks", "n_microbatches", "num_microbatches"), "microbatches"),
    **dict.fromkeys(("balance", "split_spec"), "partition"),
    **dict.fromkeys(("checkpoint", "activation_checkpointing"), "recompute"),
    **dict.fromkeys(("loss_fn", "criterion"), "loss"),
    **dict.fromkeys(("max_norm", "gradient_clip_val"), "clip_norm"),
    "args": "example",
}
"""What other libraries call an argument → what it is called here."""


def with_near_names(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """A function that raises InputError for a keyword that it does not have, with the one meant."""
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        for name in kwargs:
            if name not in known:
                own = f'write extensions=["{name}"]' if name in names("extension") else ""
                hint = own or near(ELSEWHERE.get(name, name), known)
                raise InputError(f"{function.__name__} has no argument {name!r}; {hint}")
        return function(*args, **kwargs)

    return checked


def read_late(schedule: ScheduleLike) -> LateSchedule | None:
    """Return what chooses the schedule at the first step, or None if it is given. Raises InputError
    if its extension is not there."""
    if not isinstance(schedule, str) or schedule not in names("schedule"):
        return None
    late: LateSchedule = find("schedule", schedule, f"schedule={schedule!r}")
    return late


def given_schedule(
    schedule: ScheduleLike, devices: int, microbatches: int | None
) -> tuple[Recipe, int | None]:
    """Return the recipe of a schedule, and the number of micro-batches if it is known.

    Raises:
        InputError: it is no schedule, or it is for another number of devices or micro-batches.
    """
    recipe = _recipe(schedule, devices)
    if recipe.microbatches is not None:
        if microbatches not in (None, recipe.microbatches):
            raise InputError(
                f"microbatches is {microbatches} and the schedule is for "
                f"{recipe.microbatches}; leave microbatches out"
            )
        microbatches = recipe.microbatches
    if microbatches is not None:
        check_whole("microbatches", microbatches, 1)
    return recipe, microbatches


def _recipe(schedule: ScheduleLike, devices: int) -> Recipe:
    if isinstance(schedule, str) and "\n" in schedule:
        schedule = Schedule.parse(schedule)
    if isinstance(schedule, str):
        return find_recipe(schedule)
    if isinstance(schedule, Recipe):
        return schedule
    if isinstance(schedule, Schedule):
        if schedule.devices != devices:
            raise InputError(
                f"schedule {schedule.name!r} is for {schedule.devices} devices and there are "
                f"{devices}; make it for {devices}"
            )
        return fixed(schedule)
    if callable(schedule):
        return Recipe(getattr(schedule, "__name__", "custom"), schedule)
    raise InputError(
        f'schedule is {schedule!r}; give a name such as "1f1b", a Schedule, its text, or a '
        "function (device, devices, microbatches) that yields tasks"
    )


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise InputError unless the value is a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} is {value!r}; give a whole number of at least {least}")


def check_known(what: str, value: Any, known: Sequence[str], *more: str) -> None:
    """Raise InputError unless the value of an argument is a known one."""
    if value not in known:
        raise InputError(f"there is no {what} {value!r}: {near(str(value), (*more, *known))}")


def check_overlap(recipe: Recipe, optimizer: Any) -> None:
    """Raise InputError if batches overlap without an optimizer."""
    rules = recipe.delay if isinstance(recipe.delay, tuple) else (recipe.delay,)
    late = any(any(rule) if isinstance(rule, tuple) else rule for rule in rules)
    if late and optimizer is None:
        raise InputError(
            f"schedule {recipe.name!r} updates the weights while batches are in flight, and there "
            "is no optimizer; give optimizer=, such as lambda parameters: "
            "torch.optim.AdamW(parameters)"
        )


def read_objective(loss: Any, reduction: Any) -> Objective:
    """Return the objective of a step. Raises InputError if the loss is no function or has
    parameters, or the reduction is unknown."""
    if loss is not None and not callable(loss):
        raise InputError(f"loss is {loss!r}; give a function loss(output, *targets)")
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise InputError(f"loss is the class {loss.__name__}; give an object, {loss.__name__}()")
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise InputError(
            "the loss has parameters of its own, which no stage would train; move them into the "
            "model, return the loss from it, and leave out loss="
        )
    check_known("reduction", reduction, get_args(Reduction))
    return Objective(loss, reduction)


def read_batch_dims(batch_dims: Any, model: nn.Module) -> BatchDims:
    """Return a mapping: input → its batch dimension, or None. Raises InputError if it is no such
    mapping, or names something that is no input of the model."""
    if batch_dims is None:
        return {}
    cure = "give a dict from names of inputs to a dimension or None, such as {'x': 1}"
    if not isinstance(batch_dims, Mapping):
        raise InputError(f"batch_dims is {batch_dims!r}; {cure}")
    parameters = inspect.signature(model.forward).parameters.values()
    known = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name, dim in batch_dims.items():
        if not isinstance(name, str) or isinstance(dim, bool) or not isinstance(dim, int | None):
            raise InputError(f"batch_dims has {name!r}: {dim!r}; {cure}")
        head = name.partition("[")[0].partition(".")[0]
        if not (any_name or head in known or head == "target" or head.startswith("argument")):
            raise InputError(
                f"batch_dims names {name!r}, which is no input of {type(model).__name__}.forward: "
                f"{near(head, [*known, 'target'])}"
            )
    return dict(batch_dims)


def given_costs(costs: Any, model: nn.Module) -> GivenCosts | None:
    """Return given costs. Raises InputError if they are of no described device, or parameters of
    the model are fake."""
    if costs is None:
        return None
    fake = (name for name, x in model.named_parameters() if isinstance(x, FakeTensor))
    if name := next(fake, ""):
        raise InputError(
            f"parameter {name!r} is a fake tensor, and traces make fakes of their own; build the "
            'model on the meta device: with torch.device("meta"): ...'
        )
    if callable(getattr(costs, "node_costs", None)):
        return cast(GivenCosts, costs)
    raise InputError(
        f"costs is {costs!r}; give a described device, such as fxpipe.Device(flops=312e12, "
        "bandwidth=2e12, efficiency=0.6)"
    )


def read_example(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword inputs of an example. Raises InputError if it is no tuple."""
    if not isinstance(example, tuple):
        raise InputError(
            "example is no tuple; give a tuple of inputs such as (x,), or (args, kwargs)"
        )
    match example:
        case (tuple() as args, dict() as kwargs):
            return args, kwargs
    return example, {}


def read_extensions(extensions: Any) -> tuple[Extension, ...]:
    """Return the extensions, each once. Raises InputError if one is none, or given twice."""
    if isinstance(extensions, str | Extension) or not isinstance(extensions, Sequence):
        raise InputError(f"extensions is {extensions!r}; give a list, such as [{extensions!r}]")
    read = [
        find("extension", each, f"the extension {each!r}")() if isinstance(each, str) else each
        for each in extensions
    ]
    for place, each in enumerate(read):
        if not isinstance(each, Extension):
            raise InputError(
                f"extensions has {each!r}; give an object of fxpipe.extend.Extension, or one of "
                f"the names {', '.join(map(repr, names('extension')))}"
            )
        if type(each) in map(type, read[:place]):
            raise InputError(f"extensions has {type(each).__name__} twice; give it once")
    return tuple(read)


def check_slices(recipe: Recipe, extensions: Sequence[Extension]) -> None:
    """Raise InputError if a schedule has slices, and nothing cuts sequences."""
    if recipe.slices > 1 and not any(each.slices for each in extensions):
        raise InputError(
            f"schedule {recipe.name!r} has slices of a sequence; say which dimension it is: "
            "compile(..., extensions=[fxpipe.Slices(dim=1)])"
        )


def with_automatic(extensions: Sequence[Extension]) -> tuple[Extension, ...]:
    """The extensions, with ``LeafModules``, which comes last: so its passes come right after those
    that they stand in for."""
    others = [each for each in extensions if not isinstance(each, LeafModules)]
    given = [each for each in extensions if isinstance(each, LeafModules)]
    return (*others, *(given or [LeafModules()]))


def read_modes(option: str, given: Any, stages: int) -> RecomputeLike:
    """Return the modes of stages that an option is given, such as ``recompute``. Raises InputError
    if a mode or a stage is unknown, or there are not as many modes as stages."""
    known, modes = get_args(Recompute), [given]
    if isinstance(given, Mapping):
        wrong = [stage for stage in given if stage not in range(stages)]
        if wrong:
            raise InputError(f"{option} names stage {wrong[0]!r}; the stages are 0 to {stages - 1}")
        modes = list(given.values())
    elif isinstance(given, Sequence) and not isinstance(given, str):
        modes = list(given)
        if len(modes) != stages:
            raise InputError(
                f"{option} has {len(modes)} modes for {stages} stages; give one for each, or one "
                "for all"
            )
    for mode in modes:
        if mode not in known:
            raise InputError(f"there is no mode {mode!r} of {option}: {near(str(mode), known)}")
    return cast(RecomputeLike, given)


def check_model(model: Any, place: torch.device) -> None:
    """Raise InputError if the model is no module, has tensors that are neither on the CPU nor on
    the pipe's type of device, was made in inference mode, or has a SyncBatchNorm or a torch.jit
    module."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is {model!r}; give an nn.Module")
    for name, parameter in model.named_parameters():
        if parameter.device.type not in ("cpu", "meta", place.type):
            raise InputError(
                f"parameter {name!r} is on {parameter.device}; move the model to the CPU first "
                "(model.cpu())"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not is_lazy(tensor) and tensor.is_inference():
            raise InputError(
                f"{name!r} was made under torch.inference_mode(), so that nothing may write it or "
                "train with it; outside of that mode, give copy.deepcopy(model)"
            )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{name or 'the model'} is a module of torch.jit, whose Python code is gone; "
                "compile the module that it was made of"
            )
        if isinstance(module, nn.SyncBatchNorm):
            raise InputError(
                f"{name or 'the model'} is a SyncBatchNorm, which normalises over processes that "
                "each hold the whole model, and here a layer sees one micro-batch at a time; use "
                'nn.BatchNorm with compile(..., extensions=["deferred_batchnorm"]), whose '
                "statistics are those of the whole batch, or a norm that needs no batch, such as "
                "nn.GroupNorm"
            )


def tell_compiled(model: nn.Module) -> None:
    """Warn if calls of the model or of a submodule go through ``torch.compile``, of which graphs
    have nothing."""
    for name, module in model.named_modules():
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            LOGGER.warning(
                "torch.compile of %s is left out of the graphs of stages; how these are compiled "
                "stands in docs/memory.md",
                repr(name) if name else "the model",
            )
            return

"""``fxpipe.compile``: the one call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import fxpipe.schedules as _library
from fxpipe.compiler import Compiler, Loss, Tracer
from fxpipe.errors import InputError, near
from fxpipe.optimizer import OptimizerFactory
from fxpipe.pipeline import Pipeline
from fxpipe.schedule import Recipe, Schedule, find_recipe

_compiled: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Pipeline]] = weakref.WeakKeyDictionary()

Devices = int | Sequence[str | torch.device]
ScheduleLike = str | Schedule | Recipe | Callable[[int, int, int], Any]


def compile(
    model: nn.Module,
    devices: Devices,
    *,
    schedule: ScheduleLike = "1f1b",
    microbatches: int | None = None,
    loss: Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    example: Any = None,
    partition: str | Sequence[str] = "auto",
    tracer: Tracer = "export",
) -> Pipeline:
    """Cut a model into stages over devices and make a pipeline that trains it.

    Args:
        model: any module; its parameters are used as they are, never copied.
        devices: names or torch.devices, one stage each; one may stand several times. Or a number
            of CUDA devices, or of CPU devices where there is no CUDA.
        schedule: a name ("1f1b", "gpipe"), a Schedule, or a function that writes one.
        microbatches: into how many parts a batch is split; by default four a device, at most
            the batch size.
        loss: ``loss(output, *targets)`` → scalar. None where the model returns the loss, alone or
            as ``.loss``.
        optimizer: a function from parameters to a torch optimizer, called once a stage; with it
            ``step`` updates the weights. Without it ``step`` adds to ``.grad``.
        example: a tuple of inputs of a batch, or ``(args, kwargs)`` with what ``step`` takes,
            ``target`` among them; the model is compiled for it at once. Without it the first call
            compiles.
        partition: "auto", or names of submodules: a new stage begins at each.
        tracer: "export" (torch.export), or "symbolic" (torch.fx, submodules of torch.nn are
            called as they are).

    Raises:
        InputError: an argument is wrong; it says which and what to do.
        TraceError, PartitionError: with ``example``, see ``Pipeline.step``.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is {model!r}; give an nn.Module")
    if isinstance(model, Pipeline):
        raise InputError("the model is a pipe already; compile the module that it was made of")
    owner = _compiled[model]() if model in _compiled else None
    if owner is not None and not owner.closed:
        raise InputError(
            "the model is compiled already, and two pipes would share its parameters; use that "
            "pipe, close() it first, or compile copy.deepcopy(model)"
        )
    places = _devices(devices)
    recipe = _recipe(schedule, len(places))
    if isinstance(schedule, Schedule):
        if microbatches not in (None, schedule.microbatches):
            raise InputError(
                f"microbatches is {microbatches} and the schedule is for "
                f"{schedule.microbatches}; leave microbatches out"
            )
        microbatches = schedule.microbatches
    _check_microbatches(microbatches)
    if tracer not in ("export", "symbolic"):
        raise InputError(
            f"there is no tracer {tracer!r}: {near(str(tracer), ('export', 'symbolic'))}"
        )
    if not isinstance(partition, str) and not (
        isinstance(partition, Sequence) and all(isinstance(name, str) for name in partition)
    ):
        raise InputError(
            f'partition is {partition!r}; give "auto" or a list of submodule names, at each of '
            "which a stage begins"
        )
    if isinstance(partition, str) and partition != "auto":
        raise InputError(
            f'partition is {partition!r}; give "auto" or a list of submodule names, such as '
            f"[{partition!r}]"
        )
    if loss is not None and not callable(loss):
        raise InputError(f"loss is {loss!r}; give a function loss(output, *targets)")
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise InputError(
            "the loss has parameters of its own, which no stage would train; move them into the "
            "model, return the loss from it, and leave out loss="
        )
    if optimizer is not None and not callable(optimizer):
        raise InputError(
            f"optimizer is {_shown(optimizer)}; give a function from parameters to a torch "
            "optimizer, such as lambda parameters: torch.optim.AdamW(parameters)"
        )
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            raise InputError(
                f"parameter {name!r} is on {parameter.device}; move the model to the CPU first "
                "(model.cpu())"
            )
    _check_shared(model)
    threads = max(1, torch.get_num_threads() // len(places))
    compiler = Compiler(
        model, len(places), loss=loss, partition=partition, tracer=tracer, threads=threads
    )
    pipe = Pipeline(model, compiler, places, recipe, microbatches, optimizer, threads)
    _compiled[model] = weakref.ref(pipe)
    if example is not None:
        args, kwargs = _example(example)
        try:
            pipe.prepare(*args, **kwargs)
        except BaseException:
            pipe.close()
            raise
    return pipe


def _check_shared(model: nn.Module) -> None:
    """A module of which a part, or of whose parent, a pipe is open already."""
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


def _shown(value: Any) -> str:
    """A value in a message: short ones as they are, others as what they are."""
    text = repr(value)
    return text if len(text) < 60 and "\n" not in text else f"one {type(value).__name__} object"


def _devices(devices: Devices) -> list[torch.device]:
    if isinstance(devices, bool) or not isinstance(devices, int | Sequence):
        raise InputError(f'devices is {devices!r}; give a list such as ["cpu", "cpu"], or how many')
    if isinstance(devices, int):
        if devices < 1:
            raise InputError(f"devices is {devices}; give at least 1")
        if not torch.cuda.is_available():
            return [torch.device("cpu")] * devices
        if devices > torch.cuda.device_count():
            raise InputError(
                f"devices is {devices} and there are {torch.cuda.device_count()} CUDA devices; "
                "name them one by one, where one may stand several times"
            )
        devices = [f"cuda:{index}" for index in range(devices)]
    if isinstance(devices, str):
        raise InputError(f"devices is the string {devices!r}; give a list, such as [{devices!r}]")
    if not devices:
        raise InputError('devices is empty; give at least one, such as ["cpu", "cpu"]')
    return [_device(device) for device in devices]


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
        if not isinstance(name, str | torch.device):
            raise TypeError
    except (RuntimeError, TypeError):
        raise InputError(f'there is no device {name!r}; name one such as "cpu"') from None
    if device.type != "cpu":
        raise InputError(
            f'stages cannot run on {device} yet; name CPU devices, such as ["cpu", "cpu"]'
        )
    return device


def _recipe(schedule: ScheduleLike, devices: int) -> Callable[[int, int], Schedule]:
    assert _library  # importing it has registered the library's schedules
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
        fixed: Schedule = schedule
        return _Fixed(fixed)
    if callable(schedule):
        return Recipe(getattr(schedule, "__name__", "custom"), schedule)
    raise InputError(
        f'schedule is {schedule!r}; give a name such as "1f1b", a Schedule, or a function '
        "(device, devices, microbatches) that yields tasks"
    )


class _Fixed:
    """A recipe that has one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def __call__(self, devices: int, microbatches: int) -> Schedule:
        return self.schedule


def _check_microbatches(microbatches: int | None) -> None:
    if microbatches is None:
        return
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise InputError(f"microbatches is {microbatches!r}; give a whole number of at least 1")


def _example(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if (
        isinstance(example, tuple)
        and len(example) == 2
        and isinstance(example[0], tuple)
        and isinstance(example[1], dict)
    ):
        return example[0], example[1]
    if isinstance(example, tuple):
        return example, {}
    raise InputError("example is no tuple; give a tuple of inputs such as (x,), or (args, kwargs)")

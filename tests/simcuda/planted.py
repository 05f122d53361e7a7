"""Pipes that notice faults in the order of what devices run, and how to plant a fault."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import inspect
import signal
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fxpipe
from fxpipe import FxpipeError
from tests.simcuda.faults import LANES, Fault
from tests.simcuda.test_steps import Tokens, called, tokens
from tests.simcuda.training import Setting, sgd, train

LAZY, RANDOM = 1, 2
PLACES = ["cuda:0", "cuda:1"]
PATIENCE = 100
"""Seconds after which devices seem to wait for ever."""

Values = Mapping[str, Tensor]
Look = Callable[[], Any] | None


class Scene(NamedTuple):
    """A pipe to train.

    Attributes:
        run: trains on devices; ``look`` (``cuda.take`` where they are simulated) is called before
            and after a warm step. Returns what was computed.
        may_wait: the reasons for which the host may wait for a device in a warm step.
        options: those of ``on_devices``.
        modes: the modes to run in.
    """

    run: Callable[[Sequence[Any], Look], Values]
    may_wait: frozenset[str] = frozenset()
    options: Mapping[str, Any] = {}
    modes: Sequence[int] = (LAZY,)


def _trained(setting: Setting, devices: Sequence[Any], look: Look) -> Values:
    return train(setting, devices, look)[0].values


def _captured(setting: Setting, devices: Sequence[Any], look: Look) -> Values:
    extensions = {"extensions": ["cuda_graphs"]} if look else {}
    options = {**setting.options, **extensions}
    return train(replace(setting, options=options), devices, look)[0].values


def _scene(model: str, schedule: str, **given: Any) -> Scene:
    inputs, stages = given.pop("inputs", "cpu"), given.pop("stages", 2)
    setting = Setting(model, {"schedule": schedule, **given}, inputs=inputs, stages=stages)
    return Scene(partial(_trained, setting), setting.may_wait)


def _computed(
    where: Sequence[int | None], schedule: str, devices: Sequence[Any], look: Look
) -> Values:
    """Inputs that the caller's streams are still computing, and overwrite after the step; those of
    each step on the device of this index, or for None on the CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    made = {}
    options: dict[str, Any] = {"microbatches": 4, "loss": cross_entropy, "optimizer": sgd}
    with fxpipe.compile(model, devices, schedule=schedule, partition=["2"], **options) as pipe:
        for step, index in enumerate(where):
            x, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)), torch.arange(8)
            if look and index is not None:
                x, y = x.to(f"cuda:{index}"), y.to(f"cuda:{index}")
            x, y = x * 2, y % 3
            if look:
                look()
            made[f"loss {step}"] = pipe.step(x, target=y)
            if look:
                look()
            x.fill_(1)
            y.fill_(1)
        pipe.flush()
        made |= pipe.state_dict()
        return {name: value.cpu() + 0 for name, value in made.items()}


def _held_up(devices: Sequence[Any], look: Look) -> Values:
    """The same where each device copies from another for the first time only once the caller has
    begun the next step, whose batch is elsewhere."""
    lanes = importlib.import_module(LANES).Lanes
    begin, leaving = lanes.begin, lanes._leaving_stream
    begun, changed = Counter[int](), threading.Condition()

    def counted(self: Any, before: Mapping[torch.device, torch.Event]) -> None:
        begin(self, before)
        with changed:
            begun[id(self)] += 1
            changed.notify_all()

    def held(self: Any, stream: str, source: torch.device) -> Any:
        with changed:
            if stream == "in" and (stream, source) not in self._leaving:
                now = begun[id(self)]
                changed.wait_for(lambda: begun[id(self)] > now, timeout=1)
        return leaving(self, stream, source)

    with (
        patch.object(lanes, "begin", counted),
        patch.object(lanes, "_leaving_stream", held),
    ):
        return _computed([None, 2, None, 2, None], "2bw", devices, look)


def _all_computed(schedule: str, devices: Sequence[Any], look: Look) -> Values:
    made: dict[str, Tensor] = {}
    for where in range(2):
        values = _computed([where] * 4, schedule, devices, look)
        made |= {f"{name} from {where}": value for name, value in values.items()}
    return made


def _called(devices: Sequence[Any], look: Look) -> Values:
    """Calls and backwards, with current streams that are not the default ones."""
    made = called(devices, "cuda:0" if look else "cpu", bool(look))
    return {str(number): value for number, value in enumerate(made)}


def _ignored(devices: Sequence[Any], look: Look) -> Values:
    torch.manual_seed(0)
    options: dict[str, Any] = {"microbatches": 4, "optimizer": sgd}
    with fxpipe.compile(Tokens("plain"), devices, **options) as pipe:
        losses = []
        for step in range(4):
            batch = [x.to("cuda:0") if look else x for x in tokens(step)]
            if look:
                look()
            losses.append(pipe.step(*batch))
            if look:
                look()
        return {str(number): loss.cpu() + 0 for number, loss in enumerate(losses)}


SCENES = {
    "1f1b": _scene("unet", "1f1b"),
    "2bw": _scene("dropout", "2bw"),
    "tied": _scene("tied", "1f1b"),
    "barriers": _scene("dropout", "1f1b", clip_norm=0.1),
    "put off": _scene("dropout", "gpipe"),
    "offload": _scene("tied", "interleaved-1f1b", extensions=["offload"], stages=4),
    "deferred": _scene("unet", "1f1b", extensions=["deferred_batchnorm"]),
    "deferred 2bw": _scene("unet", "2bw", extensions=["deferred_batchnorm"]),
    "pinned": _scene("dropout", "1f1b", inputs="pinned"),
    "computed inputs": Scene(partial(_all_computed, "1f1b")),
    "computed 2bw": Scene(partial(_all_computed, "2bw")),
    "inputs elsewhere": Scene(partial(_computed, [None, 2, 2, 2], "1f1b"), options={"devices": 3}),
    "inputs here and there": Scene(_held_up, options={"devices": 3}),
    "call": Scene(_called, modes=(LAZY, RANDOM)),
    "ignored targets": Scene(_ignored),
    "captured": Scene(partial(_captured, Setting("unet", {"schedule": "1f1b"}))),
    "captured 2bw": Scene(partial(_captured, Setting("unet", {"schedule": "2bw"}, steps=8))),
}


def on_cpu(scene: str) -> Values:
    """What a scene computes on CPU devices."""
    return SCENES[scene].run(["cpu"] * 2, None)


def plant(fault: Fault) -> None:
    """Give the functions of a module, in this process, the code that they have with the fault.

    Raises:
        LookupError: the text does not occur once.
    """
    module = importlib.import_module(fault.module)
    source = inspect.getsource(module)
    if source.count(fault.before) != 1:
        raise LookupError(f"cannot be planted, as {fault.module} has changed")
    text = source.replace(fault.before, fault.after)
    changed = dict(_codes(compile(text, str(module.__file__), "exec", dont_inherit=True)))
    for function in _functions(vars(module), module.__name__):
        function.__code__ = changed[function.__code__.co_qualname]


def _codes(code: types.CodeType) -> Iterator[tuple[str, types.CodeType]]:
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield inner.co_qualname, inner
            yield from _codes(inner)


def _functions(names: Mapping[str, Any], module: str) -> Iterator[types.FunctionType]:
    """The functions and methods of a module that its text defines."""
    for value in list(names.values()):
        if isinstance(value, type) and value.__module__ == module:
            yield from _functions(vars(value), module)
        for each in (value, *(getattr(value, part, None) for part in ("fget", "__func__"))):
            function = inspect.unwrap(each) if callable(each) else None
            if isinstance(function, types.FunctionType) and function.__module__ == module:
                if not function.__code__.co_filename.startswith("<"):  # of a dataclass
                    yield function


def problems(scene: str, values: Values, fault: Fault | None = None) -> list[str]:
    """Run a scene on simulated devices, and tell what is wrong."""
    from tests.simcuda import cuda

    faulthandler.cancel_dump_traceback_later()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(PATIENCE)
    if fault is not None:
        plant(fault)
    found: list[str] = []
    for mode in SCENES[scene].modes:
        cuda.configure(cuda.Mode(mode))
        cuda.take()
        found += _problems(SCENES[scene], values, cuda)
    return found


def _problems(scene: Scene, values: Values, cuda: Any) -> list[str]:
    races: list[str] = []
    waits: list[Mapping[str, int]] = []

    def look() -> Any:
        noticed = cuda.take()
        races.extend(noticed.races)
        waits.append(noticed.waits)
        assert not noticed.failure, noticed.failure
        return noticed

    try:
        made = scene.run(PLACES, look)
        cuda.configure(cuda.Mode.EAGER)
        warm = {*waits[-1]} - scene.may_wait if waits else set()
        look()
    except FxpipeError as error:
        said = [error, error.__cause__, error.__context__]
        first = next((e for e in said if isinstance(e, fxpipe.VerificationError)), error)
        return [f"{type(first).__name__}: {str(first).strip().splitlines()[0]}"]
    except Exception as error:
        return [*races, f"{type(error).__name__}: {str(error).splitlines()[0]}"]
    different = [name for name, value in made.items() if not torch.equal(value, values[name])]
    del made
    gc.collect()
    told = [f"race: {race}" for race in races]
    if different:
        told.append(f"other values: {', '.join(different[:3])}")
    if warm:
        told.append(f"the host waits in a warm step: {', '.join(warm)}")
    return told

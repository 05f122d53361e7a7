"""Settings drawn at random: a schedule, a model, and any of what can be combined with them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import fxpipe
from fxpipe import InputError, PartitionError, VerificationError
from fxpipe.extensions.offload.add_offload import add_offload
from fxpipe.ir.recipe import RECIPES
from fxpipe.passes.schedule import add_recompute
from tests.simcuda.process import on_devices
from tests.simcuda.training import CUTS, MODELS, OVERLAPPING, Setting, compare

LAZY, RANDOM, STARVING = 1, 2, 3

DEVICES = 8
"""How many simulated devices there are."""

SCHEDULES = [name for name in RECIPES if name not in ("inference", "chimera")]
"""Those that train; copies of stages are refused on such devices."""

OPTIONS: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": "always"},
    "offload": {"extensions": ["offload"]},
    "clip": {"clip_norm": 0.1},
    "deferred": {"extensions": ["deferred_batchnorm"]},
    "thread": {"extensions": [fxpipe.Dispatch("thread")]},
}
EXTRAS = ("scaler", "resume", "evaluation", "side", "late")
INPUTS = ("cpu", "pinned", "device")
SIZES = ((2, 4), (2, 4), (2, 8), (4, 4), (4, 8), (8, 8))
"""Devices and micro-batches."""


class Drawn(NamedTuple):
    """A setting, the devices, and the modes of the simulated ones with their seeds."""

    setting: Setting
    places: tuple[str, ...]
    modes: tuple[tuple[int, int], ...]
    parts: tuple[str, ...]


def draw(seed: int, runs: int = 3) -> Drawn:
    """The setting of a seed, and so many runs. Seeds that follow each other have all schedules and
    models."""
    chance = random.Random(seed)
    schedule, model = SCHEDULES[seed % len(SCHEDULES)], [*MODELS][seed % len(MODELS)]
    sizes = SIZES if schedule not in OVERLAPPING else [x for x in SIZES if x[0] in CUTS[model]]
    own = [name for name in OPTIONS if chance.random() < 0.3]
    if "offload" in own:
        kept = [size for size in sizes if _stores(schedule, size, "recompute" in own)]
        sizes, own = (kept, own) if kept else (sizes, [x for x in own if x != "offload"])
    devices, microbatches = chance.choice(sizes)
    extras = [name for name in EXTRAS if chance.random() < 0.25]
    inputs = chance.choice(INPUTS)
    where = chance.choice(("devices", "devices", "half", "streams"))
    options: dict[str, Any] = {"schedule": schedule, "microbatches": microbatches}
    for name in own:
        more = OPTIONS[name]
        extensions = [*options.get("extensions", ()), *more.get("extensions", ())]
        options |= {**more, "extensions": extensions}
    setting = Setting(
        model,
        options,
        extra=" ".join(extras),
        inputs=inputs,
        stages=RECIPES[schedule](devices, microbatches).stages,
    )
    modes = [(LAZY, 0), *((RANDOM + run % 2, seed * runs + run) for run in range(1, runs))]
    chance.shuffle(modes)
    return Drawn(
        setting,
        tuple(_place(where, index, devices) for index in range(devices)),
        tuple(modes),
        (schedule, model, *own, *extras, inputs, where, f"{devices} devices"),
    )


def _stores(schedule: str, size: tuple[int, int], recompute: bool) -> bool:
    """Whether anything is stored: not what is needed again at once."""
    made = add_recompute(RECIPES[schedule](*size), "always" if recompute else "never")
    return "O" in add_offload(made, "always").kinds


def _place(where: str, index: int, devices: int) -> str:
    if where == "streams":
        return f"stream:{index % 2}"
    return f"cuda:{index // 2 if where == 'half' else index}"


def compared(setting: Setting, places: Sequence[str], modes: Sequence[Any]) -> list[str] | None:
    """``compare``; None if the setting is refused by name."""
    try:
        return compare(setting, places, modes)
    except (InputError, PartitionError, VerificationError):  # not with these options, or devices
        return None


def wrong(seed: int, runs: int = 3) -> list[str] | None:
    """What is wrong with the setting of a seed; None if it is refused, also on CPU devices."""
    drawn = draw(seed, runs)
    try:
        found = on_devices(compared, *drawn[:3], devices=DEVICES)
    except AssertionError as error:
        found = [str(error)]
    return None if found is None else [f"seed {seed}: {problem}" for problem in found]

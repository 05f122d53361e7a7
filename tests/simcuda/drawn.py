"""Settings drawn at random: a schedule, a model, and any of what can be combined with them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from fxpipe import InputError, VerificationError
from fxpipe.ir.recipe import RECIPES
from tests.simcuda.process import on_devices
from tests.simcuda.training import CUTS, MODELS, OVERLAPPING, Setting, compare

LAZY, RANDOM, STARVING = 1, 2, 3

DEVICES = 8
"""How many simulated devices there are."""

SCHEDULES = [name for name in RECIPES if name not in ("inference", "chimera")]
"""Those that train; copies of stages are refused on such devices."""

OPTIONS: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": "always"},
    "offload": {"offload": "always"},
    "clip": {"clip_norm": 0.1},
    "deferred": {"extensions": ["deferred_batchnorm"]},
    "thread": {"dispatch": "thread"},
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


def draw(seed: int) -> Drawn:
    """The setting of a seed. Seeds that follow each other have all schedules and models."""
    chance = random.Random(seed)
    schedule, model = SCHEDULES[seed % len(SCHEDULES)], [*MODELS][seed % len(MODELS)]
    sizes = SIZES if schedule not in OVERLAPPING else [x for x in SIZES if x[0] in CUTS[model]]
    devices, microbatches = chance.choice(sizes)
    own = [name for name in OPTIONS if chance.random() < 0.3]
    extras = [name for name in EXTRAS if chance.random() < 0.25]
    inputs = chance.choice(INPUTS)
    where = chance.choice(("devices", "devices", "half", "streams"))
    options: dict[str, Any] = {"schedule": schedule, "microbatches": microbatches}
    for name in own:
        options |= OPTIONS[name]
    setting = Setting(
        model,
        options,
        extra=" ".join(extras),
        inputs=inputs,
        stages=RECIPES[schedule](devices, microbatches).stages,
    )
    return Drawn(
        setting,
        tuple(_place(where, index, devices) for index in range(devices)),
        ((LAZY, 0), (RANDOM + seed % 2, seed)),
        (schedule, model, *own, *extras, inputs, where, f"{devices} devices"),
    )


def _place(where: str, index: int, devices: int) -> str:
    if where == "streams":
        return f"stream:{index % 2}"
    return f"cuda:{index // 2 if where == 'half' else index}"


def compared(setting: Setting, places: Sequence[str], modes: Sequence[Any]) -> list[str] | None:
    """``compare``; None if the setting is refused by name."""
    try:
        return compare(setting, places, modes)
    except (InputError, VerificationError):  # the schedule may not go with the options
        return None


def wrong(seed: int) -> list[str] | None:
    """What is wrong with the setting of a seed; None if it is refused, also on CPU devices."""
    drawn = draw(seed)
    try:
        found = on_devices(compared, *drawn[:3], devices=DEVICES)
    except AssertionError as error:
        found = [str(error)]
    return None if found is None else [f"seed {seed}: {problem}" for problem in found]

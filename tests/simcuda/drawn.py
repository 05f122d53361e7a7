"""Settings drawn at random: a schedule, a model, and any of what can be combined with them."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import fxpipe
from fxpipe import InputError, PartitionError, VerificationError
from fxpipe.extend import find
from fxpipe.ir.recipe import RECIPES
from fxpipe.passes.schedule import add_recompute
from tests.simcuda.process import on_devices
from tests.simcuda.ranks import on_devices_of_ranks
from tests.simcuda.training import CUTS, MODELS, OVERLAPPING, Places, Setting, compare

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
INPUTS = ("cpu", "pinned", "device", "outside")
SIZES = ((2, 4), (2, 4), (2, 8), (4, 4), (4, 8), (8, 8))
"""Devices and micro-batches."""

RANKS = 2, 2
"""Replicas, and the devices of each, where each device is of a rank of its own."""

SUMMED: dict[str, dict[str, Any]] = {
    "replicas": {"extensions": [fxpipe.Replicas(in_order=True, bucket_cap_mb=1e-4)]},
    "sharded replicas": {
        "extensions": [fxpipe.Replicas(shard_optimizer=True, in_order=True, bucket_cap_mb=1e-4)]
    },
}
"""How replicas sum and update: in many buckets, in an order that has the bits of the CPU's."""


class Drawn(NamedTuple):
    """A setting, the devices, and the modes of the simulated ones with their seeds. There are no
    devices where those of ranks are meant."""

    setting: Setting
    places: tuple[str, ...]
    modes: tuple[tuple[int, int], ...]
    parts: tuple[str, ...]


def draw(seed: int, runs: int = 3, ranks: bool = True) -> Drawn:
    """The setting of a seed, and so many runs; with or without replicas, which take far longer.
    Seeds that follow each other have all schedules and models."""
    chance = random.Random(seed)
    number, at = divmod(seed, len(SCHEDULES))
    schedule, model = SCHEDULES[at], [*MODELS][number % len(MODELS)]
    sizes = SIZES if schedule not in OVERLAPPING else [x for x in SIZES if x[0] in CUTS[model]]
    own = [name for name in OPTIONS if chance.random() < 0.3]
    where = chance.choice(2 * ["devices", "devices", "half", "streams"] + [*SUMMED] * ranks)
    if where in SUMMED:
        sizes = [size for size in sizes if size[0] == RANKS[1]]
    if "offload" in own:
        kept = [size for size in sizes if _stores(schedule, size, "recompute" in own)]
        sizes, own = (kept, own) if kept else (sizes, [x for x in own if x != "offload"])
    devices, microbatches = chance.choice(sizes)
    extras = [name for name in EXTRAS if chance.random() < 0.25]
    inputs = chance.choice(INPUTS)
    options: dict[str, Any] = {"schedule": schedule, "microbatches": microbatches}
    for more in [*(OPTIONS[name] for name in own), SUMMED.get(where, {})]:
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
        tuple(_place(where, index) for index in range(devices) if where not in SUMMED),
        tuple(modes),
        (schedule, model, *own, *extras, inputs, where, f"{devices} devices"),
    )


def _stores(schedule: str, size: tuple[int, int], recompute: bool) -> bool:
    """Whether anything is stored: not what is needed again at once."""
    made = add_recompute(RECIPES[schedule](*size), "always" if recompute else "never")
    return "O" in find("extension", "offload")().add_offload(made).kinds


def _place(where: str, index: int) -> str:
    if where == "streams":
        return f"stream:{index % 2}"
    return f"cuda:{index // 2 if where == 'half' else index}"


def compared(
    places: Places, setting: Setting, modes: Sequence[tuple[int, int]], folder: Path
) -> list[str] | None:
    """``compare``; None if the setting is refused by name."""
    try:
        return compare(setting, places, modes, folder)
    except (InputError, PartitionError, VerificationError):  # not with these options, or devices
        return None


def wrong(seed: int, runs: int = 3, ranks: bool = True) -> list[str] | None:
    """What is wrong with the setting of a seed; None if it is refused, also on CPU devices."""
    setting, places, modes, _ = draw(seed, runs, ranks)
    found: list[str] | None
    try:
        with tempfile.TemporaryDirectory() as folder:
            if places:
                found = on_devices(compared, places, setting, modes, Path(folder), devices=DEVICES)
            else:
                size, replicas = math.prod(RANKS), RANKS[0]
                given = setting, modes, Path(folder)
                every = on_devices_of_ranks(size, compared, *given, replicas=replicas)
                found = None if None in every else [*chain(*every)]
    except AssertionError as error:
        found = [str(error)]
    return None if found is None else [f"seed {seed}: {problem}" for problem in found]

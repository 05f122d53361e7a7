"""What is told of a step's memory without lowering it is never more than what it takes."""

from __future__ import annotations

import random
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Adam

import fxpipe
from benchmarks.models.unet import UNet
from fxpipe.extend import _REGISTRY
from fxpipe.extensions.planner.auto import AutoCompiler, auto_schedule
from fxpipe.extensions.planner.bounds import ALWAYS, NEVER
from fxpipe.extensions.planner.candidates import Candidate, library_over
from fxpipe.ir.recipe import find_recipe
from tests.extensions.planner.test_auto import batch, layers
from tests.helpers.profiles import DEEP, LEVELS, deep


def unet() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return UNet(2, 4, depth=LEVELS), torch.randn(8, 3, 16, 16), torch.randn(8, 1, 16, 16)


@pytest.mark.parametrize("family", ["zb-h1", "v-half", *deep("interleaved-1f1b", "2bw")])
@pytest.mark.parametrize("skips", [True, *deep(False)])
def test_a_device_holds_no_less_than_its_bound(family: str, skips: bool) -> None:
    """Against the simulated memory of lowered programs, with skips and stages that recompute or
    offload; where all keep, or all recompute, the bound is near it."""
    model, x, y = unet() if skips else (layers(), *batch(8))
    options: Any = {"loss": mse_loss, "optimizer": Adam, "memory_limits": 2**30}
    name, draw = "auto-2bw" if family == "2bw" else "auto", random.Random(0)
    with (
        patch.dict(_REGISTRY["schedule"], {name: partial(auto_schedule, families=(family,))}),
        fxpipe.compile(model, ["cpu"] * 2, schedule=name, **options) as pipe,
    ):
        pipe.prepare(x, target=y)
        stages = cast(AutoCompiler, pipe._compiler)._stages
        assert stages is not None
        count = pipe.schedule.stages
        never, always = (NEVER,) * count, (ALWAYS,) * count
        place = find_recipe(family).placement
        for recipe in library_over(2, place, flush=family != "2bw"):
            for m in (2, 8 if DEEP else 4):
                drawn = [tuple(draw.choice((NEVER, ALWAYS)) for _ in never) for _ in range(2)]
                for modes in ((never, never), (always, never), drawn):
                    candidate = Candidate(recipe, m, modes[0], modes[1])
                    found = stages.predict(candidate)
                    if found is None:  # not with so few micro-batches
                        continue
                    for least, peak in zip(stages.peaks(candidate), found.peaks, strict=True):
                        near = 0.5 * peak if modes[1] == never else 0
                        assert near <= least <= peak, candidate

"""Simulated devices of one process generate what the model does on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import fxpipe
from fxpipe.extensions.generation import generate as generate_module
from fxpipe.pipeline import Pipeline
from tests.extensions.generation.test_generation import WAYS, held_here, made, prompts, seeded
from tests.simcuda.process import on_devices, simulated

pytestmark = simulated


def generated() -> None:
    model, places = made("Llama"), set[str]()
    expected = [seeded(model.generate, **way) for way in WAYS]

    def look(pipe: Pipeline) -> Sequence[Tensor]:
        places.update(str(buffer.device) for buffer in held_here(pipe))
        return held_here(pipe)

    with (
        patch.object(generate_module, "_held", look),
        fxpipe.compile(model, ["cuda:0", "cuda:1"], microbatches=2) as pipe,
    ):
        pipe.prepare(**prompts())
        whole: Any = pipe
        for tokens, way in zip(expected, WAYS, strict=True):
            assert torch.equal(seeded(whole.generate, **way), tokens)
    assert places == {"cuda:0", "cuda:1"}


def test_stages_keep_their_caches_on_their_devices() -> None:
    on_devices(generated)

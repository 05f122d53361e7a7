"""What torch has no common name for among kinds of accelerators: CUDA, XPU, MPS and others.

Streams, events and current devices are torch.Stream, torch.Event and torch.accelerator for every
kind. A kind that torch supports and ``KINDS`` does not name, such as one from outside of torch
("PrivateUse1"), is expected to have functions as torch.cuda has.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch


def _default_generator(device: torch.device) -> torch.Generator:
    generators: Any = torch.get_device_module(device).default_generators
    made: torch.Generator = generators[device.index or 0]
    return made


@dataclass(frozen=True)
class Accelerator:
    """A kind of accelerator.

    Attributes:
        kind: torch's name for its devices' type, such as "cuda".
        blocking: an environment variable; where it is 1, each launch waits until it is done.
        span: makes a block that profilers show under a name.
        generator: the device → torch's own random number generator for it.
    """

    kind: str
    blocking: str = ""
    span: Callable[[str], AbstractContextManager[Any]] = torch.profiler.record_function
    generator: Callable[[torch.device], torch.Generator] = _default_generator

    def is_late(self, error: BaseException) -> bool:
        """Whether an error may be a device's late report of an earlier failure."""
        if self.blocking and os.environ.get(self.blocking) == "1":
            return False
        return isinstance(error, torch.AcceleratorError) or (
            isinstance(error, RuntimeError) and str(error).startswith(f"{self.kind.upper()} error")
        )


KINDS = {
    "cuda": Accelerator(
        "cuda",
        blocking="CUDA_LAUNCH_BLOCKING",
        span=lambda name: torch.cuda.nvtx.range(name),
    ),
    "xpu": Accelerator("xpu"),
    "mps": Accelerator(
        "mps",
        generator=lambda device: torch.mps._get_default_mps_generator(),
    ),
}


def kind_of(device: torch.device) -> Accelerator:
    """The kind of a device."""
    return KINDS.get(device.type) or Accelerator(device.type)

"""Errors of devices that lack memory outside of a step: while a pipe is compiled, weights come to
their devices, or a checkpoint is loaded. They name the device and its stage, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fxpipe.compiler.options import Options
from fxpipe.errors import DeviceMemoryError, FxpipeError, told
from fxpipe.formatting import stages_text
from fxpipe.torchtools import source

_COMPILING = (
    "to compile the model, which takes one micro-batch and the largest parameter; take more "
    "micro-batches or a smaller batch, or list first the device with the most memory, as the first "
    "one runs the operations of all stages, one at a time"
)
_HOLDING = (
    "for its parameters and buffers, or the state of their optimizer; give it less: a partition "
    "with less in this stage, memory_limits=, or more devices; a step needs this memory as well"
)


@contextmanager
def naming_lacks(options: Options, *, compiling: bool = False) -> Iterator[None]:
    """Inside, a lack of memory becomes an error that names the device and its stage.

    Args:
        options: the options of the pipe.
        compiling: whether the model is compiled, besides tensors that go to their devices.

    Raises:
        DeviceMemoryError: a device, or the host for CPU devices, has no memory left.
    """
    try:
        yield
    except FxpipeError:
        raise
    except Exception as error:
        if not source.lacks_memory(error):
            raise
        cause = error.__cause__ or error if isinstance(error, source.Lack) else error
        raise _explained(options, error, cause, compiling) from cause


def _explained(
    options: Options, error: Exception, cause: BaseException, compiling: bool
) -> DeviceMemoryError:
    lacks = error.device if isinstance(error, source.Lack) else None
    compiling = compiling and lacks is None
    places = [torch.device(place.type, place.index or 0) for place in options.torch_devices]
    at = options.here if lacks is None else lacks
    at = torch.device(at.type, at.index or 0)
    device = options.group.device
    stages: list[int] = []
    if not compiling and at in places:
        device = places.index(at)
        stages = [s for s, home in enumerate(options.placement) if places[home] == at]
    if at.type == "cpu":
        stages = []
    of = f", {stages_text(stages)}," if stages else ""
    line = source.of_exception(cause)
    where = options.names[device] if at.type != "cpu" else "the host"
    return DeviceMemoryError(
        f"{where}{of} has no memory left {_COMPILING if compiling else _HOLDING} "
        f"({f'at {line}: ' if line else ''}{told(cause)})",
        device=device,
        instruction="",
        stage=stages[0] if len(stages) == 1 else None,
        microbatch=None,
        source=line,
    )

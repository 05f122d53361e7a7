"""The extension that says which threads run the devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

from fxpipe.compiler.options import Options
from fxpipe.errors import InputError, near
from fxpipe.extend import Extension
from fxpipe.runtime.choice import Dispatches


@dataclass(frozen=True)
class Dispatch(Extension):
    """Say which threads run the devices' instruction lists, or launch them on CUDA devices:

    - "device": a thread for each device.
    - "thread": one thread for all devices, in an order in which it never has to wait.

    Without this extension it is "device"; on CPU devices "thread" if there is one processor, or if
    that is predicted to be faster. ``print(pipe)`` and ``pipe.simulate()`` say so then.

    Results are the same to the bit, and so is the number of intra-op threads. Python runs one
    thread at a time, so several threads hand over the interpreter lock at every operation, which
    takes some 10 microseconds. One thread is faster if operations are not much longer than that, as
    with small micro-batches; ``profile`` then shows the devices one after another. Operations count
    as they were measured when the model was cut; after a cut by names, which measures nothing, by
    the sizes of their tensors until the first ``pipe.simulate()``. Tasks of your own, optimizers
    and leaf modules that wait for another device need "device".

    Args:
        by: "device" or "thread".

    Raises:
        InputError: it is neither.
    """

    by: Dispatches

    def __post_init__(self) -> None:
        if self.by not in get_args(Dispatches):
            known = near(str(self.by), get_args(Dispatches))
            raise InputError(f"there is no dispatch {self.by!r}: {known}")

    def options(self, options: Options) -> Options:
        """The options with this dispatch."""
        return replace(options, dispatch=self.by)

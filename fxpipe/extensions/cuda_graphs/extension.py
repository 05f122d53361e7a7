"""The extension that captures stages into CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.compiler.options import Options
from fxpipe.errors import InputError
from fxpipe.extend import Extension, Kernels
from fxpipe.extensions.cuda_graphs.capturing import Capturing


@dataclass(frozen=True)
class CudaGraphs(Extension):
    """On CUDA devices, capture the computation of a stage into CUDA graphs in the first steps and
    replay them from then on: one launch instead of one for each operation.

    Results are the same to the bit. For each micro-batch size, a stage has fixed memory for as many
    micro-batches as the schedule has in flight there (with the temporary memory of their
    operations) and for one more set of parameter gradients; ``simulate`` does not count it. Graphs
    read parameters at their addresses: if these change (an assigned state dict), the stage is
    captured again. Stages that draw random numbers, have leaf modules, or compute sizes from data
    run without graphs; the logger "fxpipe" has an info record for each.
    If batches overlap, call ``pipe.flush()`` before ``torch.cuda.synchronize()`` as long as stages
    are being captured: nothing may wait for a device during a capture.
    """

    holds_saved = True

    def check(self, options: Options) -> None:
        """Raise InputError over several ranks, or if the devices are not CUDA devices."""
        options.group.refuse(
            "CudaGraphs",
            "a capture waits for the device, which may wait for another rank; leave it out",
        )
        home = options.torch_devices[0]
        if home.type != "cuda":
            raise InputError(
                f"CudaGraphs is given and the devices are {home.type.upper()} devices, which have "
                "none; leave it out, or name CUDA devices"
            )

    def kernels(self) -> Kernels:
        """Captured kernels in place of those that can be captured."""
        return Capturing()

"""fxpipe: pipeline-parallel training of any PyTorch model, as a compiler.

Importing this loads the representations and the library of schedules. What compiles and runs is
imported when it is first used, as extensions are.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fxpipe import errors as errors
from fxpipe import extend as extend
from fxpipe import schedules as schedules  # importing it registers the library's
from fxpipe.errors import (
    CaptureError,
    CheckpointError,
    DeviceError,
    DeviceMemoryError,
    EndedError,
    ExecutionError,
    Fault,
    FxpipeError,
    InputError,
    ParseError,
    PartitionError,
    PassError,
    RankError,
    TraceError,
    VerificationError,
)
from fxpipe.extend import find, names
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import Recipe, one_each, round_robin, schedule, vee
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import A, B, C, D, F, G, I, O, P, Pair, R, Task, U, W

if TYPE_CHECKING:
    from fxpipe.compiler.leaf_modules.extension import LeafModules
    from fxpipe.entry import compile
    from fxpipe.extensions.comparison.comparison import Comparison, compare
    from fxpipe.extensions.cuda_graphs.capturing import CudaGraphs
    from fxpipe.extensions.deferred_batchnorm.defer_batchnorm import DeferredBatchNorm
    from fxpipe.extensions.dispatch.extension import Dispatch
    from fxpipe.extensions.inductor.compile_stages import Inductor
    from fxpipe.extensions.list_schedules.listed import list_schedule
    from fxpipe.extensions.loss_weight.weight import LossWeight
    from fxpipe.extensions.offload.add_offload import Offload
    from fxpipe.extensions.own_tasks.define import define_task
    from fxpipe.extensions.own_tasks.opcodes import TaskContext
    from fxpipe.extensions.paper.cluster import Cluster
    from fxpipe.extensions.paper.device import Device
    from fxpipe.extensions.paper.plan import plan
    from fxpipe.extensions.ranks.rejoin import rejoin
    from fxpipe.extensions.replicas.extension import Replicas
    from fxpipe.extensions.search.search import search_schedule
    from fxpipe.extensions.sharding.extension import Sharding
    from fxpipe.extensions.simulator import Link, Sizes, Time
    from fxpipe.extensions.slices.extension import Slices
    from fxpipe.extensions.watch.watch import Watched as watch
    from fxpipe.passes.partition.options import Partition
    from fxpipe.pipeline import Pipeline

__version__ = "0.1.0"

_LATER = {
    "LeafModules": "fxpipe.compiler.leaf_modules.extension",
    "Partition": "fxpipe.passes.partition.options",
    "Pipeline": "fxpipe.pipeline",
    "compile": "fxpipe.entry",
}
"""Name of the core → the module that has it, which is imported when the name is first used."""

__all__ = [
    "A",
    "B",
    "C",
    "CaptureError",
    "CheckpointError",
    "Cluster",
    "Comparison",
    "CudaGraphs",
    "D",
    "DeferredBatchNorm",
    "Device",
    "DeviceError",
    "DeviceMemoryError",
    "Dispatch",
    "EndedError",
    "ExecutionError",
    "F",
    "Fault",
    "FxpipeError",
    "G",
    "I",
    "Inductor",
    "InputError",
    "LeafModules",
    "Link",
    "LossWeight",
    "O",
    "Offload",
    "P",
    "Pair",
    "ParseError",
    "Partition",
    "PartitionError",
    "PassError",
    "Pipeline",
    "Plan",
    "Program",
    "R",
    "RankError",
    "Recipe",
    "Replicas",
    "Schedule",
    "Sharding",
    "Sizes",
    "Slices",
    "Task",
    "TaskContext",
    "Time",
    "TraceError",
    "U",
    "VerificationError",
    "W",
    "__version__",
    "compare",
    "compile",
    "define_task",
    "list_schedule",
    "one_each",
    "plan",
    "rejoin",
    "round_robin",
    "schedule",
    "search_schedule",
    "vee",
    "watch",
]


if not TYPE_CHECKING:  # type checkers know all names, and tell a misspelt one

    def __getattr__(name: str) -> Any:
        """Import what compiles and runs, or a public name that an extension has, when used."""
        if name in _LATER:
            return getattr(import_module(_LATER[name]), name)
        if name not in names("public"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return find("public", name, f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*__all__, "errors", "extend", "schedules"})

"""fxpipe: pipeline-parallel training of any PyTorch model, as a compiler."""

from __future__ import annotations

from fxpipe.comparison import Comparison, compare
from fxpipe.compile import compile
from fxpipe.errors import (
    CaptureError,
    CheckpointError,
    DeviceError,
    DeviceMemoryError,
    ExecutionError,
    Fault,
    FxpipeError,
    InputError,
    ParseError,
    PartitionError,
    PassError,
    RankError,
    RecomputeError,
    TraceError,
    VerificationError,
)
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import Recipe, one_each, round_robin, schedule, vee
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import A, B, C, F, I, O, P, R, Task, TaskContext, U, W, define_task
from fxpipe.kernels.recompute import is_recomputing
from fxpipe.passes.partition.options import Partition
from fxpipe.pipeline import Pipeline
from fxpipe.plan_training import plan_training
from fxpipe.planner.choices import Choice, TrainingPlan
from fxpipe.planner.cluster import Cluster
from fxpipe.prefetch import prefetch
from fxpipe.search.search import search_schedule

__version__ = "0.1.0"

__all__ = [
    "A",
    "B",
    "C",
    "CaptureError",
    "CheckpointError",
    "Choice",
    "Cluster",
    "Comparison",
    "DeviceError",
    "DeviceMemoryError",
    "ExecutionError",
    "F",
    "Fault",
    "FxpipeError",
    "I",
    "InputError",
    "O",
    "P",
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
    "RecomputeError",
    "Schedule",
    "Task",
    "TaskContext",
    "TraceError",
    "TrainingPlan",
    "U",
    "VerificationError",
    "W",
    "__version__",
    "compare",
    "compile",
    "define_task",
    "is_recomputing",
    "one_each",
    "plan_training",
    "prefetch",
    "round_robin",
    "schedule",
    "search_schedule",
    "vee",
]

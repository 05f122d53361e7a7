"""fxpipe: pipeline-parallel training of any PyTorch model, as a compiler."""

from __future__ import annotations

from fxpipe.compile import compile
from fxpipe.errors import (
    ExecutionError,
    Fault,
    FxpipeError,
    InputError,
    ParseError,
    PartitionError,
    PassError,
    TraceError,
    VerificationError,
)
from fxpipe.pipeline import Pipeline
from fxpipe.plan import Plan
from fxpipe.program import Program
from fxpipe.schedule import B, F, Schedule, U, schedule

__all__ = [
    "B",
    "ExecutionError",
    "F",
    "Fault",
    "FxpipeError",
    "InputError",
    "ParseError",
    "PartitionError",
    "PassError",
    "Pipeline",
    "Plan",
    "Program",
    "Schedule",
    "TraceError",
    "U",
    "VerificationError",
    "compile",
    "schedule",
]

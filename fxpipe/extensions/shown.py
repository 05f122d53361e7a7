"""What tables and figures of a pipe show of a compiled call."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.compiler.compiled import Compiled
from fxpipe.engine import Engine
from fxpipe.parts import Parts


def predicted_peaks(engine: Engine, compiled: Compiled) -> Sequence[int] | None:
    """Device → the most bytes that it is predicted to hold in a step, on all ranks; None without
    the simulator."""

    def predicted() -> Sequence[int] | None:
        if (peaks := Parts.peaks.get()) is None:
            return None
        state = engine.progress.state_of(compiled.traced)
        optimizers = engine.progress.optimizers_of(compiled.plan)
        found: Sequence[int] = peaks(compiled, engine._options, state, optimizers)
        return found

    return engine._lock.call(predicted)


def is_serial(engine: Engine, compiled: Compiled) -> bool:
    """Whether one thread computes for several devices, one after another."""
    options = engine._options
    alone = engine.group.size == 1 and not options.places
    return alone and len(options.devices) > 1 and compiled.threads == 1

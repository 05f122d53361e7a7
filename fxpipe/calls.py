"""What the calls of a pipe leave for later ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fxpipe.compiler.compiled import Compiled
from fxpipe.errors import InputError


class Stepped(NamedTuple):
    """The loss of a step, and its seconds: those for which it compiled, and the rest."""

    loss: Any
    seconds: float
    compile_seconds: float


@dataclass
class Calls:
    """What a pipe knows of its calls so far.

    Attributes:
        microbatches: how many micro-batches the next batch is split into, if it has the samples.
        shown: the last training step; before the first one, the call that was compiled first.
        last: what the last call of ``step`` has given; None before it, and after a failure.
        filled: the last call whose parameters and buffers were seen to have data.
        steps: how many steps there were.
        first: the number of the step that compiled first; empty before it.
        recompiles: counts the steps that compile anew, by an extension.
        compile_seconds: for how long the last step compiled.
    """

    microbatches: int
    shown: Compiled | None = None
    last: Stepped | None = None
    filled: Compiled | None = None
    steps: int = 0
    first: list[int] = field(default_factory=list)
    recompiles: Any = None
    compile_seconds: float = 0.0

    def compiled(self) -> Compiled:
        """The call that is shown. Raises InputError if nothing is compiled yet."""
        if self.shown is None:
            raise InputError(
                "nothing is compiled yet; call step once, or give compile(..., example=inputs)"
            )
        return self.shown

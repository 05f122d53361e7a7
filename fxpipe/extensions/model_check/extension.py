"""The extension that compares plans with the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxpipe.compiler.options import Options
from fxpipe.extend import Extension
from fxpipe.extensions.model_check.check import check
from fxpipe.passes.runner import Pass


class ModelCheck(Extension):
    """Compare each plan with the model on an example, before it runs: outputs, buffers that are
    written, and gradients. ``compile`` has this extension by itself."""

    given = False

    def __repr__(self) -> str:
        return "ModelCheck()"

    def passes(self, options: Options) -> Mapping[str, Sequence[tuple[str, Pass]]]:
        """The pass that compares."""
        return {"check": [("", _CHECK)]}


_CHECK = Pass(
    check,
    "traced, plan, values, state, call, differentiated, own, devices",
    "",
    when="whole",
)

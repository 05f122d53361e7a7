"""The extension that has submodules called as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from fxpipe.compiler.leaf_modules.calls import call_leaves, record_leaves
from fxpipe.compiler.leaf_modules.fallback import Leaves
from fxpipe.compiler.leaf_modules.logging_loss import look_at_loss
from fxpipe.compiler.options import Options
from fxpipe.errors import InputError, near
from fxpipe.extend import Extension
from fxpipe.passes.runner import Pass


class LeafModules(Extension):
    """Call submodules as they are in every step, with their hooks, control flow and autograd
    functions, instead of tracing them.

    Each call is one node of its stage's graph, whose backward autograd runs; other stages are as
    without it. The sizes of what a leaf module returns must not depend on values, because the graph
    has the sizes of the first micro-batch. A submodule around
    a line that cannot be traced becomes a leaf module by itself, with a warning; see
    docs/tracing.md. So ``compile`` has this extension, without modules, if it is not given.

    Args:
        modules: names of submodules, their classes, or the submodules themselves.
    """

    def __init__(self, *modules: str | type[nn.Module] | nn.Module) -> None:
        self.modules = modules
        self.given = bool(modules)

    def __repr__(self) -> str:
        return f"LeafModules({', '.join(map(repr, self.modules))})"

    def check(self, options: Options) -> None:
        """Raise InputError if an entry is no submodule, or a class that no submodule has."""
        self._named(options.model)

    def leaves(self, options: Options) -> Leaves:
        """What makes submodules around lines that cannot be traced leaf modules, too."""
        return Leaves(options.model, self._named(options.model), options.loss)

    def passes(self, options: Options) -> Mapping[str, Sequence[tuple[str, Pass]]]:
        """The passes for graphs with leaf modules."""
        return {
            "try": [("tell_checkpoints", _LOOK)],
            "capture": [("", _RECORD), ("capture", _CALL)],
        }

    def _named(self, model: nn.Module) -> dict[str, nn.Module]:
        """Name → submodule that is asked for."""
        known = {name: module for name, module in model.named_modules() if name}
        leaves: dict[str, nn.Module] = {}
        for wanted in self.modules:
            if isinstance(wanted, str) and wanted not in known:
                raise InputError(
                    f"LeafModules names no submodule {wanted!r}: {near(wanted, known)}"
                )
            names = [
                name
                for name, module in known.items()
                if wanted in (name, module)
                or (isinstance(wanted, type) and isinstance(module, wanted))
            ]
            if not names:
                word = getattr(wanted, "__name__", None) or f"a {type(wanted).__name__}"
                raise InputError(
                    f"LeafModules has {word}, which is no submodule, and no class of a submodule; "
                    "give submodules of the model (not itself), or their names or classes"
                )
            leaves |= {name: known[name] for name in names}
        return leaves


_RECORD = Pass(
    record_leaves,
    "model, loss_module, calls, args, kwargs, output, targets",
    "",
    when="calls",
)
_CALL = Pass(call_leaves, "traced, calls", "traced", when="calls")
_LOOK = Pass(look_at_loss, "leaves, objective, output, targets", "", when="given_loss")

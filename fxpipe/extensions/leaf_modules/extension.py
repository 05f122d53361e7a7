"""The extension that has submodules called as they are."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fxpipe.compiler.options import Options
from fxpipe.errors import InputError, near
from fxpipe.extend import Extension


class LeafModules(Extension):
    """Call submodules as they are in every step, with their hooks, control flow and autograd
    functions, instead of tracing them.

    Autograd then runs the backward in every stage. The sizes of what a leaf module returns must not
    depend on values, because the graph has the sizes of the first micro-batch. A submodule around
    a line that cannot be traced becomes a leaf module by itself, with a warning; see
    docs/training.md.

    Args:
        modules: names of submodules, their classes, or the submodules themselves.
    """

    def __init__(self, *modules: str | type[nn.Module] | nn.Module) -> None:
        self.modules = modules

    def __repr__(self) -> str:
        return f"LeafModules({', '.join(map(repr, self.modules))})"

    def options(self, options: Options) -> Options:
        """The options with these leaf modules. Raises InputError if an entry is no submodule, or a
        class that no submodule has."""
        known = {name: module for name, module in options.model.named_modules() if name}
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
        return replace(options, leaf_modules=leaves)

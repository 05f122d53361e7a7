"""What the pages say that is made of the code: ``python docs/generated.py`` prints it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from fxpipe import extensions
from fxpipe.compiler.passes import LISTS, FoundPass
from fxpipe.ir.instruction import every_opcode


def first_of(made: Any) -> str:
    """The first paragraph of a docstring, as a line of Markdown."""
    text = (inspect.getdoc(made) or "").partition("\n\n")[0]
    return " ".join(text.split()).rstrip(".:").replace("``", "`")


def passes_table() -> str:
    """Every pass from a model to a program, as the compiler's lists have them."""
    lines = ["| list | pass | what it does | requires | provides | when |", "|---" * 6 + "|"]
    for name, passes in LISTS.items():
        for each in passes:
            function = each.function
            if isinstance(function, FoundPass):
                function = function.find()
            told = first_of(function).partition(". ")[0]
            cells = [name, f"`{each.name}`", told, each.requires, each.provides, each.when]
            lines.append(f"| {' | '.join(cells)} |")
            name = ""
    return "\n".join(lines)


def instructions_table() -> str:
    """Every instruction, of the core and of extensions, as its class says."""
    rows = []
    for word, made in every_opcode().items():
        told, _, code = first_of(made).partition("Roughly: ")
        rows.append(f"| `{word}` | {told}`{code}` |" if code else f"| `{word}` | {told} |")
    return "\n".join(["| opcode | what it does |", "|---|---|", *rows])


def extensions_table() -> str:
    """Every extension that is there, as its folder says."""
    found = [each.name for each in iter_modules(extensions.__path__) if each.ispkg]
    made = {name: import_module(f"{extensions.__name__}.{name}") for name in found}
    rows = [f"| `{name}` | {first_of(module)} |" for name, module in made.items()]
    return "\n".join(["| folder | what it has |", "|---|---|", *rows])


MARKS: dict[str, Callable[[], str]] = {
    "<!-- the table of passes -->": passes_table,
    "<!-- the table of instructions -->": instructions_table,
    "<!-- the table of extensions -->": extensions_table,
}
"""What a page has in place of a table → what makes the table."""


if __name__ == "__main__":
    for table in MARKS.values():
        print(table(), end="\n\n")

"""What the pages say that is made of the code: ``python docs/generated.py`` prints it."""

from __future__ import annotations

import inspect

from fxpipe.compiler.passes import LISTS, FoundPass

MARK = "<!-- the table of passes -->"
"""Where a page has the table."""


def passes_table() -> str:
    """Every pass from a model to a program, as the compiler's lists have them."""
    lines = ["| list | pass | what it does | requires | provides | when |", "|---" * 6 + "|"]
    for name, passes in LISTS.items():
        for each in passes:
            function = each.function
            if isinstance(function, FoundPass):
                function = function.find()
            told = (inspect.getdoc(function) or "").partition("\n")[0].rstrip(".:")
            cells = [name, f"`{each.name}`", told, each.requires, each.provides, each.when]
            lines.append(f"| {' | '.join(cells)} |")
            name = ""
    return "\n".join(lines)


if __name__ == "__main__":
    print(passes_table())

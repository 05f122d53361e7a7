"""The core names no class or function that only an extension defines, but for what it asks for in
its table of parts. ``python -m tests.test_words`` counts the lines for each extension."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTENSIONS = ROOT / "fxpipe" / "extensions"

TABLES = {"__init__.py", "extend.py", "parts.py", "views.py"}
"""What lists extensions: what users call, doors by name, parts, and the methods of a pipe."""


def core() -> Iterator[Path]:
    """The files of the core, but for the tables."""
    for folder in ("fxpipe", "passes", "schedules"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT).parts
            linked = inside[:2] in (("fxpipe", "passes"), ("fxpipe", "schedules"))
            if "extensions" not in inside and not linked:
                if inside[0] != "fxpipe" or len(inside) > 2 or path.name not in TABLES:
                    yield path


def defined(tree: ast.AST) -> set[str]:
    """All names that some code defines: classes, functions, arguments, variables, attributes."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return found


def outside() -> Mapping[str, list[str]]:
    """Extension → the lines of the core with a name that only this extension defines."""
    trees = {path: ast.parse(path.read_text()) for path in core()}
    known = set[str]().union(*map(defined, trees.values()))
    owner: dict[str, set[str]] = defaultdict(set)
    for path in EXTENSIONS.rglob("*.py"):
        extension = path.relative_to(EXTENSIONS).parts[0].removesuffix(".py")
        for own in ast.parse(path.read_text()).body:
            if isinstance(own, ast.ClassDef | ast.FunctionDef) and own.name not in known:
                owner[own.name].add(extension)
    found: dict[str, list[str]] = {next(iter(each)): [] for each in owner.values()}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and len(owner.get(node.id, ())) == 1:
                (extension,) = owner[node.id]
                found[extension].append(f"{path.relative_to(ROOT)}:{node.lineno} {node.id}")
    return found


def test_the_core_names_no_class_or_function_that_only_an_extension_defines() -> None:
    found = outside()
    assert len(found) > 20
    assert {name: lines for name, lines in found.items() if lines} == {}


if __name__ == "__main__":
    for name, lines in sorted(outside().items()):
        print(len(lines), name, *lines)

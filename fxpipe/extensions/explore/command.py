"""``fxpipe explore`` on the command line."""

from __future__ import annotations

import base64
import gzip
import json
import sys
from argparse import Namespace, _SubParsersAction
from importlib import resources
from pathlib import Path
from typing import Any

from fxpipe.errors import InputError
from fxpipe.extensions.status_line.line import showing

DEFAULTS = {"devices": (2, 4, 8), "microbatches": (4, 8, 16)}


def add_explore(added: _SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = added.add_parser(
        "explore",
        help="write a page on which to look at all schedules",
        description="Write a page of HTML, which a browser shows without a server: choose a "
        "schedule, and see its grid, bubble, memory and versions.",
    )
    parser.add_argument("file", metavar="FILE", help="the page, such as explorer.html")
    for short, (name, numbers) in zip(("-p", "-m"), DEFAULTS.items(), strict=True):
        given = f"choices of {name}; by default {','.join(map(str, numbers))}"
        parser.add_argument(short, f"--{name}", metavar="N,N", help=given)
    parser.set_defaults(run=write_page)


def write_page(given: Namespace) -> bool:
    """``fxpipe explore``: the page."""
    from fxpipe.extensions.explore.data import every_run  # needs another extension

    numbers = [numbers_of(name, getattr(given, name)) for name in DEFAULTS]
    with showing(lambda: "simulating every schedule"):
        text = json.dumps(every_run(*numbers), separators=(",", ":"), ensure_ascii=False)
    packed = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    page = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    Path(given.file).write_text(page.replace("DATA", packed, 1), encoding="utf-8")
    print(f"wrote {given.file}; open it in a browser", file=sys.stderr)
    return True


def numbers_of(name: str, text: str | None) -> list[int]:
    """The numbers of ``2,4,8``, or the default ones. Raises InputError for anything else."""
    if text is None:
        return [*DEFAULTS[name]]
    if not all(word.strip().isdecimal() and 0 < int(word) <= 64 for word in text.split(",")):
        raise InputError(f"--{name} has {text!r}; give numbers from 1 to 64, such as 2,4,8")
    return sorted({*map(int, text.split(","))})

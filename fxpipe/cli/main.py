"""``fxpipe``: runs a command and turns its result into an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from fxpipe.cli.parser import make_parser
from fxpipe.errors import FxpipeError, InputError

DONE, FAULTY, WRONG = 0, 1, 2
"""Exit statuses: no faults; faults were found; the command could not be carried out."""

_INTERRUPTED = 130
_CLOSED = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status.

    Args:
        arguments: those after the program's name; by default the process's own.
    """
    try:
        if any("\0" in argument for argument in arguments or ()):
            raise InputError("an argument holds a NUL character, which no name of a file can")
        given = make_parser().parse_args(arguments)
        sound = given.run(given)
        sys.stdout.flush()
    except FxpipeError as error:
        print(f"fxpipe: {' '.join(str(error).split())}", file=sys.stderr)
        return WRONG
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            # The reader of the output, such as ``head``, has closed it; the flush at exit must not
            # fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _CLOSED
        print(f"fxpipe: {error.filename}: {error.strerror}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        return _INTERRUPTED
    return DONE if sound else FAULTY

"""``python -m fxpipe``: the command line."""

from __future__ import annotations

import sys

from fxpipe.extend import find

if __name__ == "__main__":
    sys.exit(find("command", "main", "the command line")())

"""What is measured once on a machine, kept in a folder beside what inductor keeps."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def folder() -> Path:
    """The folder of what is kept, in inductor's own cache folder; made if it is not there."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # slow to import

    path = Path(cache_dir()) / "fxpipe"
    path.mkdir(parents=True, exist_ok=True)
    return path


def key_of(text: str) -> str:
    """The key under which the folder keeps what was made for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def kept(text: str, make: Callable[[], Any]) -> Any:
    """Return a JSON value that is made once for a text on this machine."""
    path = folder() / f"{key_of(text)}.json"
    with suppress(OSError, ValueError):
        return json.loads(path.read_text())
    value = make()
    with suppress(OSError):  # then the next call makes it again
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(value, file)
        os.replace(file.name, path)  # at once: others never read a part
    return value

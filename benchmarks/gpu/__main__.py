"""Run all GPU scripts, a process each; arguments are handed to every one.

Run it with ``python -m benchmarks.gpu``, or ``python -m benchmarks.gpu --dry-run``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from benchmarks.gpu.workloads import NAMES

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("spin",),
    *(("stages", "--models", name) for name in NAMES),
    *(("scaling", "--models", name) for name in ("unet", "amoebanet")),
    ("ablation",),
    *(("memory", "--models", name) for name in ("unet", "gpt2")),
)
"""Each takes a few minutes at most."""


def main(given: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if all of them gave it."""
    handed = sys.argv[1:] if given is None else given
    failed = []
    for script, *own in COMMANDS:
        words = [script, *own]
        print(" ".join(words), flush=True)
        command = [sys.executable, "-m", f"benchmarks.gpu.{script}", *own, *handed]
        if subprocess.run(command).returncode:
            failed.append(" ".join(words))
    print("failed: " + "; ".join(failed) if failed else "all done")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

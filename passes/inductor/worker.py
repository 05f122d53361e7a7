"""A process that compiles exported graphs: ``python -m fxpipe.passes.inductor.worker``.

Each line of its input is a JSON list: the path of an exported graph, that of the package to write,
inductor's options, and which arguments are in memory that nothing else holds. Each line of its
output is a JSON list: the error or nothing, and the most bytes that a call adds while it runs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection
from itertools import accumulate
from typing import Any

import torch
from torch._inductor import aoti_compile_and_package
from torch.profiler import ProfilerActivity, profile

import fxpipe.random  # noqa: F401  (graphs may have its operators)


def main() -> None:
    """Answer each line until the input ends."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # a compiler may print
        for line in sys.stdin:
            try:
                with torch.no_grad():
                    answer = "", _compile(*json.loads(line))
            except Exception as error:
                text = (str(error) or type(error).__name__).strip()
                answer = text.splitlines()[0], 0
            print(json.dumps(answer), file=answers, flush=True)


def _compile(source: str, target: str, options: dict[str, Any], owned: Collection[int]) -> int:
    program = torch.export.load(source)
    assert program.example_inputs is not None
    given = [*program.example_inputs[0]]
    aoti_compile_and_package(program, package_path=target, inductor_configs=options)
    loader: Any = torch._C._aoti.AOTIModelPackageLoader
    package = loader(target, "model", True, 1, -1)
    held = [tensor for index, tensor in enumerate(given) if index not in owned]
    if any(tensor.is_cuda for tensor in held):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        package.boxed_run(given)
        return torch.cuda.max_memory_allocated() - before
    del program
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        made = package.boxed_run(given)
    del made
    events: Any = profiler.profiler.kineto_results.events()
    sizes = sorted((x.start_ns(), x.nbytes()) for x in events if x.name() == "[memory]")
    peak: int = max(accumulate((size for _, size in sizes), initial=0))
    return peak


if __name__ == "__main__":
    main()

"""Compile exported graphs in a process: ``python -m fxpipe.extensions.inductor.worker``.

Each line of the input is a JSON list: the path of an exported graph, the path of the package to
write, inductor's options, and the default dtype. Each line of the output is a JSON text: why the
graph could not be compiled, or an empty one.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch._inductor import aoti_compile_and_package
from torch._inductor.decomposition import decompositions

import fxpipe.random  # noqa: F401  (graphs may have its operators)
from fxpipe.errors import PassError, told
from fxpipe.extensions.inductor.library import TensorLayout


def main() -> None:
    """Answer each line until the input ends."""
    # several threads of inductor's own code would add the rows of a gradient in any order
    decompositions.pop(torch.ops.aten.embedding_dense_backward.default, None)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # compilers may print to stdout, which carries the answers
        for line in sys.stdin:
            reason = ""
            try:
                with torch.no_grad():
                    _compile(*json.loads(line))
            except Exception as error:
                reason = told(error).splitlines()[0]
            print(json.dumps(reason), file=answers, flush=True)


def _compile(source: str, target: str, options: dict[str, Any], default: str) -> None:
    """Write the package, and run it once.

    Raises:
        PassError: its results have other layouts than those of the graph.
    """
    program = torch.export.load(source)
    assert program.example_inputs is not None
    arguments = [*program.example_inputs[0]]
    made: Any = program.graph.output_node().args[0]
    looks = [TensorLayout.of(node.meta["val"]) for node in made]
    torch.set_default_dtype(getattr(torch, default))
    aoti_compile_and_package(program, package_path=target, inductor_configs=options)
    loader: Any = torch._C._aoti.AOTIModelPackageLoader
    results = loader(target, "model", True, 1, -1).boxed_run(arguments)
    if not all(look.fits(result) for look, result in zip(looks, results, strict=True)):
        raise PassError("inductor returns a value in another layout")


if __name__ == "__main__":
    main()

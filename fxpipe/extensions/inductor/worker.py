"""Compile exported graphs in a process: ``python -m fxpipe.extensions.inductor.worker``.

Each line of the input is a JSON list: the path of an exported graph, the path of the package to
write, inductor's options, the arguments whose memory nothing else holds, and the default dtype.
Each line of the output is a JSON list: the fields of an ``Answer``.

On processors with AVX-512, large matrix products go to oneDNN:

before:  p = addmm(bias, a, b)
after:   p = _linear_pointwise(a, t(b), bias)

torch gives them to MKL, which takes twice as long on AMD processors with AVX-512. Inductor itself
uses oneDNN for constant weights only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import fx
from torch._inductor import aoti_compile_and_package, ir, mkldnn_ir
from torch._inductor.lowering import register_lowering
from torch.profiler import ProfilerActivity, profile

import fxpipe.random  # noqa: F401  (graphs may have its operators)
from fxpipe.errors import PassError, told
from fxpipe.extensions.inductor import decompositions
from fxpipe.extensions.inductor.libraries import Answer
from fxpipe.extensions.inductor.library import TensorLayout

BOTH = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
"""Whether torch has both MKL and oneDNN."""

MULTIPLIES = BOTH and torch.backends.cpu.get_cpu_capability() == "AVX512"
"""Whether oneDNN gets the large products. On AMD processors with AVX2 only, it takes 1.0 to 1.2
times as long as MKL."""

LARGE = 2**22
"""Products with at least this many multiplications go to oneDNN; for smaller ones its start-up cost
is too large."""

aten = torch.ops.aten


def main() -> None:
    """Answer each line until the input ends."""
    decompositions.register_decompositions()
    if MULTIPLIES:
        # in place of inductor's lowering, which wants a constant
        product = torch.ops.mkldnn._linear_pointwise.default
        register_lowering(product, type_promotion_kind=None)(_lowered)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # compilers may print to stdout, which carries the answers
        for line in sys.stdin:
            try:
                with torch.no_grad():
                    answer = Answer("", _compile(*json.loads(line)))
            except Exception as error:
                answer = Answer(told(error).splitlines()[0])
            print(json.dumps(answer), file=answers, flush=True)


def _compile(
    source: str, target: str, options: dict[str, Any], owned: Collection[int], default: str
) -> int:
    """Write the package, and return the most bytes that a call of it adds while it runs.

    Raises:
        PassError: its results have other layouts than those of the graph.
    """
    program = torch.export.load(source)
    assert program.example_inputs is not None
    arguments = [*program.example_inputs[0]]
    made: Any = program.graph.output_node().args[0]
    looks = [TensorLayout.of(node.meta["val"]) for node in made]
    torch.set_default_dtype(getattr(torch, default))
    if MULTIPLIES:
        options = {**options, "post_grad_custom_post_pass": multiply_by_onednn}
    aoti_compile_and_package(program, package_path=target, inductor_configs=options)
    loader: Any = torch._C._aoti.AOTIModelPackageLoader
    package = loader(target, "model", True, 1, -1)
    held = [tensor for index, tensor in enumerate(arguments) if index not in owned]
    if places := {tensor.device for tensor in held if not tensor.is_cpu}:
        memory: Any = torch.get_device_module(places.pop())
        memory.reset_peak_memory_stats()
        before = memory.memory_allocated()
        _check(package.boxed_run(arguments), looks)
        return int(memory.max_memory_allocated() - before)
    del program
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        results = package.boxed_run(arguments)
    _check(results, looks)
    del results
    events: Any = profiler.profiler.kineto_results.events()
    sizes = sorted((x.start_ns(), x.nbytes()) for x in events if x.name() == "[memory]")
    peak: int = max(accumulate((size for _, size in sizes), initial=0))
    return peak


def _check(results: Sequence[torch.Tensor], looks: Sequence[TensorLayout]) -> None:
    if not all(look.fits(result) for look, result in zip(looks, results, strict=True)):
        raise PassError("inductor returns a value in another layout")


def multiply_by_onednn(graph: fx.Graph) -> None:
    """Give the large products of a graph, as it is after inductor's own passes, to oneDNN."""
    for node in [n for n in graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]:
        *bias, a, b = node.args
        if not _large(node, a, bias):
            continue
        with graph.inserting_before(node):
            transposed = graph.call_function(aten.permute.default, (b, [1, 0]))
            product = graph.call_function(
                torch.ops.mkldnn._linear_pointwise.default,
                (a, transposed, *(bias or [None]), "none", [], ""),
            )
        transposed.meta["val"] = b.meta["val"].t()
        product.meta.update(node.meta)
        node.replace_all_uses_with(product)
        graph.erase_node(node)


def _large(node: fx.Node, a: fx.Node, bias: list[fx.Node]) -> bool:
    value = node.meta["val"]
    plain = value.is_cpu and value.dtype is torch.float32 and not node.kwargs
    is_row = all(operand.meta["val"].dim() == 1 for operand in bias)
    return plain and is_row and value.numel() * a.meta["val"].shape[1] >= LARGE


class _Product(mkldnn_ir.LinearUnary):
    """A product whose operands keep their layout."""

    @classmethod
    def require_contiguous(cls, x: Any) -> Any:
        return cls.require_stride1(x)


def _lowered(*args: Any) -> Any:
    product: Any = _Product
    return ir.TensorBox.create(product.create(*args))


if __name__ == "__main__":
    main()

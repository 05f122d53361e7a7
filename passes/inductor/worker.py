"""A process that compiles exported graphs: ``python -m fxpipe.passes.inductor.worker``.

Each line of its input is a JSON list: the path of an exported graph, that of the package to write,
inductor's options, which arguments are in memory that nothing else holds, and the default dtype.
Each line of its output is a JSON list: what an ``Answer`` has.

On the way, with AVX-512, large products of matrices go to oneDNN:

before:  p = addmm(bias, a, b)
after:   p = _linear_pointwise(a, t(b), bias)

torch gives them to MKL, which takes twice as long on a processor of AMD with AVX-512. Inductor does
the same itself, but with constant weights only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection
from itertools import accumulate
from typing import Any

import torch
from torch import fx
from torch._inductor import aoti_compile_and_package, ir, mkldnn_ir
from torch._inductor.lowering import register_lowering
from torch.profiler import ProfilerActivity, profile

import fxpipe.random  # noqa: F401  (graphs may have its operators)
from fxpipe.errors import told
from fxpipe.passes.inductor import decompositions
from fxpipe.passes.inductor.libraries import Answer, is_lasting

BOTH = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
"""Whether oneDNN is there beside MKL."""

MULTIPLIES = BOTH and torch.backends.cpu.get_cpu_capability() == "AVX512"
"""Whether it gets the large products. On a processor of AMD with AVX2 alone it takes 1.0 to 1.2
times as long as MKL."""

LARGE = 2**22
"""Of so many multiplications, a product is given to oneDNN: to start there takes some of the time
of a smaller one."""

aten = torch.ops.aten


def main() -> None:
    """Answer each line until the input ends."""
    decompositions.register()
    if MULTIPLIES:
        # in place of inductor's lowering, which wants a constant
        product = torch.ops.mkldnn._linear_pointwise.default
        register_lowering(product, type_promotion_kind=None)(_lowered)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # a compiler may print
        for line in sys.stdin:
            try:
                with torch.no_grad():
                    answer = Answer("", _compile(*json.loads(line)))
            except Exception as error:
                answer = Answer(told(error).splitlines()[0], lasting=is_lasting(error))
            print(json.dumps(answer), file=answers, flush=True)


def _compile(
    source: str, target: str, options: dict[str, Any], owned: Collection[int], default: str
) -> int:
    program = torch.export.load(source)
    assert program.example_inputs is not None
    given = [*program.example_inputs[0]]
    torch.set_default_dtype(getattr(torch, default))
    if MULTIPLIES:
        options = {**options, "post_grad_custom_post_pass": multiply_by_onednn}
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


def multiply_by_onednn(graph: fx.Graph) -> None:
    """Give the large products of a graph, such as inductor has it in the end, to oneDNN."""
    for node in [n for n in graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]:
        *bias, a, b = node.args
        if not _large(node, a, bias):
            continue
        with graph.inserting_before(node):
            turned = graph.call_function(aten.permute.default, (b, [1, 0]))
            made = graph.call_function(
                torch.ops.mkldnn._linear_pointwise.default,
                (a, turned, *(bias or [None]), "none", [], ""),
            )
        turned.meta["val"] = b.meta["val"].t()
        made.meta.update(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _large(node: fx.Node, a: fx.Node, bias: list[fx.Node]) -> bool:
    made = node.meta["val"]
    plain = made.is_cpu and made.dtype is torch.float32 and not node.kwargs
    alone = all(each.meta["val"].dim() == 1 for each in bias)
    return plain and alone and made.numel() * a.meta["val"].shape[1] >= LARGE


class _Product(mkldnn_ir.LinearUnary):
    """A product whose operands stay as they lie."""

    @classmethod
    def require_contiguous(cls, x: Any) -> Any:
        return cls.require_stride1(x)


def _lowered(*given: Any) -> Any:
    product: Any = _Product
    return ir.TensorBox.create(product.create(*given))


if __name__ == "__main__":
    main()

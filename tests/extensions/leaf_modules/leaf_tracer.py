"""A tracer that takes little time: of models whose every operation is a module of torch.nn."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxpipe.extend import Extension
from fxpipe.extensions.leaf_modules.graph import Example
from fxpipe.ir.plan import Argument, Write
from fxpipe.ir.traced import Traced, Value
from fxpipe.passes.tracing.tracer import tensors_read


class LeafTracer:
    """Calls each module of torch.nn as it is."""

    def trace(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        called: Collection[nn.Module] = (),
    ) -> Traced:
        assert not kwargs and all(map(self.calls, called))
        graph = fx.Tracer().trace(model)
        end = graph.output_node()
        result: Any = end.args[0]
        end.args = ((result,),)
        module = fx.GraphModule(model, graph)
        written = Example(module).written(model, *args)
        held = tensors_read(module)
        trained = dict(model.named_parameters(remove_duplicate=False))
        return Traced(
            module=module,
            parameters=tuple(Argument(name, name) for name in held if name in trained),
            buffers=tuple(Argument(name, name) for name in held if name not in trained),
            constants={},
            inputs=tuple(node.name for node in graph.find_nodes(op="placeholder")),
            writes=tuple(Write(name, name) for name in held if name in written),
            outputs=(Value(result.name),),
            out_spec=pytree.tree_structure(0),
            under_autograd=True,
        )

    def calls(self, module: nn.Module) -> bool:
        return fx.Tracer().is_leaf_module(module, "")


class LeavesOnly(Extension):
    def tracer(self) -> LeafTracer:
        return LeafTracer()

    def __repr__(self) -> str:
        return "LeavesOnly()"


def leaf_graph(model: nn.Module, *args: Tensor) -> Traced:
    """A model's graph, in which each module of torch.nn is called as it is."""
    return LeafTracer().trace(model, args, {})

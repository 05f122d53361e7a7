"""Split a recurrent operation of several layers into one for each layer, with dropout between.

before:  lstm = aten.lstm(x, [h, c], [w0, …, w1, …], True, 2, 0.1, True, False, True)
after:   lstm = aten.lstm(transpose(x, 0, 1), [h[0:1], c[0:1]], [w0, …], True, 1, 0.0, …, False)
         native_dropout = aten.native_dropout(lstm[0], 0.1, True)
         lstm_1 = aten.lstm(native_dropout[0], [h[1:2], c[1:2]], [w1, …], True, 1, 0.0, …, False)
         with the output transpose(lstm_1[0], 0, 1) and the states cat([lstm[1], lstm_1[1]]), …

PyTorch's operation computes the same. Once it is split, its layers can be on several stages, and
its dropout is an operation whose mask can be a function of a seed.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.random import arguments_of

aten = torch.ops.aten

_RECURRENT = frozenset(
    getattr(operation, overload)
    for operation in (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu)
    for overload in ("input", "data")
)


def part_recurrent(module: fx.GraphModule) -> None:
    """Split each recurrent operation of several layers, in a functional graph with the nodes'
    values in ``meta["val"]``."""
    for node in list(module.graph.nodes):
        if node.target in _RECURRENT:
            given = arguments_of(node.target, node.args, node.kwargs)
            if given["num_layers"] > 1 or given["dropout"]:
                _Layers(node, given).part()


class _Layers:
    """Splits one operation, ``given`` its arguments by name.

    Its results are the output, (…, directions × width), and each state after the last sample,
    (layers × directions, batch, width).
    """

    def __init__(self, node: fx.Node, given: dict[str, Any]) -> None:
        self.node = node
        self.given = given
        self.graph = node.graph

    def part(self) -> None:
        given, values = self.given, self.node.meta["val"]
        count = given["num_layers"]
        directions = 2 if given["bidirectional"] else 1
        of_layer = len(given["params"]) // count
        states = given["hx"] if isinstance(given["hx"], list | tuple) else [given["hx"]]
        output: Any = self.node.args[0]
        ends: list[list[fx.Node]] = [[] for _ in states]
        with self.graph.inserting_before(self.node):
            first = values[0]
            if given.get("batch_first"):
                output, first = self._turned(output), first.transpose(0, 1)
            for layer in range(count):
                rows = layer * directions, (layer + 1) * directions
                starts = [self._rows(state, *rows) for state in states]
                params = given["params"][layer * of_layer : (layer + 1) * of_layer]
                finals = (value[rows[0] : rows[1]] for value in values[1:])
                output, *new_states = self._layer(output, starts, params, (first, *finals))
                for end, state in zip(ends, new_states, strict=True):
                    end.append(state)
                if given["dropout"] and given["train"] and layer < count - 1:
                    output = self._dropped(output)
            if given.get("batch_first"):
                output = self._turned(output)
            results = [output, *map(self._joined, ends, values[1:])]
        for item in list(self.node.users):
            item.replace_all_uses_with(results[int(str(item.args[1]))])
            self.graph.erase_node(item)
        self.graph.erase_node(self.node)

    def _layer(
        self, output: Any, starts: list[fx.Node], params: Any, values: tuple[Tensor, ...]
    ) -> list[fx.Node]:
        """The operation with one layer, and its results."""
        hx = starts if isinstance(self.given["hx"], list | tuple) else starts[0]
        changed = {"hx": hx, "params": list(params), "num_layers": 1, "dropout": 0.0}
        if "batch_first" in self.given:
            changed["batch_first"] = False
        args = (output, *list((self.given | changed).values())[1:])
        layer = self._call(self.node.target, args, values)
        return [self._call(operator.getitem, (layer, i), v) for i, v in enumerate(values)]

    def _dropped(self, output: fx.Node) -> fx.Node:
        value = output.meta["val"]
        values = value, torch.empty_like(value, dtype=torch.bool)
        args = output, self.given["dropout"], True
        both = self._call(aten.native_dropout.default, args, values)
        return self._call(operator.getitem, (both, 0), value)

    def _turned(self, value: fx.Node) -> fx.Node:
        turned = value.meta["val"].transpose(0, 1)
        return self._call(aten.transpose.int, (value, 0, 1), turned)

    def _rows(self, state: Any, start: int, end: int) -> fx.Node:
        value = state.meta["val"][start:end]
        return self._call(aten.slice.Tensor, (state, 0, start, end), value)

    def _joined(self, parts: list[fx.Node], value: Tensor) -> fx.Node:
        return parts[0] if len(parts) == 1 else self._call(aten.cat.default, (parts,), value)

    def _call(self, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta.update({**self.node.meta, "val": value})
        return node

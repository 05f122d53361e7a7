"""Count what a model takes, operation by operation, in one run of its forward and backward without
data."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.errors import InputError, told
from fxpipe.extensions.paper.operations import Operation, operation, uncounted
from fxpipe.passes.tracing.capturing import announced
from fxpipe.torchtools import source
from fxpipe.torchtools.pytrees import size_in_bytes

Half = Literal["F", "I", "W"]
"""Forward, the half of a backward that gives gradients of inputs, or that of parameters."""


class Ran(NamedTuple):
    """An operation that ran.

    Attributes:
        path: the innermost submodule in which it ran, or of which it is the backward; "" outside
            of all.
        half: of the step.
        operation: what it takes.
    """

    path: str
    half: Half
    operation: Operation


class KeptStorage(NamedTuple):
    """Memory that a forward makes or saves.

    Attributes:
        path: the submodule that does.
        storage: its number.
        bytes: of the whole storage.
    """

    path: str
    storage: int
    bytes: int


@dataclass
class Counted:
    """What a model takes for the samples of an example.

    Attributes:
        samples: how many those are.
        ran: the operations, in the order in which they ran.
        made: the storages that forwards make, with the submodule that does.
        saved: the storages that they save for backward, with the submodule that does.
        read: submodule and storage, for each storage that a forward reads.
        parameters: name → its elements, the bytes of one, and whether it has a gradient.
        inputs: submodule → the bytes of the tensors with gradients that it is called with.
        outputs: submodule → the bytes of those that it returns.
        containers: the submodules that hold others, and run none of their own.
        uncounted: the operators that may have FLOPs that nobody counts.
    """

    samples: int
    ran: list[Ran] = field(default_factory=list)
    made: list[KeptStorage] = field(default_factory=list)
    saved: list[KeptStorage] = field(default_factory=list)
    read: set[tuple[str, int]] = field(default_factory=set)
    parameters: dict[str, tuple[int, int, bool]] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    containers: frozenset[str] = frozenset()
    uncounted: frozenset[str] = frozenset()


def count(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss: Callable[[Any], Any] | None,
    samples: int,
    *,
    sums: int | None = None,
) -> Counted:
    """Run the forward and the backward of a model on tensors without data, and count.

    Args:
        model: the model, all of whose parameters are on the meta device.
        args: its inputs, on the meta device.
        kwargs: its keyword inputs.
        loss: output → the loss; None if the model returns its loss, alone or as ``.loss``. With
            neither, the backward begins at all outputs.
        samples: of the inputs.
        sums: bytes of a number of the sums to which gradients are added; by default those of the
            parameter.

    Raises:
        InputError: the model does not run without data.
    """
    counting = _Counting(model, samples, sums)
    try:
        with counting.watching(), announced(True):  # or libraries look at the values of masks
            output = model(*args, **kwargs)
            ends = output if loss is None else loss(output)
            ends = getattr(ends, "loss", None) if hasattr(ends, "loss") else ends
            leaves = [x for x in pytree.tree_leaves(ends) if isinstance(x, Tensor)]
            counting.backward([x for x in leaves if x.requires_grad])
    except Exception as error:
        where = f" at {line}" if (line := source.of_exception(error)) else ""
        raise InputError(
            f"{type(model).__name__} does not run on the meta device{where} ({told(error)}); a "
            "plan needs a model whose code reads no values, with all tensors of its forward on the "
            "device of its inputs"
        ) from error
    return counting.found


class _Counting(TorchDispatchMode):
    """Notes each operation with its submodule."""

    def __init__(self, model: nn.Module, samples: int, sums: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self._sums = model, sums
        self.found = Counted(samples)
        kinds = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
        modules = dict(model.named_modules())
        self.found.containers = frozenset(n for n, m in modules.items() if isinstance(m, kinds))
        self._alive: dict[int, Any] = {}  # so that no two storages have the same number
        self._parameters: dict[int, str] = {}
        for name, parameter in model.named_parameters():
            sizes = parameter.numel(), parameter.element_size(), parameter.requires_grad
            self.found.parameters[name] = sizes
            self._parameters[self._number(parameter)] = name
        self._state = {self._number(x) for x in model.buffers()} | self._parameters.keys()
        self._made: set[int] = set()
        self._saved: set[int] = set()
        self._stack: list[str] = []
        self._back = False
        # of forwards: autograd's number of the next operation, the submodule, whether it reads a
        # parameter
        self._numbers: list[int] = []
        self._paths: list[str] = []
        self._trains: list[bool] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, operations are counted."""
        hooks = []

        def enter(name: str) -> Callable[..., None]:
            def entered(module: nn.Module, args: Any, kwargs: Any) -> None:
                self._stack.append(name)
                self.found.inputs[name] = self.found.inputs.get(name, 0) + _bytes((args, kwargs))

            return entered

        def leave(name: str) -> Callable[..., None]:
            def left(module: nn.Module, args: Any, out: Any) -> None:
                self._stack.pop()
                self.found.outputs[name] = self.found.outputs.get(name, 0) + _bytes(out)

            return left

        for name, module in self.model.named_modules():
            if name:
                hooks.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
                hooks.append(module.register_forward_hook(leave(name)))
        saving = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)
        try:
            with torch.enable_grad(), saving, _AsOnAccelerators(), self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def backward(self, ends: Sequence[Tensor]) -> None:
        """Run the backward from these tensors."""
        if not ends:
            return
        self._back = True
        torch.autograd.backward(ends, [torch.empty_like(x) for x in ends])
        for name, (elements, itemsize, trained) in self.found.parameters.items():
            if trained:  # it is added to a sum of gradients
                moved = itemsize + 2 * (self._sums or itemsize)
                add = Operation("add", 0.0, float(moved * elements), None, itemsize)
                self.found.ran.append(Ran(name.rpartition(".")[0], "W", add))
        for parameter in self.model.parameters():
            parameter.grad = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = operation(func, args, kwargs or {}, out)
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        numbers = {self._number(x) for x in given}
        if uncounted(func):
            self.found.uncounted |= {str(func)}
        if not self._back:
            self._forward(numbers, made, out)
        elif made is not None:
            self._backward(func, numbers, made, args)
        return out

    def _forward(self, read: set[int], made: Operation | None, out: Any) -> None:
        path = self._stack[-1] if self._stack else ""
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._paths.append(path)
        self._trains.append(bool(read & self._parameters.keys()))
        self.found.read |= {(path, number) for number in read - self._state}
        if made is None:
            return
        self.found.ran.append(Ran(path, "F", made))
        for x in pytree.tree_leaves(out):
            if isinstance(x, Tensor) and (number := self._number(x)) not in read | self._made:
                self._made.add(number)
                self.found.made.append(KeptStorage(path, number, x.untyped_storage().nbytes()))

    def _backward(self, func: Any, read: set[int], made: Operation, args: Any) -> None:
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        at = min(bisect_right(self._numbers, number), len(self._numbers) - 1)
        path, trains = (self._paths[at], self._trains[at]) if self._paths else ("", False)
        if made.name == "convolution_backward":
            wants: Any = args[-1]
            each = made._replace(flops=made.flops / max(1, wants[0] + wants[1]))
            if wants[0]:
                self.found.ran.append(Ran(path, "I", each))
            if wants[1]:
                _, rows, columns, length = each.shape or (1, 1, 1, 1)
                turned = each._replace(shape=(1, length, columns, rows))
                self.found.ran.append(Ran(path, "W", turned))
            return
        # autograd adds gradients within whichever node comes next
        of_weight = trains and not read & self._parameters.keys() and made.name != "add"
        of_weight = of_weight and "norm" not in made.name
        self.found.ran.append(Ran(path, "W" if of_weight else "I", made))

    def _pack(self, x: Tensor) -> Tensor:
        number = self._number(x)
        path = self._stack[-1] if self._stack else ""
        if number not in self._state and number not in self._saved:
            self._saved.add(number)
            self.found.saved.append(KeptStorage(path, number, x.untyped_storage().nbytes()))
        return x

    def _number(self, x: Tensor) -> int:
        storage = x.untyped_storage()
        number: int = storage._cdata
        self._alive.setdefault(number, storage)
        return number


class _AsOnAccelerators(TorchFunctionMode):
    """Runs dropout, attention and RMS norms as the one operation that each is on accelerators."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (functional.dropout, torch.dropout):
            return self._dropout(*args, **kwargs)
        if func in (functional.rms_norm, torch.rms_norm):
            return self._rms_norm(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return self._attention(func, *args, **kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _dropout(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **_: Any
    ) -> Tensor:
        if not training or p == 0:
            return input
        dropped: Tensor = torch.native_dropout(input, p, True)[0]
        return dropped

    @staticmethod
    def _rms_norm(
        input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        # a layer norm moves the same bytes, and the operation itself falls apart without a device
        return functional.layer_norm(input, normalized_shape, weight, None, eps or 1e-6)

    @staticmethod
    def _attention(
        func: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any
    ) -> Any:
        words = dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kw
        if words.get("attn_mask") is not None or query.dim() != 4:
            return func(query, key, value, *args, **kw)
        if words.get("enable_gqa") and key.shape[1] != query.shape[1]:
            times = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(times, 1) for x in (key, value))
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        dropout, causal = words.get("dropout_p", 0.0), words.get("is_causal", False)
        return flash(query, key, value, dropout, causal, scale=words.get("scale"))[0]


def _bytes(tree: Any) -> int:
    """The bytes of tensors that have gradients."""
    tensors = (x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor))
    return sum(size_in_bytes(x) for x in tensors if x.requires_grad)

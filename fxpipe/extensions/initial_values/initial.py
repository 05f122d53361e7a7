"""Initial values of parameters and buffers, the same as if one process built the whole model.

Each process draws the random numbers of all modules, one after another, so that the tensors that it
keeps get the same values everywhere. All tensors that it does not keep share one scratch memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.errors import InputError, told
from fxpipe.locks import locked
from fxpipe.pipeline import Pipeline
from fxpipe.torchtools.meta import allocated, standing_in
from fxpipe.torchtools.pytrees import memory

Initialise = Callable[[nn.Module], object]
"""Gives one module's own parameters and buffers their values."""


@locked
def reset_parameters(pipe: Pipeline, function: Initialise | None = None) -> None:
    """Give parameters and buffers their initial values, the same as one process would draw.

    A model that was built on the meta device gets its memory here: a rank allocates the tensors of
    its own stages. It also draws the numbers of all other tensors, one at a time, starting from the
    state of torch's generator on rank 0, so that the values are the same to the bit for any number
    of ranks.

    They equal those of the same model built on the CPU after the same ``torch.manual_seed`` if
    every constructor makes the module's tensors, then its submodules in the order in which it
    registers them, and calls ``reset_parameters`` last, as PyTorch's own layers do. Anything
    else that a constructor does is not repeated: ``nn.TransformerEncoder`` copies its first
    layer, and here each layer draws. A tied weight keeps the values of its first module.

    Args:
        function: called with each module, after the modules inside of it, as by ``model.apply``.
            By default each module's ``reset_parameters`` is called, if it has one.

    Raises:
        InputError: nothing is compiled yet, so that the stages are not known; a function fails; or
            a tensor without data gets no values, and then still has no data.
    """
    with pipe._group.calling("reset_parameters"):
        pipe._engine.flush()
        used = pipe._used().values()
        torch.set_rng_state(pipe._group.share("generator", torch.get_rng_state))
        with pipe._engine.progress.true_weights():
            initialise(pipe._model, used, function)


def initialise(model: nn.Module, own: Iterable[Tensor], function: Initialise | None) -> None:
    """Give a model's parameters and buffers their initial values, as ``reset_parameters`` does;
    ``own`` are those that this process keeps, which get memory if they have none."""
    with allocated(own) as kept, standing_in(model, lambda x: True) as others, torch.no_grad():
        writes = _Writes({memory(tensor) for tensor in kept}, others)
        drawn: set[Tensor] = set()
        for name, module in _inside_out(model, every=function is not None):
            reset = _reset_of(module) if function is None else partial(function, module)
            if reset is None:
                continue
            try:
                with writes, nullcontext() if function else _tied_kept(module, drawn):
                    reset()
            except Exception as error:
                raise InputError(
                    f"the initial values of {name or 'the model'} cannot be drawn "
                    f"({told(error).splitlines()[0]}); mend that function, or give another one: "
                    "reset_parameters(function)"
                ) from error
        _check(model, writes.unwritten)


def _inside_out(model: nn.Module, every: bool) -> Iterator[tuple[str, nn.Module]]:
    """The modules with their names, each after those inside of it: once, in the order in which
    their constructors end, or with ``every`` once for each parent, as in ``model.apply``."""
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if every or module not in seen:
            seen.add(module)
            for child, inner in module.named_children():
                yield from visit(f"{name}.{child}" if name else child, inner)
            yield name, module

    return visit("", model)


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    """The method that gives a module its initial values; some of PyTorch's have a private one."""
    methods = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return next(filter(callable, methods), None)


@contextmanager
def _tied_kept(module: nn.Module, drawn: set[Tensor]) -> Iterator[None]:
    """In the block, replace those of a module's parameters that earlier modules have drawn. So each
    module draws its random numbers, but a tied weight keeps the values of its first module."""
    named = [(name, p) for name, p in module._parameters.items() if p is not None]
    tied = [(name, parameter) for name, parameter in named if parameter in drawn]
    for name, parameter in tied:
        setattr(module, name, nn.Parameter(torch.empty_like(parameter), parameter.requires_grad))
    try:
        yield
    finally:
        for name, parameter in tied:
            setattr(module, name, parameter)
        drawn.update(parameter for _, parameter in named)


class _Writes(TorchDispatchMode):
    """Watches the operations in its block, and refuses to compute a kept tensor from one that is
    not kept here, as that has no meaningful values.

    Attributes:
        unwritten: the storages that are kept here and were not written yet.
    """

    def __init__(self, kept: set[int], others: Iterable[Tensor]) -> None:
        """Watch writes to the storages ``kept`` here. ``others`` stand in for all other tensors."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.unwritten = {*kept}
        self._kept = kept
        self._others: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._note(others)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        pairs = zip(func._schema.arguments, args, strict=False)
        written = [x for argument, x in pairs if argument.is_write and isinstance(x, Tensor)]
        reads = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        elsewhere = any(memory(tensor) in self._others for tensor in reads)
        if elsewhere and any(memory(tensor) in self._kept for tensor in written):
            raise InputError(
                "it computes values from those of a tensor that another rank keeps; let every "
                "module compute its values without those of other modules"
            )
        result = func(*args, **(kwargs or {}))
        self.unwritten.difference_update(map(memory, written))
        if elsewhere:
            results = pytree.tree_leaves(result)
            self._note([*written, *(x for x in results if isinstance(x, Tensor))])
        return result

    def _note(self, tensors: Iterable[Tensor]) -> None:
        """Note, while these tensors live, that their values are not those of the whole model."""
        for tensor in tensors:
            key, storage = memory(tensor), tensor.untyped_storage()
            self._others[key] = weakref.ref(storage, partial(self._forget, key))

    def _forget(self, key: int, reference: Any) -> None:
        if self._others.get(key) is reference:
            del self._others[key]


def _check(model: nn.Module, unwritten: Collection[int]) -> None:
    """Raises InputError if a parameter or buffer got no values."""
    for name, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or memory(tensor) not in unwritten:
                continue
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise InputError(
                f"{kind} {key!r} of {name or 'the model'} gets no value from "
                f"{type(module).__name__}.reset_parameters; write such a method, or give a "
                "function that initialises one module: reset_parameters(function); or load the "
                'values, or make the tensor with data (device="cpu") where the model is built'
            )

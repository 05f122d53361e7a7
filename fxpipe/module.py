"""``CompiledModule``: how a pipe stands for its model among modules."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from inspect import getattr_static
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxpipe.calls import Calls
from fxpipe.compiler.lacking import naming_lacks
from fxpipe.compiler.options import Options
from fxpipe.compiler.residence import homes
from fxpipe.engine import Engine
from fxpipe.errors import InputError
from fxpipe.extend import View
from fxpipe.locks import locked
from fxpipe.parts import Parts
from fxpipe.torchtools.meta import load_part
from fxpipe.torchtools.part import state_in_part


class CompiledModule(nn.Module):
    """Has the model's dictionaries of parameters, buffers and submodules, its other attributes, and
    its state dict. It cannot be moved or copied."""

    def __init__(self, options: Options, engine: Engine) -> None:
        super().__init__()
        model = options.model
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._modules = model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self._options, self._group = options, options.group
        self._engine, self._lock = engine, engine._lock
        self._calls = Calls(options.microbatches or 4 * len(options.torch_devices))

    @locked
    def state_dict(self, *args: Any, full: bool = False, **kwargs: Any) -> Any:
        """The model's state dict. Flushes first, so that it has the newest weights.

        Over several ranks, each rank has the newest weights of its own stages only. It returns the
        entries of its stages; the rank of stage 0 also returns those that belong to no stage.

        Args:
            *args: as for the model's ``state_dict``.
            **kwargs: the same.
            full: return all entries on every rank, as new tensors. Every rank has to call it then.
        """
        self._engine.flush()
        with self._engine.progress.true_weights(), state_in_part():
            state = self._model.state_dict(*args, **kwargs)
        if (own := self._owned()) is None:
            return state
        group, prefix = self._group, kwargs.get("prefix", "")
        part = own.part(self._model, state, prefix)
        changed = group.joined if full else group.shown
        with group.calling("state_dict") if full else nullcontext():
            for name, value in part.items():
                if isinstance(value, torch.Tensor):
                    part[name] = changed(name.removeprefix(prefix), value)
            if not full:
                return part
            gives = not group.column and (own.shared or not group.replica)
            parts = group.collect("state", part if gives else {})
        return own.joined(state, parts)

    @locked
    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict as the model's own method does. Flushes first; the next batch reads the
        loaded values.

        A rank loads the entries of its own stages and ignores all others, which may be missing. If
        the model was built on the meta device, loaded tensors get their memory here.
        """
        self._engine.flush()
        if self._group.size > 1:
            named = state_dict.items()
            tensor, group = torch.Tensor, self._group
            state_dict = {n: group.parted(n, x) if isinstance(x, tensor) else x for n, x in named}
        true = self._engine.progress.true_weights()
        if self._group.size == 1 and not self._options.hollow:
            with true:
                return self._model.load_state_dict(state_dict, *args, **kwargs)
        used, homes = self._used(), self._homes()
        with true, naming_lacks(self._options):
            return load_part(self._model, used, homes, state_dict, *args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Flush and load; ``load_state_dict`` of a module that holds the pipe calls this."""
        self._engine.flush()
        self._model._load_from_state_dict(*args, **kwargs)

    # the model's attributes

    @property
    def _model(self) -> nn.Module:
        return self._options.model

    @property
    def training(self) -> bool:
        """The model's mode; frameworks also set it by this attribute."""
        return self._model.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_options" in vars(self):  # else nn.Module.__init__ sets it
            self._model.training = mode

    if not TYPE_CHECKING:  # type checkers know all methods of a pipe, and tell a misspelt one

        def __getattr__(self, name: str) -> Any:
            if isinstance(view := getattr_static(type(self), name, None), View):
                return view.__get__(self, type(self))  # its error again, which names the extension
            try:
                return super().__getattr__(name)
            except AttributeError:
                options = vars(self).get("_options")
                if options is None or name.startswith("__") or not hasattr(options.model, name):
                    raise
            apart = self._group.size > 1 or len({*options.places}) > 1
            over_stages = Parts.over_stages.get() if apart else None
            if over_stages is not None and (own := over_stages(self, name)) is not None:
                return own
            return self._group.attribute(options.model, getattr(options.model, name))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Refuse ``to``, ``cuda``, ``half`` and the like, unless they change nothing."""
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            with suppress(Exception):  # such as .cuda() without CUDA
                if tensor.is_meta or fn(tensor) is tensor:
                    continue
            raise InputError(
                f"a compiled model cannot be moved or cast, as {name!r} ({tensor.dtype} on "
                f"{tensor.device}) would be: its graphs hold devices and types; close() the pipe, "
                "change the model, and compile it again, or keep a framework from placing it"
            )
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(
            "a pipe cannot be copied or pickled: it has threads and traced graphs; save its "
            "state_dict() and compile a new one, or copy.deepcopy(pipe), which copies the model"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Flush, and copy the model, as for ``torch.optim.swa_utils.AveragedModel``."""
        self._engine.flush()
        with self._engine.progress.true_weights():
            return copy.deepcopy(self._model, memo)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute that only the model has (a flag that its code reads) in the model."""
        options = vars(self).get("_options")
        in_pipe = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        if options is None or in_pipe or not hasattr(options.model, name):
            super().__setattr__(name, value)
        else:
            setattr(options.model, name, value)

    def _owned(self) -> Any:
        """The tensors that this rank owns or uses, by an extension; None for all."""
        return self._group.owned(self._model, self._calls.shown, self._options)

    def _homes(self) -> dict[torch.Tensor, torch.device]:
        """The tensors that have a device with memory of its own."""
        return homes(self._options, self._calls.shown)

    def _used(self) -> dict[int, torch.Tensor]:
        """Id → parameter or buffer, for those whose values this process needs."""
        if (own := self._owned()) is not None:
            needed: dict[int, torch.Tensor] = own.needed(self._model)
            return needed
        return {id(x): x for x in (*self._model.parameters(), *self._model.buffers())}

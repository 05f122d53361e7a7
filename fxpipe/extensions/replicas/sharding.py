"""Sharded optimizers: each replica trains a part of every parameter. Stage 1 of ZeRO (arXiv
1910.02054).

A parameter is flattened and cut into as many parts as there are replicas, just as its gradient is
cut to be summed. Parts differ by one element at most, so each doubling of the replicas halves an
optimizer's state; whole parameters could not be dealt out as evenly. An elementwise optimizer gives
the same bits on a part as on the whole. Any other is refused, after a trial step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxpipe.errors import InputError, told
from fxpipe.ir.value import part_of
from fxpipe.runtime.weights.live import copied, fill
from fxpipe.runtime.weights.optimizer_state import OptimizerState, Parts, frozen
from fxpipe.runtime.weights.shards import Shards
from fxpipe.runtime.weights.stage_weights import StageWeights, memory_like, retire
from fxpipe.torchtools.meta import become
from fxpipe.torchtools.optimizers import alone


class FlatShards(Shards):
    """One replica's parts of the parameters of a stage, as flat arrays."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Any],
        replica: int,
        replicas: int,
    ) -> None:
        self._replica, self._replicas = replica, replicas
        self.of = {p: nn.Parameter(self._cut(p.data), p.requires_grad) for p in parameters}
        for group in optimizer.param_groups:
            group["params"] = [self.of[p] for p in group["params"]]
        for parameter, part in self.of.items():  # some optimizers make state in their constructor
            if parameter in optimizer.state:
                optimizer.state[part] = self._state(parameter, optimizer.state.pop(parameter))

    @staticmethod
    def check(optimizer: Optimizer) -> None:
        """See Shards.check: after a trial step."""
        refuse_others(optimizer)

    def versions(
        self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer, delay: int
    ) -> StageWeights:
        return ShardedStage(parameters, optimizer, delay, self)

    def follow(self) -> None:
        for parameter, part in self.of.items():
            if part.is_meta != parameter.is_meta:
                become(part, self._cut(parameter.data))
            part.data = self._cut(parameter.data)
            part.requires_grad_(parameter.requires_grad)

    def hold(self) -> None:
        """Copy the trained parts to memory of their own, so that updates leave the parameters."""
        for part in self.of.values():
            if part.requires_grad:
                part.data = part.data.clone()

    def parts_of(self, parameters: Sequence[Tensor]) -> list[nn.Parameter]:
        return [self.of[p] for p in parameters]  # type: ignore[index]

    def trained(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(parameters, self.parts_of(parameters), strict=True)
        return [part.data for parameter, part in pairs if parameter.requires_grad]

    def named(self, names: Mapping[nn.Parameter, str]) -> dict[nn.Parameter, str]:
        return {part: names[p] for p, part in self.of.items() if p in names}

    def cut_out(self, saved: OptimizerState, names: Mapping[nn.Parameter, str]) -> OptimizerState:
        return self._mapped(saved, names, self._state)

    def told(self, state: OptimizerState, names: Mapping[nn.Parameter, str]) -> OptimizerState:
        def placed(parameter: nn.Parameter, kept: Mapping[Any, Any]) -> dict[Any, Any]:
            shape, start = tuple(parameter.shape), self._span(parameter).start
            return {
                key: Parts(shape, {start: value} if value.numel() else {})
                if _is_like(value, self.of[parameter], key)
                else value
                for key, value in kept.items()
            }

        return self._mapped(state, names, placed)

    def _mapped(
        self,
        state: OptimizerState,
        names: Mapping[nn.Parameter, str],
        change: Callable[[nn.Parameter, Mapping[Any, Any]], dict[Any, Any]],
    ) -> OptimizerState:
        """Change the states of those parameters that have a part here."""
        parameters = dict(state.parameters)
        for parameter in self.of:
            if (kept := parameters.get(names[parameter])) is not None:
                parameters[names[parameter]] = replace(kept, state=change(parameter, kept.state))
        return OptimizerState(state.groups, parameters)

    def _span(self, parameter: Tensor) -> range:
        return part_of(parameter.numel(), self._replica, self._replicas)

    def _cut(self, tensor: Tensor) -> Tensor:
        span = self._span(tensor)
        return tensor.reshape(-1)[span.start : span.stop]

    def _state(self, parameter: Tensor, state: Mapping[Any, Any]) -> dict[Any, Any]:
        return {
            key: self._cut(value).clone() if _is_like(value, parameter, key) else value
            for key, value in state.items()
        }


def _is_like(value: Any, parameter: Tensor, key: Any) -> bool:
    """Whether a value in a parameter's state is a tensor with one element for each of its own."""
    counts = key in ("step", "eta", "mu", "mu_product")  # a scalar parameter has their shape, too
    return isinstance(value, Tensor) and value.shape == parameter.shape and not counts


class ShardedStage(StageWeights):
    """The versions of a stage whose optimizer is sharded.

    A version is there once the parts of all replicas are gathered; this replica's part may be
    ahead, and has memory of its own.
    """

    in_parts = True

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        delay: int,
        shards: FlatShards,
    ) -> None:
        self._shards = shards
        super().__init__(parameters, optimizer, delay)

    def restart(self, version: int) -> None:
        super().restart(version)
        self._shards.follow()
        self._shards.hold()

    def update(
        self,
        gradients: Mapping[str, Tensor | None],
        groups: Sequence[dict[str, Any]],
    ) -> list[dict[str, Any]]:
        """Make this replica's part of the next version; the gradients are parts, too."""
        self.refuse_changed()
        parts = {name: self._shards.of[p] for name, p in self.parameters.items()}
        memory = {n: p.data.clone() if p.requires_grad else p.data for n, p in parts.items()}
        return self._step(parts, memory, gradients, groups)

    def parts(self) -> list[Tensor]:
        return self._shards.trained(list(self.parameters.values()))

    def gather(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Join the next version from its parts, replica → what ``parts`` returned there."""
        self.refuse_changed()
        spare = retire(self.live, self.newest + 1 - self.delay)
        tensors = memory_like(self.live[self.newest], spare)
        pieces = zip(*parts, strict=True)
        with torch.no_grad():
            for tensor in tensors.values():
                if tensor.requires_grad:
                    fill(tensor.detach(), next(pieces))
        self._show(tensors)
        self._append(tensors)


def _trial(
    optimizer: Optimizer,
    index: int,
    states: Mapping[nn.Parameter, Mapping[Any, Any]],
) -> Any:
    """A copy of an optimizer over other parameters, all in one group.

    Args:
        optimizer: the optimizer.
        index: the index of the group.
        states: parameter → its optimizer state, which may be empty.
    """
    groups = [{**frozen(group), "params": []} for group in optimizer.param_groups]
    groups[index]["params"] = [*states]
    tried = alone(optimizer, groups)
    tried.state.update({parameter: state for parameter, state in states.items() if state})
    return tried


def refuse_others(optimizer: Optimizer) -> None:
    """Check that an optimizer computes the same on the parts of a parameter as on the whole.

    Copies of the optimizer make two steps over a random parameter and over two parts of the same.
    It is small, or like a parameter that the optimizer already has state for.

    Raises:
        InputError: the results differ.
    """
    kind = type(optimizer).__name__
    cure = (
        "leave shard_optimizer out, or give an optimizer that treats each element of dense "
        "parameters by itself, such as torch.optim.AdamW"
    )
    if any(p.layout is not torch.strided for g in optimizer.param_groups for p in g["params"]):
        raise InputError(f"a parameter of {kind} is sparse, and cannot be cut into parts; {cure}")
    for index, group in enumerate(optimizer.param_groups):
        like = max(group["params"], key=lambda p: (p.ndim, -p.numel()), default=None)
        state = {} if like is None else optimizer.state.get(like, {})
        if like is None or (like.is_meta and state):
            continue
        shape, dtype = (like.shape, like.dtype) if state else ((5, 6)[-like.ndim :], torch.float64)
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
        try:
            with torch.random.fork_rng([]):
                whole = _stepped(optimizer, index, like, tensors, lambda tensor: [tensor])
                parts = _stepped(optimizer, index, like, tensors, _in_two)
        except Exception as error:
            raise InputError(
                f"{kind} cannot train parts of parameters ({told(error).splitlines()[0]}); {cure}"
            ) from error
        close = 1e-9 if dtype is torch.float64 else 100 * torch.finfo(dtype).eps
        if not torch.allclose(whole, parts, rtol=close, atol=close):
            raise InputError(
                f"{kind} computes something else on parts of a parameter than on the whole; {cure}"
            )


def _in_two(tensor: Tensor) -> Sequence[Tensor]:
    flat, third = tensor.reshape(-1), tensor.numel() // 3
    return [flat[:third], flat[third:]]


def _stepped(
    optimizer: Optimizer,
    index: int,
    like: Tensor,
    tensors: Sequence[Tensor],
    cut: Callable[[Tensor], Sequence[Tensor]],
) -> Tensor:
    """Step a copy of the optimizer over the parts of a parameter, and return their new values.

    Args:
        optimizer: the optimizer.
        index: the index of the parameter's group.
        like: a parameter of that group, whose optimizer state is copied.
        tensors: the parameter's value, and a gradient for each step.
        cut: cuts a tensor into parts.
    """
    start, *gradients = tensors
    parameters = [nn.Parameter(part.clone()) for part in cut(start)]
    state = optimizer.state.get(like, {})
    states = {
        parameter: copied({k: cut(v)[i] if _is_like(v, like, k) else v for k, v in state.items()})
        for i, parameter in enumerate(parameters)
    }
    stepped = _trial(optimizer, index, states)
    for gradient in gradients:
        for parameter, part in zip(parameters, cut(gradient), strict=True):
            parameter.grad = part.clone()
        type(optimizer).step(stepped)
    return torch.cat([parameter.detach().view(-1) for parameter in parameters])

"""A model's DTensors as what this rank has of them, and back.

before:  model.up.weight = DTensor of (64, 16), Shard(0) over "tp"
after:   model.up.weight = Parameter of (32, 16)

While the model itself is called, its parameters are DTensors of these again, through which autograd
reaches them. So its operations on them are traced below DTensor: those on the rank's own parts, and
collectives. Everything else sees ordinary parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._pytree import tree_map_only

from fxpipe.errors import InputError
from fxpipe.extensions.tensor_parallel.collectives import rerouted


class Spec(NamedTuple):
    """How a parameter is divided.

    Attributes:
        mesh: the mesh.
        placements: for each of its dimensions where the parts are.
        shape, stride: of the whole.
        local: the shape of this rank's part.
    """

    mesh: DeviceMesh
    placements: Sequence[Any]
    shape: torch.Size
    stride: tuple[int, ...]
    local: torch.Size

    def whole(self, part: Tensor) -> DTensor:
        """The DTensor of which a tensor is this rank's part."""
        dtensor: DTensor = DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return dtensor

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        for dim, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                parts = whole.chunk(self.mesh.size(dim), placement.dim)
                whole = parts[self.mesh.get_local_rank(dim)]
        return whole

    @property
    def sharded(self) -> tuple[str, ...]:
        """The names of the dimensions over which it is sharded."""
        names = self.mesh.mesh_dim_names or ()
        return tuple(
            name for name, x in zip(names, self.placements, strict=True) if isinstance(x, Shard)
        )


_Places = list[tuple[dict[str, Any], str]]
"""The dicts of modules that hold a parameter, and its key there."""


class Divided:
    """The divided parameters of a model.

    Attributes:
        specs: name → how it is divided, by all of its names.
    """

    def __init__(self, model: nn.Module, dims: Sequence[str], whole: str) -> None:
        """Replace the DTensors of a model.

        Args:
            model: the model.
            dims: the dimensions of the pipe's mesh over which parameters may be divided.
            whole: what a message says of the pipe's mesh.

        Raises:
            InputError: a DTensor is divided over others, is no parameter, or has parts of several
                sizes.
        """
        self._model = model
        self.specs: dict[str, Spec] = {}
        self._places: list[tuple[nn.Parameter, Spec, _Places]] = []
        found: dict[int, tuple[Any, Spec, _Places]] = {}
        for name, _ in _dtensors(model.named_buffers(remove_duplicate=False)):
            raise InputError(
                f"the buffer {name!r} of the model is a DTensor, and stages keep whole buffers; "
                "give it as an ordinary tensor, the same on all ranks"
            )
        for name, parameter in _dtensors(model.named_parameters(remove_duplicate=False)):
            if id(parameter) not in found:
                found[id(parameter)] = parameter, _spec(name, parameter, dims, whole), []
            self.specs[name] = found[id(parameter)][1]
            module = model.get_submodule(name.rpartition(".")[0])
            held: Any = module._parameters
            found[id(parameter)][2].append((held, name.rpartition(".")[2]))
        for parameter, spec, places in found.values():
            part = nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)
            if parameter.grad is not None:
                part.grad = parameter.grad.to_local()
            self._places.append((part, spec, places))
            for held, key in places:
                held[key] = part
        del found  # so that only the parts are left
        # who holds what in place of which, while the model is called
        self._inside: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._hooks = [
            model.register_forward_pre_hook(self._enter, prepend=True),
            model.register_forward_hook(self._leave, always_call=True),
            model.register_forward_hook(_given_back),
        ]

    def groups(self) -> dict[str, str]:
        """The name of a process group of torch.distributed → that of its dimension."""
        found = {}
        for spec in self.specs.values():
            for name in spec.mesh.mesh_dim_names or ():
                found[str(spec.mesh.get_group(name).group_name)] = name
        return found

    def over_own_groups(self) -> AbstractContextManager[None]:
        """See ``rerouted``."""
        return rerouted(self.groups())

    def joined(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of a parameter, or of what belongs to one, as all ranks call this in the same
        order; what is not divided as it is."""
        spec = self.specs.get(name)
        if spec is None or tensor.shape != spec.local or not spec.sharded:
            return tensor
        whole: Tensor = spec.whole(tensor.detach()).full_tensor()
        return whole

    def parted(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of what ``joined`` returns, or of a DTensor."""
        spec = self.specs.get(name)
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local() if spec and _like(tensor, spec) else tensor.full_tensor()
        if spec is None or tensor.shape != spec.shape or not spec.sharded:
            return tensor
        return spec.part(tensor).contiguous()

    def shown(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter's value as the DTensor that it is a part of."""
        spec = self.specs.get(name)
        return tensor if spec is None or tensor.shape != spec.local else spec.whole(tensor)

    def restore(self) -> None:
        """Give the model its DTensors again, as new parameters that share the parts' memory."""
        for hook in self._hooks:
            hook.remove()
        for part, spec, places in self._places:
            for held, key in places:
                if held.get(key) is part:
                    held[key] = nn.Parameter(spec.whole(part.detach()), part.requires_grad)
        self._places.clear()

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._leave()
        for _, spec, places in self._places:
            held, key = places[0]
            local = held[key]
            whole = spec.whole(local)
            for held, key in places:
                self._inside.append((held, key, whole, held[key]))
                held[key] = whole

    def _leave(self, *_: Any) -> None:
        """Also before the next call: while it is traced, a model that fails calls no hook, and what
        stood in for its parameters meanwhile is no more."""
        while self._inside:
            held, key, whole, local = self._inside.pop()
            if held.get(key) is whole:
                held[key] = local


def _given_back(module: nn.Module, _: Any, output: Any) -> Any:
    """What a model returns, with ordinary tensors for replicated DTensors.

    Raises:
        InputError: it returns a DTensor of which each rank has a part.
    """

    def plain(tensor: DTensor) -> Tensor:
        if all(isinstance(placement, Replicate) for placement in tensor.placements):
            return tensor.to_local()
        raise InputError(
            f"the model returns a DTensor that is {tensor.placements}, of which each rank has a "
            "part; let its last module return the whole (ColwiseParallel(output_layouts="
            "Replicate())), or compute the loss in the model, which may be in loss_parallel()"
        )

    return tree_map_only(DTensor, plain, output)


def _dtensors(named: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    return ((name, tensor) for name, tensor in named if isinstance(tensor, DTensor))


def _like(tensor: DTensor, spec: Spec) -> bool:
    """Whether a DTensor is divided as a parameter is."""
    return tuple(tensor.placements) == tuple(spec.placements) and tensor.device_mesh == spec.mesh


def _spec(name: str, parameter: DTensor, dims: Sequence[str], whole: str) -> Spec:
    mesh, placements = parameter.device_mesh, parameter.placements
    names = mesh.mesh_dim_names or ("one without a name",)
    for dim, placement in zip(names, placements, strict=False):
        if dim not in dims:
            raise InputError(
                f"parameter {name!r} is a DTensor over the dimension {dim!r}, and {whole}; divide "
                "the model over a dimension of its own of the same mesh: of "
                'init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")) parallelize_module '
                'gets mesh["tp"], and fxpipe.compile the mesh'
            )
        if type(placement) not in (Shard, Replicate):
            kind = "a sum" if isinstance(placement, Partial) else placement
            raise InputError(
                f"parameter {name!r} is {kind} over {dim!r}, and parameters are sharded or "
                "replicated; give it one of torch.distributed.tensor's Shard and Replicate"
            )
        if isinstance(placement, Shard):
            size, count = parameter.shape[placement.dim], mesh.size(names.index(dim))
            if size % count:
                raise InputError(
                    f"parameter {name!r} has {size} entries in dimension {placement.dim}, which "
                    f"{count} ranks of {dim!r} cannot share evenly, so that their graphs would "
                    f"differ; pad it to a multiple of {count}"
                )
    local = parameter.to_local().shape
    return Spec(mesh, placements, parameter.shape, parameter.stride(), local)

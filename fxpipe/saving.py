"""Save and load a pipe's state: state dicts, and checkpoints as files and as folders."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from fxpipe.compiler.compiled import Owned, owned
from fxpipe.errors import InputError
from fxpipe.extend import find
from fxpipe.inspection import Inspected
from fxpipe.locks import locked
from fxpipe.runtime.ranks.group import refuse_on_ranks
from fxpipe.runtime.weights import checkpoint_file
from fxpipe.runtime.weights.checkpoint import Checkpoint
from fxpipe.runtime.weights.initial import Initialise, initialise
from fxpipe.torchtools.meta import allocated


class Saved(Inspected):
    """The part of a pipe that saves and loads its state."""

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
        state = self._model.state_dict(*args, **kwargs)
        if self._group.size == 1:
            return state
        part = self._own_part(state, prefix=kwargs.get("prefix", ""))
        if not full:
            return part
        with self._group.calling("state_dict"):
            parts = self._group.exchange("state", {} if self._group.replica else part)
        whole = {name: value for part in parts for name, value in part.items()}
        return _like(state, {name: whole[name] for name in state})

    def _own_part(self, state: Mapping[str, Any], prefix: str = "") -> OrderedDict[str, Any]:
        """The entries of the model's state dict that this rank keeps."""
        owned, real = self._owned(), self._model.state_dict(keep_vars=True, prefix=prefix)
        part = {name: value for name, value in state.items() if owned.keeps(real.get(name))}
        return _like(state, part)

    def _owned(self) -> Owned:
        """The tensors that this rank owns or uses."""
        return owned(self._model, self._shown, self._options.owns)

    @locked
    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict as the model's own method does. Flushes first; the next batch reads the
        loaded values.

        A rank loads the entries of its own stages and ignores all others, which may be missing. If
        the model was built on the meta device, loaded tensors get their memory here.
        """
        self._engine.flush()
        if self._group.size == 1 and not self._options.hollow:
            return self._model.load_state_dict(state_dict, *args, **kwargs)
        used, kept = self._used(), self._model.state_dict(keep_vars=True)
        others = {
            name: value
            for name, value in kept.items()
            if isinstance(value, torch.Tensor) and id(value) not in used
        }
        loaded = [used[id(v)] for name, v in kept.items() if name in state_dict and id(v) in used]
        complete = _like(state_dict, {**state_dict, **others})
        with allocated(loaded):
            return self._model.load_state_dict(complete, *args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Flush and load; ``load_state_dict`` of a module that holds the pipe calls this."""
        self._engine.flush()
        self._model._load_from_state_dict(*args, **kwargs)

    @locked
    def reset_parameters(self, function: Initialise | None = None) -> None:
        """Give parameters and buffers their initial values, the same as one process would draw.

        A model that was built on the meta device gets its memory here: a rank allocates the tensors
        of its own stages. It also draws the numbers of all other tensors, one at a time, starting
        from the state of torch's generator on rank 0, so that the values are the same to the bit
        for any number of ranks.

        They equal those of the same model built on the CPU after the same ``torch.manual_seed`` if
        every constructor makes the module's tensors, then its submodules in the order in which it
        registers them, and calls ``reset_parameters`` last, as PyTorch's own layers do. Anything
        else that a constructor does is not repeated: ``nn.TransformerEncoder`` copies its first
        layer, and here each layer draws. A tied weight keeps the values of its first module.

        Args:
            function: called with each module, after the modules inside of it, as by
                ``model.apply``. By default each module's ``reset_parameters`` is called, if it has
                one.

        Raises:
            InputError: nothing is compiled yet, so that the stages are not known; a function
                fails; or a tensor without data gets no values, and then still has no data.
        """
        with self._group.calling("reset_parameters"):
            self._engine.flush()
            used = self._used().values()
            torch.set_rng_state(self._group.share("generator", torch.get_rng_state))
            initialise(self._model, used, function)

    @locked
    def checkpoint(self, path: str | os.PathLike[str], *, extra: Any = None) -> None:
        """Write to a file all that training needs to go on as if not interrupted. Flushes first.

        The file has the weights, in all versions that later batches read, the buffers, the
        optimizers' state, the states of torch's generators for the CPU and the pipe's devices, and
        the number of batches; without an optimizer also ``.grad``. Everything is stored under its
        name in the model, so training can go on with any partition. The file is in safetensors
        format, without code and with a checksum. It is replaced atomically, so other processes may
        read it at any time.

        Args:
            path: the path of the file.
            extra: anything else to keep, which ``restore`` returns, such as the state of a
                learning-rate scheduler or of ``random``, or an epoch: tensors, numbers, strings,
                and lists, tuples and dicts of them.

        Raises:
            CheckpointError: the file cannot be written, or cannot hold ``extra``; an older file
                stays as it is.
        """
        refuse_on_ranks(self._group, "checkpoint()", "write a folder with save()")
        self._engine.flush()
        progress = self._engine.progress
        checkpoint_file.write(progress.checkpoint(extra, changed=progress.changed), path)

    @locked
    def restore(self, path: str | os.PathLike[str]) -> Any:
        """Go on from a checkpoint, at any time, on any number of devices; also after a failure that
        has ended the pipe.

        Everything is checked before anything changes; each optimizer first makes a step on a copy
        of its restored state. If the optimizer function makes different optimizers for different
        stages, call ``prepare`` first. The constructor of a learning-rate scheduler changes its
        optimizer: make the scheduler over ``optimizer``, then restore, and load its state from
        ``extra``.

        Returns:
            The ``extra`` that ``checkpoint`` was given.

        Raises:
            CheckpointError: the file is no checkpoint, damaged, or of another model or optimizer.
                Nothing has changed.
        """
        with self._group.calling("restore"):
            self._engine.flush_unless_ended()
            return self._go_on_from(checkpoint_file.read(path))

    @locked
    def save(self, folder: str | os.PathLike[str], extra: Any = None) -> None:
        """Write to a folder all that training needs to go on as if not interrupted. Flushes first.

        The folder has the same contents as a file of ``checkpoint``, in the format of
        ``torch.distributed.checkpoint`` (DCP) with the model's own names, so that it can also be
        read without this library::

            torch.distributed.checkpoint.format_utils.dcp_to_torch_save(folder, "run.pt")
            model.load_state_dict(torch.load("run.pt")["model"])

        An older folder is replaced once the new one is complete and on disk. Over several ranks
        each rank of the first replica writes the part of its own stages, and every rank of all
        replicas has to call this.

        Args:
            folder: the path of the folder, which may hold an older checkpoint, and nothing else.
            extra: anything else to keep, which ``load`` returns, as for ``checkpoint``. Over
                several ranks rank 0's is kept.

        Raises:
            CheckpointError: the folder cannot be written, or cannot hold ``extra``; an older
                checkpoint stays as it is.
            RankError: another rank failed in this way, or is gone.
        """
        with self._group.calling("save"):
            write = find("option", "save", "pipe.save")
            self._engine.flush()
            progress = self._engine.progress
            changed = any(self._group.exchange("changes", progress.changed))
            saved = progress.checkpoint(extra, changed=changed).part(self._owned().kept)
            state = self._own_part(self._model.state_dict())
            write(saved, state, folder, self._group)

    @locked
    def load(self, folder: str | os.PathLike[str], *, must_exist: bool = True) -> Any:
        """Go on from a folder that ``save`` wrote, on any number of devices or ranks.

        As in ``restore``, everything is checked before anything changes. Over several ranks each
        rank reads the part of its own stages, which are known after a step, ``prepare``, or
        ``compile`` with an ``example``.

        Args:
            folder: the path of the folder.
            must_exist: whether a missing folder is an error; otherwise nothing is loaded then.

        Returns:
            The ``extra`` that ``save`` was given; None if nothing is loaded.

        Raises:
            CheckpointError: it is no such folder, or damaged, or of another model or optimizer.
                Nothing has changed, on any rank.
            InputError: the model was built on the meta device and nothing is compiled yet, so that
                a rank does not know its stages.
            RankError: another rank failed in this way, or is gone.
        """
        with self._group.calling("load"):
            exists, read = (find("option", name, "pipe.load") for name in ("saved", "load"))
            self._engine.flush_unless_ended()
            there = self._group.exchange("folder", exists(folder))
            if not must_exist and not any(there):
                return None
            if self._options.hollow:
                self._used()  # raises before anything is read
            own = None if self._group.size == 1 else self._owned().used
            return self._go_on_from(read(folder, own))

    def _go_on_from(self, saved: Checkpoint) -> Any:
        plan = self._shown.plan if self._shown else None
        with allocated(self._used().values() if self._options.hollow else ()):
            self._engine.progress.restore(saved, plan, lambda: self._group.exchange("checkpoint"))
        self._group.kept = 0
        return saved.extra

    def _used(self) -> dict[int, torch.Tensor]:
        """Id → parameter or buffer, for those whose values this process needs."""
        model = self._model
        tensors = {id(x): x for x in (*model.parameters(), *model.buffers())}
        if self._group.size == 1:
            return tensors
        if self._shown is None:
            raise InputError(
                "nothing is compiled yet, so that it is not known which stages this rank has; give "
                "compile(..., example=inputs), or call prepare(inputs) first"
            )
        owned = self._owned()
        return {key: tensor for key, tensor in tensors.items() if owned.names[key] in owned.used}


def _like(state: Mapping[str, Any], values: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """A state dict of these values with the module versions of another one, which tell modules
    whether to convert older values."""
    result = OrderedDict(values)
    if hasattr(state, "_metadata"):
        vars(result)["_metadata"] = state._metadata
    return result

"""The processes that run a pipe together, as one of them sees them.

A pipe in one process is a group of one. It agrees with itself and never waits: that is what the
methods here do. An extension has a group of several processes, where all make the same calls in the
same order, and an error in one of them is raised in all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fxpipe.errors import InputError

if TYPE_CHECKING:
    from fxpipe.compiler.compiled import Compiled, Kind
    from fxpipe.compiler.compiler import Compiler
    from fxpipe.compiler.options import Options
    from fxpipe.engine import Engine
    from fxpipe.extend import Extension
    from fxpipe.ir.plan import Plan
    from fxpipe.ir.program import Program
    from fxpipe.ir.schedule import Schedule
    from fxpipe.ir.traced import Traced
    from fxpipe.runtime.backend import Backend
    from fxpipe.runtime.batch import MicroBatches


class Group:
    """The ranks of a pipe: processes that run one device's list each, or one that runs all lists.

    Attributes:
        rank: the number of this process.
        size: how many there are.
        replicas: how many pipelines train the model side by side. All ranks of a replica come
            before those of the next.
        replica: the one that this process belongs to.
        device: the device of the replica that this process runs; the first one if it runs all.
        column: which part of its stages this process has, where further dimensions of the mesh
            divide them; those of the first come first.
        pipeline: device → its rank in this replica.
        twins: replica → its rank with the same device as this one.
        places: device → what tables call its ranks; empty for one process.
        threads: intra-op threads of a rank's device; 0 to divide those of the process.
        call: how many calls have begun, alike on all ranks.
        kept: how many runs have changed the model since the last checkpoint was loaded.
        called: whether all ranks are in the same call, so that all of them hear of a failure.
    """

    rank = replica = device = column = threads = call = kept = 0
    size = replicas = 1
    pipeline = twins = range(1)
    places: Sequence[str] = ()

    @property
    def called(self) -> bool:
        return True

    @property
    def checks(self) -> bool:
        """Whether this process compares plans with the model: the first rank, with those that have
        the other parts of its stages."""
        return True

    # calls

    def calling(self, what: str, *, exchanges: bool = False) -> AbstractContextManager[None]:
        """Inside, a call that every rank makes is run. ``exchanges`` says that the block exchanges
        something before it waits otherwise for other ranks."""
        return nullcontext()

    def when_failed(self, failed: Callable[[], str]) -> None:
        """Call a function on every rank after a failed call, and add its text to the error."""

    def announce(self, error: BaseException) -> None:
        """Tell all other ranks that this call has failed here."""

    def outcomes(self, value: Any) -> list[Any]:
        """After a failure, tell the other ranks how far this one has come; returns what each rank
        has told that was in the same run."""
        return [value]

    def exchange(self, about: str, value: Any = None, *, held: bool = False) -> list[Any]:
        """Send a value to all ranks, and wait for theirs: rank → value. ``about`` says what it is,
        and ``held`` whether signals are held meanwhile. The value is made of numbers, strings,
        tensors, and containers of them."""
        return [value]

    def collect(self, about: str, values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """``exchange`` for values of any class, by name."""
        return [values]

    def gather(self, about: str, make: Callable[[], Any]) -> list[Any]:
        """Rank → what ``make`` returns there: what came along with the call, see ``same_call``, or
        what is exchanged now."""
        return self.exchange(about, make())

    def share(self, about: str, make: Callable[[], Any]) -> Any:
        """Call ``make`` on rank 0, and return its result on all ranks."""
        return self.gather(about, lambda: make() if self.rank == 0 else None)[0]

    def settle(self, value: Any) -> list[Any]:
        """``exchange`` at the end of a call: when it returns, all ranks have done their work.
        Returns the values of the other ranks of this replica."""
        return []

    def check(self) -> None:
        """Raise if no call can be made, as a rank is gone."""

    def refuse(self, what: str, cure: str) -> None:
        """Raise InputError over several ranks, for a feature that needs one process."""

    def close(self) -> None:
        """Take leave of the other ranks."""

    # what is compiled and run

    def backend(self, options: Options) -> Backend | None:
        """What runs this rank's device; None if this process runs all devices."""
        return None

    def same_options(self, options: Options) -> None:
        """Raise RankError unless all ranks have the same options."""

    def compiling(self, parts: Sequence[object]) -> AbstractContextManager[None]:
        """Inside, these objects change as something is compiled, on all ranks or on none."""
        return nullcontext()

    def same_plans(
        self, options: Options, schedule: Schedule, traced: Traced, plans: Sequence[Plan]
    ) -> None:
        """Raise RankError unless all ranks have made the same plans of a graph, one for each size
        of micro-batches."""

    def same_program(
        self,
        lower: Callable[..., Program],
        known: Program | None,
        schedule: Schedule,
        plan: Plan,
    ) -> Program:
        """Make a program, unless it is known: ``lower(only=devices)`` has their lists alone, and
        ``lower()`` all. Raises RankError unless all ranks make the same one, or know it; returns
        what this rank needs of it."""
        return lower() if known is None else known

    def same_call(
        self,
        engine: Engine,
        compiler: Compiler,
        micro: MicroBatches,
        kind: Kind,
        known: Compiled | None,
        along: Mapping[str, Any],
        *,
        first: bool,
    ) -> bool:
        """Raise RankError unless all ranks make the same call, with the same batch in a replica;
        returns whether a rank has to compile it. ``first`` says that none was compiled before.
        What comes ``along`` on all ranks is there for ``gather`` until the call ends."""
        return known is None

    def divided(self, model: nn.Module) -> Sequence[Extension]:
        """Let a model's parameters be what this process has of them, where they are divided over
        ranks; returns the extensions for that. Raises InputError if they cannot be so."""
        for name, parameter in model.named_parameters():
            if hasattr(parameter, "placements"):
                raise InputError(
                    f"parameter {name!r} is a DTensor, and the pipe has no mesh over which it is "
                    "divided; give the mesh of which the model has a dimension, such as "
                    'init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))'
                )
        return ()

    def joined(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of a parameter, or of what belongs to it, of which this process has a part. All
        ranks call it for the same names."""
        return tensor

    def parted(self, name: str, tensor: Tensor) -> Tensor:
        """This process's part of what ``joined`` returns."""
        return tensor

    def shown(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter's value as users see it."""
        return tensor

    def same_weights(self, state: Mapping[str, Tensor]) -> None:
        """Raise RankError unless all replicas have the same values to train."""

    def release(self, options: Options, compiled: Compiled) -> None:
        """Give back the memory of what only other ranks need of the model."""

    def deal(self, names: Sequence[str], parameters: Sequence[Tensor]) -> list[int]:
        """Which replica has each of a stage's parameters where they are dealt out: always the same
        for a name."""
        return [0] * len(parameters)

    def away(self, options: Options, compiled: Compiled) -> frozenset[str]:
        """The names of the parameters of this process's stages that only another replica keeps."""
        return frozenset()

    def owned(self, model: nn.Module, compiled: Compiled | None, options: Options) -> Any:
        """What this process has of the model, by an extension; None for all of it."""
        return None

    def attribute(self, model: nn.Module, found: Any) -> Any:
        """An attribute of the model, as users may use it."""
        return found

    def timed(self, times: Sequence[Sequence[int]]) -> list[list[int]]:
        """Device → its times on whichever rank it runs, by the clock of the first rank."""
        return [[*each] for each in times]

"""The read-only side of a pipe: its plan and program, its measurements, and the stage table."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MethodType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fxpipe.compiler.compiled import Compiled
from fxpipe.compiler.compiler import Compiler
from fxpipe.compiler.options import Options
from fxpipe.compiler.predict import given_links, predict, predict_memory
from fxpipe.engine import Engine
from fxpipe.errors import InputError
from fxpipe.formatting import preformatted
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.traced import Traced
from fxpipe.locks import locked
from fxpipe.metrics import Meter
from fxpipe.rehearsal import Rehearsals
from fxpipe.removed import gone
from fxpipe.runtime.devices.backend import is_worker
from fxpipe.runtime.weights.optimizers import Optimizers
from fxpipe.simulator import Simulation
from fxpipe.simulator.costs import Costs, Links
from fxpipe.simulator.report import peak_texts
from fxpipe.stage_table import stage_table


class SignedLikeTheModel:
    """Decorates a pipe's ``forward`` with the signature of the model's ``forward``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, pipe: Inspected | None, owner: type[Inspected]) -> Any:
        if pipe is None:
            return self._function

        @functools.wraps(self._function)
        def forward(pipe: Inspected, *args: Any, **kwargs: Any) -> Any:
            return self._function(pipe, *args, **kwargs)

        models = inspect.signature(pipe._model.forward)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = models.replace(parameters=[first, *models.parameters.values()])
        vars(forward)["__signature__"] = signature
        return MethodType(forward, pipe)


class Inspected(nn.Module):
    """The part of a pipe that shows what it is and does.

    It shares its dictionaries of parameters, buffers and submodules with the model. It also has the
    model's other attributes, such as ``config``, unless the pipe has an attribute of that name;
    setting one sets it in the model. A pipe cannot be moved or copied, because compiled graphs
    refer to its tensors.
    """

    def __init__(self, options: Options, compiler: Compiler, engine: Engine) -> None:
        super().__init__()
        model = options.model
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._modules = model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.devices = options.torch_devices
        self._options = options
        self._group = options.group
        self._compiler = compiler
        self._engine, self._lock = engine, engine._lock
        self._shown: Compiled | None = None
        self._rehearsals = Rehearsals(options, compiler, engine)

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

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            options = vars(self).get("_options")
            if options is None or name.startswith("__") or not hasattr(options.model, name):
                if instead := gone(f"pipe.{name}"):
                    raise AttributeError(f"{error}{instead}") from None
                raise
        return getattr(options.model, name)

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
        return copy.deepcopy(self._model, memo)

    @property
    def traced(self) -> Traced:
        """The graph of the whole model and its loss in the last training step; before the first
        step, in the call that was compiled first. ``traced``, ``plan``, ``schedule`` and
        ``program`` raise InputError as long as nothing is compiled."""
        return self._compiled().traced

    @property
    def plan(self) -> Plan:
        """The stages and edges of the last training step. After a cut by names, the stages have
        costs from the first ``simulate`` on."""
        return self._compiled().plan

    @property
    def schedule(self) -> Schedule:
        """The schedule of the last training step."""
        return self._compiled().schedule

    @property
    def program(self) -> Program:
        """The program of the last training step, with the lists of all devices. A rank keeps the
        list of its own device only, and lowers the others again for this property."""
        return self._compiled().whole()

    @property
    def stashed(self) -> Mapping[int, int]:
        """Stage → the most micro-batches that it kept for backward at once in the last training
        step. If batches overlap, the count is over all batches since the last flush, and over
        several ranks the stages of other ranks are included only after a flush."""
        return dict(self._engine.stashed)

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients of the last batch, before clipping; None before the first batch
        or without ``clip_norm`` and ``scaler``. If batches overlap, it is the norm of an earlier
        batch that every device has finished, always the same number of batches back: with ``2bw``
        it is the third before the last."""
        return self._engine.grad_norm

    @property
    def batches(self) -> int:
        """The number of batches that ``step`` has trained on; a checkpoint keeps it."""
        return self._engine.batches

    @property
    @locked
    def metrics(self) -> dict[str, float]:
        """Figures of the last step, as a flat dict of numbers, which loggers take as it is.

        Steps are measured from the first time that you read this property. Figures that are not
        known, as before that time or after a step that failed, are left out. Over several ranks,
        ``bubble`` and ``stage_seconds`` are of this rank's device; if batches overlap, both are
        left out, and ``profile`` measures them.

        Returns:
            ``batches``, ``loss`` and ``grad_norm``; ``compile_seconds``, the time for which the
            last call of ``step`` compiled, usually 0, and ``seconds``, the rest of its time;
            ``bubble``, the share of the run for which the devices idle until the last micro-batch
            is done. Of each stage, by its number, such as ``stage_seconds/0``: the time for which
            it computed, and ``weight_versions/0`` if batches overlap. ``peak_memory/0``: the most
            bytes that device 0 is predicted to hold.
        """
        meter = self._engine.meter
        if meter is None:
            meter = self._engine.meter = Meter([[] for _ in self.devices])
        shown = self._shown
        if shown is not None and shown is not meter.compiled:
            peaks = [memory.peak for memory in self._memory().memory]
            meter.compiled, meter.peaks = shown, peaks
        measured = self._engine.measured(meter)
        figures = {
            "batches": self.batches,
            "loss": None if meter.loss is None else float(meter.loss),
            "grad_norm": self.grad_norm,
            "seconds": meter.seconds,
            "compile_seconds": meter.compile_seconds,
            "bubble": measured.get("bubble"),
        }
        several = {
            "stage_seconds": measured.get("stage_seconds", {}),
            "peak_memory": dict(enumerate(meter.peaks or ())),
            "weight_versions": dict(enumerate(self.weight_versions)),
        }
        known = {name: value for name, value in figures.items() if value is not None}
        return known | {
            f"{name}/{number}": value
            for name, values in several.items()
            for number, value in values.items()
        }

    @property
    def weight_versions(self) -> list[int]:
        """Stage → the number of live versions of its weights. Empty before the first step, and if
        batches do not overlap, which needs only one version. 0 for the stages of other ranks."""
        return self._engine.progress.weight_versions

    @property
    def weight_bytes(self) -> list[int]:
        """Stage → the bytes of all live versions of its weights; see ``weight_versions``."""
        return self._engine.progress.weight_bytes

    @property
    @locked
    def optimizer(self) -> Optimizer:
        """One torch optimizer over the model's parameters, with the groups that you made: for
        learning-rate schedulers, logging and ``state_dict``, also before the first step. It is the
        optimizer that ``compile`` was given, or that the given function makes of all parameters.

        ``step`` uses the settings that the groups have when the batch is submitted, even if batches
        overlap. ``state`` is the stages' present state. ``state_dict`` finishes the batches in
        flight first, and ``load_state_dict`` gives the loaded state to the stages. The optimizer's
        own ``step`` updates the weights from ``.grad``, as after ``pipe(x)`` and ``backward``. Over
        several ranks it has the state of this rank's stages, and every rank calls these methods.

        Raises:
            InputError: the pipe has no optimizer, or the function makes other groups for a stage
                than for all parameters; ``optimizers`` then has those of the stages.
        """
        return self._optimizers().one()

    @property
    @locked
    def optimizers(self) -> tuple[Optimizer | None, ...]:
        """Stage → its optimizer; None for a stage without parameters, and for the stages of other
        ranks. They are made by the first step, or by ``example``. See also ``optimizer``.

        Raises:
            InputError: the pipe has no optimizer, or nothing is compiled yet.
        """
        self._optimizers()
        return self._engine.progress.optimizers_of(self._compiled().plan)

    def _optimizers(self) -> Optimizers:
        if self._engine.progress.stages is None:
            raise InputError("the pipe has no optimizer; give compile(..., optimizer=...)")
        return self._engine.progress.stages

    def __repr__(self) -> str:
        """The table of stages, which measures nothing: after a cut by names it has times from the
        first ``simulate`` on."""
        shown = self._shown
        ended = bool(self._engine.progress.ended)  # then nothing is known of its memory
        verdict = self._compiler.verdict
        places = self._group.members.places or [*map(str, self.devices)]
        memory: Sequence[str] = ["–"] * len(places)
        if shown is not None and not ended:
            memory = peak_texts(self._memory())
        replicas = self._options.replicas
        return stage_table(self._model, shown, places, verdict, memory, replicas)

    def _repr_html_(self) -> str:
        return preformatted(repr(self))

    def simulate(
        self,
        costs: Costs | None = None,
        *,
        links: Links | None = None,
        overlap: bool = True,
        steps: int | None = None,
    ) -> Simulation:
        """Predict the time and the memory of a training step.

        The first call measures the costs, in seconds, in rehearsed steps: real steps of random
        numbers, whose results are dropped and which update copies of the weights. ``profile``
        replaces these times by those of real steps. Over several ranks, on devices with streams or
        with leaf modules, no step is rehearsed, and the times are those of each stage alone,
        measured when it was compiled. Over several ranks of CPU devices, if batches do not overlap,
        the second to fifth real step are timed instead, and count from the sixth on. ``step_time``
        is the predicted time of a step, and ``range`` how sure that is.

        ``memory`` has the peak of each device in bytes, as the table shows it, and its parts: what
        is always allocated, by storage, and what the nodes of the running graph hold. It counts
        neither the scratch memory of operations nor what stages with leaf modules save. Gradients
        that ``.grad`` holds now are counted in addition to the step's own. Every rank predicts the
        same for all devices, without asking the other ranks: it takes gradients to be where it has
        some itself, and calls ``optimizer`` for the stages of other ranks, too, for their memory.

        Args:
            costs: the costs to predict with, instead of the measured ones.
            links: the links between devices; by default those of a ``Partition``, or a hand-over to
                another thread.
            overlap: whether a device computes while it sends; see ``fxpipe.simulator.simulate``.
            steps: how many steps are simulated in a row; see there.

        Raises:
            InputError: nothing is compiled or measured yet, or an argument does not fit.
        """
        compiled = self._measured()
        rehearsal = None if costs else self._rehearsals.of(compiled)
        return predict(
            compiled.plan,
            compiled.whole(),
            self._engine.held(compiled),
            costs,
            rehearsal=rehearsal,
            links=links or (None if costs else given_links(self._options)),
            overlap=overlap,
            steps=steps,
        )

    def _memory(self) -> Simulation:
        """A simulation whose memory is to be shown; its times are not."""
        compiled = self._compiled()
        return predict_memory(compiled.plan, compiled.whole(), self._engine.held(compiled))

    def _measured(self) -> Compiled:
        """The compiled call that is shown, with the costs of its stages. After a cut by names the
        costs are measured only here."""
        compiled = self._compiled()
        if compiled.plan.stages[0].costs is None and not is_worker():
            with self._engine.quiet():
                compiled = self._shown = self._compiler.measured(compiled)
        return compiled

    def _compiled(self) -> Compiled:
        if self._shown is None:
            raise InputError(
                "nothing is compiled yet; call step once, or give compile(..., example=inputs)"
            )
        return self._shown

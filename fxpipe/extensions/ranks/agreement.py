"""What ranks agree on: what is compiled, and each call.

Each rank compiles for itself, and describes what it has made as text. All ranks compare the texts.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import compress
from math import inf
from time import perf_counter_ns
from traceback import format_exception
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.compiler.compiled import Compiled, Kind
from fxpipe.compiler.compiler import Compiler
from fxpipe.compiler.options import Options
from fxpipe.engine import Engine
from fxpipe.errors import InputError
from fxpipe.extend import Extension
from fxpipe.extensions.attributes import restoring
from fxpipe.extensions.ranks.channels import PATIENCE, RankBackend
from fxpipe.extensions.ranks.group import RankGroup, text_digest
from fxpipe.extensions.ranks.owned import Owned, owned
from fxpipe.extensions.ranks.part import refuse_state, refusing
from fxpipe.extensions.ranks.program import OwnProgram, devices_near
from fxpipe.formatting import without_addresses
from fxpipe.ir.plan import Plan, Stage
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.traced import Traced
from fxpipe.kernels.graph import COMPILED, GraphKernel, is_compiled
from fxpipe.parts import Parts
from fxpipe.runtime.batch import MicroBatches
from fxpipe.text.plan import print_graph
from fxpipe.text.program import list_lines
from fxpipe.torchtools import allocator
from fxpipe.torchtools.meta import become

_NUMBER = re.compile(r"(?<![\w.])-?\d+(\.\d+)?(e-?\d+)?(?!\w)")

_ROUNDS = 8
"""How many rounds of messages are exchanged to compare clocks."""


class Ranks(RankGroup):
    """The ranks of a pipe, which compile alike and run a device each."""

    _state: tuple[tuple[Any, ...], Sequence[str]] | None = None
    _divided: Any = None  # the model's DTensors, by an extension
    _backend: RankBackend
    _shards = False  # whether each replica keeps only some parameters by now

    def divided(self, model: nn.Module) -> Sequence[Extension]:
        if not self.groups:
            try:
                return super().divided(model)
            except InputError as error:
                raise InputError(
                    f"{str(error).partition(',')[0]}, and the mesh that the pipe was given has no "
                    'dimension for it; give the whole mesh, not mesh["pp"]'
                ) from None
        what = f"a mesh with the dimension {next(iter(self.groups))!r}"
        made = Parts.divide.find(what)(model, self.groups, self)
        self._divided = made.divided
        return (made,)

    @contextmanager
    def _in_columns(self) -> Iterator[None]:
        """Inside, what the model's DTensors communicate goes over the pipe's own groups, which end
        when a rank fails: the error is then that rank's."""
        if self._divided is None:
            yield
            return
        pairs = self._backend.connected()
        before, self._stops = self._stops, pairs.abort
        try:
            with self._divided.over_own_groups():
                yield
        except BaseException as error:
            self.epoch = max(self.epoch, pairs.number + 1)  # the others end these groups
            deadline = time.monotonic() + PATIENCE * ("gloo" in "".join(format_exception(error)))
            while self.failure is None and time.monotonic() < deadline:
                time.sleep(0.01)  # what has failed elsewhere is about to be told
            if self.failure is not None:
                raise self.failure from None
            raise
        finally:
            self._stops = before

    def joined(self, name: str, tensor: Tensor) -> Tensor:
        if self._divided is None:
            return tensor
        with self._in_columns():
            whole: Tensor = self._divided.joined(name, tensor)
            return whole

    def parted(self, name: str, tensor: Tensor) -> Tensor:
        return tensor if self._divided is None else self._divided.parted(name, tensor)

    def shown(self, name: str, tensor: Tensor) -> Tensor:
        return tensor if self._divided is None else self._divided.shown(name, tensor)

    def sharded(self, name: str) -> Sequence[str]:
        spec = None if self._divided is None else self._divided.specs.get(name)
        return () if spec is None else spec.sharded

    def close(self) -> None:
        super().close()
        if self._divided is not None:
            self._divided.restore()

    def backend(self, options: Options) -> RankBackend:
        kind: type[RankBackend] = RankBackend
        if options.places:
            kind = Parts.rank_streams.find(f"{options.here} has streams, and")
        self._backend = kind(self, options)
        return self._backend

    def same_options(self, options: Options) -> None:
        self.agree(
            "what fxpipe.compile was given", f"torch {torch.__version__}\n{options_text(options)}"
        )

    @contextmanager
    def compiling(self, parts: Sequence[object]) -> Iterator[None]:
        restore = restoring(parts)
        try:
            with self._in_columns():
                yield
            self.exchange("the compilation", held=True)
        except BaseException:
            restore()
            raise

    def same_plans(
        self, options: Options, schedule: Schedule, traced: Traced, plans: Sequence[Plan]
    ) -> None:
        """Also takes over which graphs other ranks run as libraries. Whether
        random numbers are drawn must be alike as each step of all ranks shares their seed."""
        first = plans[0]
        text = str(first)
        text = _NUMBER.sub("0", text) if self.columns else text
        trained = [[each.target for each in stage.parameters] for stage in first.stages]
        graphs = [g for plan in plans for stage in plan.stages for g in _graphs(stage)]
        answers = self.agree(
            "the compiled plan",
            f"{schedule}\n{trained}\nthe model draws random numbers: {traced.seeded}",
            own=text,
            value=[*map(is_compiled, graphs)],
        )
        for rank in self.pipeline:
            for graph in compress(graphs, answers[rank]):
                graph.meta[COMPILED] = True

    def same_parts(self, traced: Traced) -> None:
        """Raise RankError unless the ranks with the parts of the same stages have captured the same
        graph, but for numbers: parts of a table of embeddings begin at others."""
        text = f"{traced}\n{traced.backward and print_graph(traced.backward.graph)}"
        self.agree("the captured graph", "", parts=_NUMBER.sub("0", text))

    def same_program(
        self,
        lower: Callable[..., Program],
        known: Program | None,
        schedule: Schedule,
        plan: Plan,
    ) -> Program:
        """The first rank of a replica makes and verifies the whole. The others make what they run,
        and compare their own lists with that."""
        about, own, frame = "the compiled program", known, ""
        digests: dict[int, bytes] = {}
        if own is None:  # else another replica may have to make it
            made = lower(only=devices_near(schedule, plan, self.device) if self.device else ())
            own = OwnProgram.of(made, self.device)
            frame = f"{replace(own, lists=(), launches=())}buckets {plan.buckets}\n"
            for device in [self.device] if self.device else range(made.devices):
                digests[device] = text_digest(_list_text(made, device))
        answers = self.agree(about, "", own=frame, value=digests)
        for rank in range(self.size):
            device = rank % self._devices
            if answers[rank].get(device) != answers[rank - device].get(device):
                text = _list_text(made, device) if device in digests else ""
                self.differs(about, rank - device, rank, text)
        return super().same_program(lower, own, schedule, plan)

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
        """Also flushes, on all ranks, if the batch of a replica cannot join those in flight."""
        batch, compiles = micro.batch, known is None
        leaves = [*zip(batch.names, batch.leaves, strict=True)]
        numbers = {batch.names[index]: number for index, number in batch.numbers.items()}
        if self._state is None or self._state[0] != compiler.state:
            self._state = compiler.state, state_text(compiler.options.model, compiler.state)
        common = [
            kind.purpose,
            f"batch number {engine.batches}",
            f"updates: {kind.updates}",
            f"outputs: {kind.outputs}",
            *self._state[1],
        ]
        own = [
            f"a batch of {batch.size} samples in {len(micro)} micro-batches",
            *(f"{name}: {_leaf_text(numbers.get(name, leaf))}" for name, leaf in leaves),
        ]
        if first:  # later, replicas may have batches of other shapes
            common += own
        # before the first batch, a rank may have no optimizer yet
        common += engine.progress.settings() if engine.batches else ()
        since = "new" if known is None else f"those of call {known.call}"
        own.append(f"attributes, globals and hooks that its code reads: {since}")
        tensors = [
            (name, leaf)
            for name, leaf in leaves
            if isinstance(leaf, Tensor) and name not in numbers
        ]
        hashed = digest if compiles else sampled  # loaders of ranks may drift apart at any call
        own += [f"{name}: {_leaf_text(x)}, {hashed(x)}" for name, x in tensors]
        flushes = known is not None and not engine.joins(known)
        value = compiles, flushes, {**along}
        ranks = self.agree("the call", "\n".join(common), own="\n".join(own), value=value)
        everywhere = set(along).intersection(*(came for _, _, came in ranks))
        self._along = {about: [came[about] for _, _, came in ranks] for about in everywhere}
        if self.replicas > 1 and any(flushes for _, flushes, _ in ranks):
            engine.flush()
        return any(compiles for compiles, _, _ in ranks)  # another replica may have to

    def same_weights(self, state: Mapping[str, Tensor]) -> None:
        lines = {name: f"{name}: {digest(state[name])}" for name in sorted(state)}
        if self.replicas > 1:
            self.agree("what replicas train", "", twins="\n".join(lines.values()))
        if self.columns:
            whole = [line for name, line in lines.items() if not self.sharded(name)]
            self.agree("what is not divided", "", parts="\n".join(whole))

    def release(self, options: Options, compiled: Compiled) -> None:
        """On ranks of CPUs. The parameters stay the same objects, on the meta device. Buffers,
        which models read to decide what to do, keep their data, and so do parameters that no stage
        reads."""
        if options.places:
            return
        state = compiled.traced.state_of(options.model)
        own: set[Tensor] = set()
        others: set[Tensor] = set()
        self._shards = options.sharded_weights
        away = self.away(options, compiled)
        for stage in range(len(compiled.plan.stages)):
            for name in compiled.names(stage):
                kept = options.owns(stage) and name not in away
                (own if kept else others).add(state[name])
        for tensor in others - own:
            if isinstance(tensor, nn.Parameter) and not tensor.is_meta:
                become(tensor, torch.empty_like(tensor, device="meta"))
        refuse_state(options.model, others - own)
        # the same on all ranks, so that they compile alike
        options.__dict__["hollow"] = options.size
        allocator.give_back()

    def attribute(self, model: nn.Module, found: Any) -> Any:
        return refusing(model, found)

    def away(self, options: Options, compiled: Compiled) -> frozenset[str]:
        if not self._shards:
            return frozenset()
        found: set[str] = set()
        state = compiled.traced.state_of(options.model)
        for stage in filter(lambda each: options.owns(each.index), compiled.plan.stages):
            names = [argument.target for argument in stage.parameters]
            by = zip(names, self.deal(names, [state[name] for name in names]), strict=True)
            found.update(name for name, replica in by if replica != self.replica)
        return frozenset(found)

    def owned(self, model: nn.Module, compiled: Compiled | None, options: Options) -> Owned:
        found = owned(model, compiled, options.owns)
        if compiled is None or not self._shards:
            return found
        real = dict(model.named_parameters(remove_duplicate=False))
        away = {found.names[id(real[name])] for name in self.away(options, compiled)}
        return replace(found, kept=found.kept - away, used=found.used - away, shared=True)

    def timed(self, times: Sequence[Sequence[int]]) -> list[list[int]]:
        ahead, every = self.clocks(), self.exchange("times", times)
        found: list[list[int]] = [[] for _ in times]
        for rank in self.pipeline:
            for device, stamps in enumerate(every[rank]):
                found[device] += [stamp - ahead[rank] for stamp in stamps]
        return found

    def clocks(self) -> list[int]:
        """Rank → by how many nanoseconds its clock is ahead of rank 0's.

        Ranks compare clocks by messages that cross, as the Network Time Protocol does. The result
        is 0 unless the messages prove that the clocks differ; on one host they cannot, as all
        processes have the same clock. Otherwise it is off by at most half the time of a message.
        """
        least = [inf] * self.size
        for _ in range(_ROUNDS):
            sent = self.exchange("clock", perf_counter_ns())
            now = perf_counter_ns()
            least = [min(known, now - stamp) for known, stamp in zip(least, sent, strict=True)]
        # receiver → sender → the least time of a message, and how far the receiver's clock is ahead
        seen = self.exchange("delays", least)
        ways = [(delays[0], seen[0][rank]) for rank, delays in enumerate(seen)]
        return [0 if -back <= 0 <= there else (there - back) // 2 for there, back in ways]


def options_text(options: Options) -> str:
    """The options as text that has to be the same on all ranks, one on each line."""
    apart = {"model", "optimizer", "scaler", "dispatch", "threads", "group"}
    apart |= {"devices", "torch_devices", "places"}  # each replica has devices of its own
    model, scaler = options.model, options.scaler
    lines = [
        f"model: {type(model).__qualname__}",
        f"devices: {', '.join(device.type for device in options.torch_devices)}",
    ]
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        trained = "trained" if x.requires_grad else "not trained"
        lines.append(f"{name}: {tuple(x.shape)}, {x.dtype}, {trained}")
    lines.append(f"optimizer: {'none' if options.optimizer is None else 'given'}")
    lines.append(f"scaler: {scaler and (scaler.is_enabled(), scaler.get_scale())}")
    names = [option.name for option in fields(options) if option.name not in apart]
    lines += [f"{name}: {getattr(options, name)!r}" for name in names]
    return without_addresses("\n".join(lines))


def state_text(model: nn.Module, state: tuple[Any, ...]) -> list[str]:
    """The state that ``Guard.state`` returned as lines of text, without the values that the
    model's code reads."""
    *_, cast, dtype = state
    mode = model.training
    others = [name for name, each in model.named_modules() if each.training != mode]
    frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
    return [
        f"the pipe is in {'training' if mode else 'evaluation'} mode"
        + (f", but for {', '.join(others)}" if others else ""),
        f"parameters without gradients: {', '.join(frozen) or 'none'}",
        f"autocast: {cast or 'none'}",
        f"the default type of numbers: {dtype}",
    ]


def _list_text(program: Program, device: int) -> str:
    return "\n".join(list_lines(program, device))


def digest(tensor: Tensor) -> str:
    """Return a short hash of a tensor's values; empty on the meta device."""
    if tensor.is_meta:
        return ""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    values = hashlib.sha256(plain.view(-1).view(torch.uint8).numpy().data)
    return values.hexdigest()[:16]


def sampled(tensor: Tensor, most: int = 256) -> str:
    """Return a short hash of some values, spread over a tensor in host memory; empty for others,
    whose values the host would wait for."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return ""
    spread = []
    for size in tensor.shape:
        step = -(-size // most)
        spread.append(slice((step - 1) // 2, None, step))
        most = max(most // -(-size // step), 1)
    return digest(tensor[tuple(spread)])


def _leaf_text(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype}" + ", requires grad" * leaf.requires_grad
    return without_addresses(repr(leaf))


def _graphs(stage: Stage) -> list[fx.GraphModule]:
    graphs: list[fx.GraphModule] = []

    def see(graph: fx.GraphModule) -> fx.GraphModule:
        graphs.append(graph)
        return graph

    if isinstance(stage.kernel, GraphKernel):
        stage.kernel.mapped(see)
    return graphs

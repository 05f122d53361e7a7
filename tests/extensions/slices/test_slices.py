"""Sequences in slices: steps equal those of the plain loop, and what cannot be cut is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.recipe import Recipe
from fxpipe.ir.value import HOST
from fxpipe.schedules.one_f_one_b import seq1f1b
from tests.helpers.profiles import deep
from tests.helpers.ranks import DeviceMesh, on_ranks

WIDTH, WORDS, LENGTH = 8, 13, 12


class Block(nn.Module):
    """A block of a transformer, whose attention is causal unless told otherwise."""

    def __init__(self, dropout: float = 0.0, **attention: Any) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.attention = attention or {"is_causal": True}

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        read = F.scaled_dot_product_attention(q, k, v, **self.attention)
        out: Tensor = x + self.out(self.drop(read.transpose(1, 2).flatten(2)))
        return out


class Model(nn.Module):
    """A language model whose embedding is also its head, and which is given places."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*blocks or (Block(), Block()))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor, places: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.words(words) + self.places(places)))
        return out


class Counting(Model):
    """Takes the places from the length of what it is given."""

    def forward(self, words: Tensor, places: Tensor) -> Tensor:
        return super().forward(words, torch.arange(words.shape[1]).expand_as(words))


def loss(out: Tensor, target: Tensor) -> Tensor:
    if out.ndim < 3:
        return out.mean()
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def batch(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    words, target = torch.randint(WORDS, (2, 4, length), generator=generator)
    return words, torch.arange(length).repeat(4, 1), target


def made(*blocks: nn.Module, cls: type[Model] = Model) -> Model:
    torch.manual_seed(0)
    return cls(*blocks)


def stepped(model: nn.Module, devices: Any, recipe: Recipe, **options: Any) -> list[Any]:
    """The loss, and the gradient of each parameter, of a step."""
    options = {"microbatches": 2, "loss": loss, "extensions": [fxpipe.Slices(dim=1)], **options}
    words, places, target = batch()
    with fxpipe.compile(model, devices, schedule=recipe, **options) as pipe:
        found = pipe.step(words, places, target=target)
        return [found, *(parameter.grad for parameter in model.parameters())]


def looped(model: nn.Module) -> list[Any]:
    """The same of a plain loop over micro-batches, of whole sequences."""
    total = torch.zeros(())
    for words, places, target in zip(*(x.chunk(2) for x in batch()), strict=True):
        part = loss(model(words, places), target) / 2
        part.backward()
        total += part.detach()
    return [total, *(parameter.grad for parameter in model.parameters())]


def all_forwards_first(device: int, devices: int, microbatches: int, *, stages: Any) -> Any:
    """TeraPipe's order."""
    for i in range(microbatches):
        yield from (fxpipe.F(i, stage) for stage in stages)
    for i in range(microbatches):
        yield from (fxpipe.B(i, stage) for stage in reversed(stages))
    yield from (fxpipe.U(stage) for stage in stages)


TERAPIPE = Recipe("terapipe", all_forwards_first, placement=fxpipe.round_robin(3), slices=3)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("recipe", "devices", "options"),
    [
        (seq1f1b(2), 2, {}),
        (seq1f1b(2), 1, {}),
        (seq1f1b(2), 2, {"recompute": "always"}),
        (TERAPIPE, 2, {"partition": ["blocks.1"]}),
        *deep((seq1f1b(4), 1, {}), (seq1f1b(3), 2, {"recompute": "always"})),
    ],
    ids=["two", "one device", "recomputed", "an own schedule", *deep("four", "three recomputed")],
)
def test_a_step_equals_that_of_whole_sequences(
    recipe: Recipe, devices: int, options: dict[str, Any]
) -> None:
    model = made()
    expected = looped(copy.deepcopy(model))
    torch.testing.assert_close(stepped(model, devices, recipe, **options), expected)


def on_rank(mesh: DeviceMesh) -> list[Any]:
    return stepped(made(), mesh, seq1f1b(2), partition=["blocks.1"])


def test_ranks_run_slices_too() -> None:
    loss, *expected = looped(made())
    for found, *gradients in on_ranks(2, on_rank):
        torch.testing.assert_close(found, loss)
        for gradient, wanted in zip(gradients, expected, strict=True):
            if gradient is not None:  # else the parameter is on the other rank
                torch.testing.assert_close(gradient, wanted)


def on_replica(mesh: DeviceMesh) -> list[Tensor]:
    """The parameters after two steps, in each of which this replica trains on its half."""
    model, half = made(), mesh.get_local_rank("dp")
    words, places, target = (x.chunk(2)[half] for x in batch())
    options: dict[str, Any] = {"microbatches": 2, "loss": loss, "extensions": [fxpipe.Slices()]}
    options["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    with fxpipe.compile(model, mesh, schedule=seq1f1b(2), **options) as pipe:
        for _ in range(2):
            pipe.step(words, places, target=target)
        return [parameter.detach() for parameter in model.parameters()]


def test_replicas_run_slices_too() -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        looped(model)
        optimizer.step()
    for found in on_ranks(2, on_replica, replicas=2):
        torch.testing.assert_close(found, [parameter.detach() for parameter in model.parameters()])


@pytest.mark.smoke
def test_each_slice_stays_on_the_devices_of_its_stages_and_reads_the_slice_before_it() -> None:
    words, places, target = batch()
    with fxpipe.compile(
        made(), 2, schedule=seq1f1b(3), microbatches=2, loss=loss, extensions=[fxpipe.Slices()]
    ) as pipe:
        pipe.prepare(words, places, target=target)
        ends = {(edge.source, edge.target) for edge in pipe.plan.edges}
        modules = [stage.modules for stage in pipe.plan.stages]
        owners = [stage.index for stage in pipe.plan.stages if stage.parameters]
    across = {(a, b) for a, b in ends if HOST not in (a, b) and a % 2 != b % 2}
    assert across == {(0, 1), (2, 3), (4, 5)}  # the embedding, which is the head, crosses once
    assert {(0, 2), (2, 4), (1, 3), (3, 5)} <= ends
    assert owners == [0, 1]
    assert modules[:2] * 3 == modules
    assert modules[1]


def test_in_eval_mode_sequences_have_any_length() -> None:
    model = made().eval()
    words, places, _ = batch(7)
    expected = model(words, places)
    options: dict[str, Any] = {"schedule": seq1f1b(2), "microbatches": 2, "loss": loss}
    with fxpipe.compile(model, 2, extensions=[fxpipe.Slices()], **options) as pipe:
        for _ in range(2):  # before the first step, and after it
            with torch.no_grad():
                torch.testing.assert_close(pipe(words, places), expected)
            pipe.train()
            pipe.step(*batch()[:2], target=batch()[2])
            pipe.eval()
        gradients = [parameter.grad for parameter in model.parameters()]
    again = made()
    looped(again)
    for gradient, parameter in zip(gradients, again.parameters(), strict=True):
        assert gradient is not None
        assert parameter.grad is not None
        torch.testing.assert_close(gradient, 2 * parameter.grad)


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return out


class Mean(Model):
    def forward(self, words: Tensor, places: Tensor) -> Tensor:
        return super().forward(words, places).mean(1, keepdim=True).mean(-1)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("model", "recipe", "error", "text"),
    [
        (made, seq1f1b(5), fxpipe.FxpipeError, "sequences of 12 cannot be cut into 5"),
        (
            lambda: made(Block(is_causal=False)),
            seq1f1b(2),
            fxpipe.InputError,
            "slices need causal attention.*no is_causal",
        ),
        (
            lambda: made(Block(attn_mask=torch.ones(LENGTH, LENGTH).tril().bool())),
            seq1f1b(2),
            fxpipe.InputError,
            "slices need causal attention.*a mask",
        ),
        (lambda: made(cls=Counting), seq1f1b(2), fxpipe.TraceError, "differ"),
        (lambda: made(cls=Mean), seq1f1b(2), fxpipe.FxpipeError, "for a slice of 6"),
        (lambda: made(Block(dropout=0.5)), seq1f1b(2), fxpipe.InputError, "set dropout to 0"),
        (
            lambda: made(Block(), BatchNormed()),
            seq1f1b(2),
            fxpipe.PartitionError,
            "running_mean' must be on one stage, and slices are stages of their own",
        ),
    ],
    ids=["length", "not causal", "mask", "places", "output", "dropout", "statistics"],
)
def test_what_cannot_be_cut_is_refused(
    model: Callable[[], nn.Module], recipe: Recipe, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        stepped(model(), 2, recipe)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"extensions": []}, r"say which dimension it is: .*fxpipe\.Slices\(dim=1\)"),
        ({"schedule": "1f1b"}, "'1f1b' has none; give schedule="),
        ({"memory_limits": 2**20}, "exclude each other"),
        ({"extensions": [fxpipe.Slices(dim=-1)]}, "count dimensions from 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], text: str) -> None:
    given = {"schedule": seq1f1b(2), "extensions": [fxpipe.Slices()], **options}
    with pytest.raises(fxpipe.InputError, match=text):
        fxpipe.compile(made(), 2, **given)


@pytest.mark.deep
def test_language_models_of_transformers_take_slices_with_their_cache() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": WIDTH}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    alone = copy.deepcopy(model)
    words, _, target = batch()
    padding = torch.ones_like(words)
    padding[1, :5] = 0

    def logits_loss(out: Any, target: Tensor) -> Tensor:
        return loss(out.logits, target)

    for part, mask, wanted in zip(*(x.chunk(2) for x in (words, padding, target)), strict=True):
        (logits_loss(alone(part, attention_mask=mask), wanted) / 2).backward()
    slices = fxpipe.Slices(cache=transformers.DynamicCache)
    options: dict[str, Any] = {"schedule": seq1f1b(2), "microbatches": 2, "loss": logits_loss}
    with fxpipe.compile(model, 2, extensions=[slices], **options) as pipe:
        pipe.step(words, attention_mask=padding, target=target)
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)

"""The first step's loss is compared with that of the joined outputs, and a difference is named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_map

import fxpipe
from fxpipe.compiler.loss_weight import weighing
from fxpipe.compiler.loss_weight.comparing import Sample, difference_of
from fxpipe.compiler.objective import Objective
from fxpipe.runtime.batch import Batch
from tests.helpers.losses import IGNORED, assert_whole, counted, masked_mean, net, rows
from tests.helpers.profiles import deep
from tests.oracles import loop

N, CLASSES = 10, 5
RANDOM = torch.Generator().manual_seed(3)
WEIGHTS = torch.rand(CLASSES, generator=RANDOM, dtype=torch.float64) + 0.1
X, Y = rows(N)
IGNORING = Y.clone()
IGNORING[[0, 1, 2, 7]] = IGNORED
REAL = torch.randn(N, CLASSES, generator=RANDOM, dtype=torch.float64)
SOFT = REAL.softmax(1)
SEVERAL = (torch.rand(N, CLASSES, generator=RANDOM) < 0.3).double()
SEVERAL[:, 0] = torch.arange(N) % 2
MASK = torch.zeros(N, dtype=torch.bool)
MASK[[0, 3, 4, 5, 9]] = True
SOME = (torch.arange(N) % 3 != 1).double()


def focal(o: Tensor, t: Tensor) -> Tensor:
    p, each = o.sigmoid(), F.binary_cross_entropy_with_logits(o, t, reduction="none")
    right = p * t + (1 - p) * (1 - t)
    return (0.25 * (1 - right) ** 2 * each).sum() / t.sum().clamp(min=1)


def dice(o: Tensor, t: Tensor) -> Tensor:
    p = o.sigmoid()
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def dice_of_each(o: Tensor, t: Tensor) -> Tensor:
    p = o.sigmoid()
    return (1 - (2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)).mean()


def contrastive(o: Tensor, t: Tensor) -> Tensor:
    like = F.normalize(o, dim=1) @ F.normalize(t, dim=1).T / 0.1
    return F.cross_entropy(like, torch.arange(len(like)))


def barlow(o: Tensor, t: Tensor) -> Tensor:
    a, b = ((x - x.mean(0)) / (x.std(0) + 1e-4) for x in (o, t))
    return (a.T @ b / len(o) - torch.eye(CLASSES)).square().sum()


def variance(o: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(o, t) + F.relu(1 - o.var(0).add(1e-4).sqrt()).mean()


def pearson(o: Tensor, t: Tensor) -> Tensor:
    a, b = o - o.mean(), t - t.mean()
    return 1 - F.cosine_similarity(a.flatten(), b.flatten(), dim=0)


def hardest(o: Tensor, t: Tensor) -> Tensor:
    losses = F.cross_entropy(o, t, reduction="none")
    return losses.topk(max(1, len(losses) // 2)).values.mean()


def pairs(o: Tensor) -> Tensor:
    """As of chosen and rejected answers, which follow each other in the batch."""
    chosen, rejected = o.chunk(2)
    n = min(len(chosen), len(rejected))
    return -F.logsigmoid(chosen[:n] - rejected[:n]).mean()


def masked(o: Tensor, t: Tensor, mask: Tensor) -> Tensor:
    return (o.square().mean(1) * mask).sum() / mask.sum()


def two_divisors(o: Tensor, t: Tensor, mask: Tensor) -> Tensor:
    return masked(o, t, mask) + F.cross_entropy(o, t)


def mixed_up(o: Tensor, t: Tensor) -> Tensor:
    return 0.3 * F.cross_entropy(o, t) + 0.7 * F.cross_entropy(o, t.flip(0))


def chunked(o: Tensor, t: Tensor) -> Tensor:
    parts = zip(o.chunk(2), t.chunk(2), strict=True)
    return torch.stack([F.cross_entropy(*part) for part in parts]).mean()


def with_regulariser(o: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(o, t) + 0.1 * torch.logsumexp(o, 1).square().mean()


RIGHT: dict[str, tuple[Callable[..., Tensor], Any]] = {
    "smooth": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), IGNORING),
    "soft": (lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS), SOFT),
    "nll": (lambda o, t: F.nll_loss(F.log_softmax(o, 1), t, weight=WEIGHTS), Y),
    "pos_weight": (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), SEVERAL),
    "kl": (lambda o, t: F.kl_div(F.log_softmax(o, 1), t, reduction="batchmean"), SOFT),
    "huber": (F.huber_loss, REAL),
    "margin": (F.multi_margin_loss, Y),
    "dice of each": (dice_of_each, SEVERAL),
    "cosine": (lambda o, t: F.cosine_embedding_loss(o, t, torch.ones(len(o))), REAL),
    "triplet": (lambda o, t: F.triplet_margin_loss(o, t, t.flip(1)), REAL),
    "each": (lambda o, t: F.mse_loss(o, t, reduction="none").mean(1), REAL),
}
WRONG: dict[str, tuple[Callable[..., Tensor], Any, str]] = {
    "sum": (lambda o, t: F.cross_entropy(o, t, reduction="sum"), Y, "sum"),
    "sum by a constant": (lambda o, t: F.mse_loss(o, t, reduction="sum") / N, REAL, "sum"),
    "positives": (focal, SEVERAL, "divisor"),
    "mask": (masked, (Y, SOME), "divisor"),
    "mask with an empty part": (masked, (Y, MASK), "divisor"),
    "classes": (lambda o, t: (WEIGHTS[t] * o.exp().sum(1)).sum() / WEIGHTS[t].sum(), Y, "divisor"),
    "two divisors": (two_divisors, (Y, SOME), "coupled"),
    "regulariser": (with_regulariser, IGNORING, "coupled"),
    "mix-up": (mixed_up, Y, "coupled"),
    "dice": (dice, SEVERAL, "coupled"),
    "contrastive": (contrastive, REAL, "coupled"),
    "barlow": (barlow, REAL, "coupled"),
    "variance": (variance, REAL, "coupled"),
    "root": (lambda o, t: F.mse_loss(o, t).sqrt(), REAL, "coupled"),
    "pearson": (pearson, REAL, "coupled"),
    "hardest": (hardest, Y, "coupled"),
    "chunks": (chunked, Y, "coupled"),
    "pairs": (lambda o, t: pairs(o), Y, "coupled"),
}
OF_EACH_KIND = "sum", "mask with an empty part", "regulariser", "dice"
"""Those of which quick tests also compile the model; the graphs of the last two differ: one has a
divisor."""

COUPLED = [n for n, (*_, kind) in WRONG.items() if kind == "coupled" and n != "contrastive"]
TEXTS = {
    "sum": r'it is a sum over samples; give compile\(\.\.\., reduction="sum"\)',
    "divisor": r"it is divided by something else.*fxpipe\.LossWeight\(function\)\]\) a function of",
    "coupled": r"no weights of micro-batches make it right.*loss\(pipe\(inputs\), target\)",
}
WAYS_OUT: dict[str, Callable[..., Any]] = {
    "positives": lambda t: t.sum(),
    "mask": lambda t, mask: mask.sum(),
    "mask with an empty part": lambda t, mask: mask.sum(),
    "classes": lambda t: WEIGHTS[t].sum(),
}


BY_SAMPLES = "pos_weight", "huber", "margin", "dice of each", "cosine", "triplet"
"""Right losses that quick tests do not compile: "kl" and "each" are means over samples, too."""


@pytest.mark.smoke
@pytest.mark.parametrize("name", [*(n for n in RIGHT if n not in BY_SAMPLES), *deep(*BY_SAMPLES)])
def test_nothing_is_said_of_a_loss_that_is_that_of_the_batch(name: str) -> None:
    loss, target = RIGHT[name]
    whole = lambda *given: loss(*given).mean()  # noqa: E731
    assert_whole(loss, X, target, 4, whole)  # a warning would be an error


@pytest.mark.smoke
@pytest.mark.parametrize("name", [*BY_SAMPLES, *WRONG])
def test_the_kind_of_a_loss_is_found_by_its_gradients(name: str) -> None:
    loss, target, kind = WRONG[name] if name in WRONG else (*RIGHT[name], None)
    objective, output = Objective(loss), net()(X).detach()
    targets = target if isinstance(target, tuple) else (target,)
    batch = Batch.of(nn.Identity(), (output,), {}, targets)
    micro = batch.in_parts(4)
    outputs = [[part] for part in output.split(micro.sizes)]
    spec, where = pytree.tree_structure(output), torch.device("cpu")
    shares = [size / N for size in micro.sizes]
    made = difference_of(
        lambda: Sample(objective, micro, outputs, [(0,)], spec, where), objective, shares
    )
    assert (made and made.kind) == kind


@pytest.mark.smoke
@pytest.mark.parametrize("name", OF_EACH_KIND + deep(*(n for n in WRONG if n not in OF_EACH_KIND)))
def test_a_loss_that_is_not_that_of_the_batch_is_named_once_by_its_kind(name: str) -> None:
    loss, target, kind = WRONG[name]
    with fxpipe.compile(net(), ["cpu"] * 2, microbatches=4, loss=loss) as pipe:
        with pytest.warns(UserWarning, match=TEXTS[kind]) as warned:
            pipe.step(X, target=target)
        pipe.step(X, target=target)
        pipe.step(X[:9], target=tree_map(lambda t: t[:9], target))
    assert len(warned) == 1 and warned[0].filename == __file__


@pytest.mark.smoke
@pytest.mark.parametrize("name", WAYS_OUT)
def test_the_function_that_is_asked_for_makes_the_loss_that_of_the_batch(name: str) -> None:
    loss, target, _ = WRONG[name]
    assert_whole(loss, X, target, 4, extensions=[fxpipe.LossWeight(WAYS_OUT[name])])


@pytest.mark.parametrize("name", ["sum", "sum by a constant"])
def test_a_sum_is_that_of_the_batch_with_the_reduction_that_is_named(name: str) -> None:
    loss, target, _ = WRONG[name]
    assert_whole(loss, X, target, 4, reduction="sum")


@pytest.mark.smoke
@pytest.mark.parametrize(
    "name", ["contrastive", *deep(*(n for n in COUPLED if n != "contrastive"))]
)
def test_outside_of_step_the_loss_of_the_batch_has_its_gradients(name: str) -> None:
    loss, target, _ = WRONG[name]
    targets = target if isinstance(target, tuple) else (target,)
    model, alone = net(), net()
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=4, loss=loss) as pipe:
        loss(pipe(X), *targets).backward()
    loss(alone(X), *targets).backward()
    loop.assert_same(loop.gradients(model), loop.gradients(alone), 1e-12)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("loss", "target", "options", "text"),
    [
        (masked_mean, IGNORING, [lambda t: len(t)], "let the function of LossWeight return what"),
        (F.mse_loss, REAL, [lambda t: t[:, 0].abs().sum()], "a mean over samples; leave out the L"),
        (WRONG["sum"][0], Y, [lambda t: len(t)], "leave out the LossWeight, and give compile"),
        (dice, SEVERAL, [lambda t: t.sum()], "no weights of micro-batches make it right"),
        (F.mse_loss, REAL, "sum", 'a mean over samples; leave out reduction="sum"'),
        (masked_mean, IGNORING, "sum", 'leave out reduction="sum", and give .*LossWeight'),
        (dice, SEVERAL, "sum", "added up, .*no weights of micro-batches make it right"),
    ],
)
def test_weights_and_reductions_that_are_given_are_compared_too(
    loss: Callable[..., Tensor], target: Tensor, options: Any, text: str
) -> None:
    given: dict[str, Any] = {"reduction": options}
    if options != "sum":
        given = {"extensions": [fxpipe.LossWeight(*options)]}
    with (
        fxpipe.compile(net(), ["cpu"], microbatches=3, loss=loss, **given) as pipe,
        pytest.warns(UserWarning, match=text),
    ):
        pipe.step(X, target=target)


@pytest.mark.smoke
@given(st.lists(st.integers(0, 3), min_size=4, max_size=9), st.integers(2, 4))
def test_any_divisor_is_told_from_samples_and_from_a_sum(counts: list[int], parts: int) -> None:
    """A loss divides by weights of its samples. It is a mean over samples where each micro-batch
    has its share of them, and is named otherwise."""
    n = len(counts)
    weights = torch.tensor(counts, dtype=torch.float64)
    split = weights.tensor_split(parts)
    assume(all(part.sum() > 0 for part in split))
    shares = [float(part.sum() / weights.sum()) - len(part) / n for part in split]
    made = difference_of(
        lambda: sample(n, parts, weights), WEIGHTED, [len(part) / n for part in split]
    )
    if max(map(abs, shares)) > 1e-2:
        assert made is not None and made.kind == "divisor"
    elif max(map(abs, shares)) < 1e-9:
        assert made is None


WEIGHTED = Objective(lambda o, w: (o.square().sum(1) * w).sum() / w.sum())


def sample(n: int, parts: int, weights: Tensor) -> Sample:
    output = torch.randn(n, 3, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    batch = Batch.of(nn.Linear(3, 3), (output,), {}, (weights,))
    outputs = [[part] for part in output.tensor_split(parts)]
    spec = pytree.tree_structure(output)
    where = torch.device("cpu")
    return Sample(WEIGHTED, batch.in_parts(parts), outputs, [(0,)], spec, where)


def test_a_random_loss_is_no_alarm_and_leaves_the_generator_alone() -> None:
    def loss(o: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(F.dropout(o, 0.5), t)

    states = []
    for batch in (1, 4):
        torch.manual_seed(0)
        with fxpipe.compile(net(), ["cpu"], microbatches=batch, loss=loss) as pipe:
            pipe.step(X, target=REAL)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_loss_that_raises_for_the_whole_batch_trains(schedule: str) -> None:
    def loss(o: Tensor, t: Tensor) -> Tensor:
        assert len(o) < 4, "too many"
        return F.mse_loss(o, t)

    model, alone = net(), net()
    options: dict[str, Any] = {"optimizer": lambda p: torch.optim.SGD(p, 0.1)}
    with fxpipe.compile(model, 2, microbatches=4, loss=loss, schedule=schedule, **options) as pipe:
        made = pipe.step(X, target=REAL)
        assert torch.equal(made + 0, loop.train(alone, 4, X, loss=loss, target=REAL).loss)


@pytest.mark.smoke
@pytest.mark.needs("overlapping")
def test_batches_that_overlap_are_compared_too() -> None:
    options: dict[str, Any] = {"optimizer": lambda p: torch.optim.SGD(p, 0.1), "schedule": "2bw"}
    with fxpipe.compile(net(), 2, microbatches=4, loss=dice, **options) as pipe:
        with pytest.warns(UserWarning, match="no weights of micro-batches"):
            pipe.step(X, target=SEVERAL)
            pipe.flush()
        pipe.step(X, target=SEVERAL)


@pytest.mark.smoke
def test_of_large_outputs_only_the_first_micro_batches_are_compared() -> None:
    bytes_of_one = 2 * CLASSES * 8
    with (
        patch.object(weighing, "_MOST", 3 * bytes_of_one),
        fxpipe.compile(net(), 1, microbatches=5, loss=dice) as pipe,
        pytest.warns(UserWarning, match="make 0.* of the first 3 micro-batches, and the loss of"),
    ):
        pipe.step(X, target=SEVERAL)
    with (
        patch.object(weighing, "_MOST", bytes_of_one),
        fxpipe.compile(net(), 1, microbatches=5, loss=with_regulariser) as pipe,
        pytest.warns(UserWarning, match="a function of the targets that returns what the loss"),
    ):
        pipe.step(X, target=IGNORING)  # the graph tells of a divisor


def test_a_later_batch_whose_divisors_differ_is_compared_when_it_comes() -> None:
    with fxpipe.compile(net(), 1, microbatches=2, loss=with_regulariser) as pipe:
        pipe.step(X, target=Y)
        with pytest.warns(UserWarning, match="no weights of micro-batches"):
            pipe.step(X, target=IGNORING)
        pipe.step(X, target=IGNORING)


@pytest.mark.smoke
@pytest.mark.parametrize("loss", [F.mse_loss, dice])
def test_the_loss_of_the_joined_outputs_is_computed_once(loss: Callable[..., Tensor]) -> None:
    with (
        patch.object(weighing, "difference_of", wraps=difference_of) as asked,
        fxpipe.compile(net(), 1, microbatches=4, loss=loss) as pipe,
        warnings.catch_warnings(action="ignore"),
    ):
        for samples in (10, 10, 9, 10, 9):
            pipe.step(X[:samples], target=SEVERAL[:samples])
    assert asked.call_count == 2  # for each batch size


class TimeFirst(nn.Module):
    """Takes and returns rows of a sequence, then samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


def flattened(o: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(o.flatten(0, 1), t.flatten())


@pytest.mark.smoke
@pytest.mark.parametrize(("length", "told"), [(3, True), (2, False)])
def test_outputs_are_joined_along_their_batch_dimension_or_not_at_all(
    length: int, told: bool
) -> None:
    """Where a sequence is as long as a micro-batch is large, nothing says which is which."""
    x = torch.randn(length, 8, 4, generator=RANDOM, dtype=torch.float64)
    y = torch.randint(5, (length, 8), generator=RANDOM)
    options: dict[str, Any] = {"microbatches": 4, "batch_dims": {"x": 1, "target": 1}}
    with fxpipe.compile(TimeFirst(), 1, loss=flattened, **options) as pipe:
        pipe.step(x, target=y)  # a warning would be an error

    def root(o: Tensor, t: Tensor) -> Tensor:
        return flattened(o, t).sqrt()

    with (
        fxpipe.compile(TimeFirst(), 1, loss=root, **options) as pipe,
        warnings.catch_warnings(record=True) as found,
    ):
        warnings.simplefilter("always")
        pipe.step(x, target=y)
    assert bool(found) == told


def test_what_is_counted_is_compared_as_counted() -> None:
    assert_whole(masked_mean, X, IGNORING, 4, extensions=[fxpipe.LossWeight(counted)])

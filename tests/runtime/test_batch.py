"""Batches: split as ``tensor_split`` does, joined again, and told apart by name in messages."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.errors import InputError
from fxpipe.ir.traced import SEED
from fxpipe.random import mix
from fxpipe.runtime.batch import Batch
from fxpipe.runtime.host import BatchHost, draw_seed, join, next_seed
from tests.helpers.fronted import front_end
from tests.helpers.tiny import adam, batch, pipe_of
from tests.oracles import loop


class Takes(nn.Module):
    def forward(self, x: Any, mask: Any = None, *rest: Any, scale: Any = 1, **more: Any) -> Any:
        return x


def batch_of(*args: Any, targets: tuple[Any, ...] = (), **kwargs: Any) -> Batch:
    return Batch.of(Takes(), args, kwargs, targets)


@given(st.integers(1, 40), st.integers(1, 40))
def test_parts_are_those_of_tensor_split(size: int, microbatches: int) -> None:
    x, y = torch.arange(size), torch.randn(size, 2)
    batch = batch_of(x, targets=(y,))
    if microbatches > size:
        with pytest.raises(InputError, match=rf"microbatches is {microbatches}.*has {size} samp"):
            batch.split(microbatches)
        return
    parts = batch.split(microbatches)
    for part, a, b in zip(
        parts, x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True
    ):
        assert torch.equal(part[0], a)
        assert torch.equal(part[1], b)
    sizes = batch.sizes(microbatches)
    assert sizes == [len(part[0]) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_what_has_no_batch_is_repeated() -> None:
    row, number, name = torch.randn(1, 4), torch.tensor(3.0), "mean"
    batch = batch_of(torch.randn(6, 4), row, number, scale=name, more=7)
    for _, *shared in batch.split(3):
        assert torch.equal(shared[0], row)
        assert torch.equal(shared[1], number)
        assert shared[2:] == [7, "mean"]


def test_a_batch_of_one_row_is_a_batch_of_one() -> None:
    batch = batch_of(torch.randn(1, 4), torch.randn(1, 2))
    assert batch.size == 1
    assert [len(leaf) for leaf in batch.split(1)[0]] == [1, 1]


def test_nests_come_back_as_they_were() -> None:
    inner: dict[str, Any] = {"left": torch.randn(4, 1), "right": [torch.randn(4), None]}
    target: tuple[Any, ...] = (torch.randn(4), {"weight": torch.randn(4, 2)})
    batch = batch_of(torch.randn(4, 2), inner, scale=(torch.randn(4), 2), targets=target)
    args, kwargs, targets = batch.unflatten(batch.split(2)[1])
    assert torch.equal(args[1]["left"], inner["left"][2:])
    assert torch.equal(args[1]["right"][0], inner["right"][0][2:])
    assert args[1]["right"][1] is None
    assert kwargs["scale"][1] == 2
    assert torch.equal(targets[1]["weight"], target[1]["weight"][2:])
    assert batch.inputs == len(batch.leaves) - 2


def test_leaves_are_called_as_a_user_would_write_them() -> None:
    batch = batch_of(
        torch.randn(4),
        {"left": torch.randn(4)},
        torch.randn(4),
        scale=[torch.randn(4)],
        other=torch.randn(4),
        targets=(torch.randn(4),),
    )
    assert batch.names == ("x", "mask['left']", "argument 2", "other", "scale[0]", "target")
    one = batch_of(torch.randn(4), targets=({"a": torch.randn(4)},))
    assert one.names == ("x", "target['a']")
    two = batch_of(torch.randn(4), targets=(torch.randn(4), {"a": torch.randn(4)}))
    assert two.names == ("x", "target[0]", "target[1]['a']")


def test_sizes_that_disagree_are_told_by_name() -> None:
    with pytest.raises(InputError, match=r"x has 4, target\[0\] has 4, target\[1\] has 5; give"):
        batch_of(torch.randn(4), targets=(torch.randn(4), torch.randn(5)))
    with pytest.raises(InputError, match=r"x has 4, mask\['a'\] has 5, target has 1; .*size 1"):
        batch_of(torch.randn(4), {"a": torch.randn(5, 4)}, targets=(torch.randn(1),))


def test_a_list_with_an_entry_for_each_sample_is_refused_in_few_words() -> None:
    boxes = [
        {"boxes": torch.randn(1 + i % 3, 4), "labels": torch.ones(1 + i % 3)} for i in range(9)
    ]
    with pytest.raises(InputError) as raised:
        batch_of(torch.randn(9), targets=(boxes,))
    assert "x has 9, target[0]['boxes'] has 1" in str(raised.value)
    assert "target[2]['boxes'] has 3, …; give" in str(raised.value)
    assert "target[8]" not in str(raised.value)
    assert str(raised.value).endswith("pad the entries, stack them, and give their lengths, too")
    with pytest.raises(InputError, match=r"'table': None}\n"):  # several targets are no such list
        batch_of(torch.randn(4), targets=(torch.randn(4), torch.randn(5)))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((3, torch.tensor(1.0)), "no input is a tensor with a batch dimension"),
        ((torch.randn(0, 4),), "x has no samples"),
        ((), r"do not fit Takes\.forward: .*'x'"),
    ],
)
def test_calls_without_a_batch_are_refused(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        batch_of(*args)


def test_the_key_tells_calls_apart_that_need_another_trace() -> None:
    key = batch_of(torch.randn(4, 3), 2).key(range(9))
    assert batch_of(torch.randn(7, 3), 2).key(range(9)) == key
    others = [
        batch_of(torch.randn(4, 2), 2),
        batch_of(torch.randn(4, 3), 3),
        batch_of(torch.randn(4, 3), True),
        batch_of(torch.randn(4, 3), 2.0),
        batch_of(torch.randn(4, 3).double(), 2),
        batch_of(torch.randn(4, 3), mask=2),
        batch_of([torch.randn(4, 3)], 2),
        batch_of(torch.randn(4, 3), 2, targets=(torch.randn(4),)),
    ]
    assert key not in [other.key(range(9)) for other in others]
    assert batch_of(torch.randn(4), scale=1, a=2).key(range(9)) == batch_of(
        torch.randn(4), a=2, scale=1
    ).key(range(9))


def test_micro_batches_carry_no_history() -> None:
    x = torch.randn(4, 2, requires_grad=True) * 2
    assert not any(leaf.requires_grad for part in batch_of(x).split(2) for leaf in part)


# joining

SIZES = [3, 2]


def test_rows_are_concatenated() -> None:
    whole = torch.randn(5, 2)
    for dims in ((0,), None):
        assert torch.equal(join(list(whole.split(SIZES)), SIZES, dims, "y"), whole)


@pytest.mark.parametrize("parts", [[torch.tensor(2.5)], [torch.tensor([1, 2])] * 2])
def test_what_is_joined_has_memory_of_its_own(parts: list[Tensor]) -> None:
    """A device goes on to compute while the caller reads it, and may reuse that of the parts."""
    made = join(parts, [1] * len(parts), (), "loss")
    assert torch.equal(made, parts[0]) and made.data_ptr() != parts[0].data_ptr()


def test_numbers_are_averaged_by_samples() -> None:
    whole = torch.randn(5, dtype=torch.float64)
    parts = [part.mean() for part in whole.split(SIZES)]
    torch.testing.assert_close(join(parts, SIZES, (), "y"), whole.mean())


@pytest.mark.parametrize(
    "same",
    [3, "text", None, torch.tensor(4), torch.eye(3), torch.tensor(True)],
    ids=["int", "str", "None", "scalar", "matrix", "bool"],
)
def test_what_is_the_same_everywhere_is_handed_over_once(same: Any) -> None:
    joined = join([same, same], SIZES, None, "y")
    assert torch.equal(joined, same) if isinstance(same, Tensor) else joined is same


def test_what_is_not_batched_is_not_concatenated_though_its_size_is_the_samples() -> None:
    table = torch.randn(2, 4)
    assert torch.equal(join([table, table], [2, 2], (), "y"), table)


@pytest.mark.parametrize(
    "parts",
    [
        [torch.randn(4, 2), torch.randn(4, 2)],
        [torch.tensor(1), torch.tensor(2)],
        [1, 2],
        [torch.randn(3), torch.randn(4)],
    ],
    ids=["tables", "counts", "numbers", "sizes"],
)
def test_what_differs_and_has_no_batch_is_refused_by_name(parts: list[Any]) -> None:
    with pytest.raises(InputError, match=r"the answer differs between micro-batches.*per sample"):
        join(parts, SIZES, None, "the answer")


# the caller's side of a run


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = nn.functional.dropout(x, 0.5)
        return y, y.mean()


def host(batch: int = 5, microbatches: int = 2, seed: int = 3) -> BatchHost:
    x = torch.randn(batch, 4)
    traced = front_end(Dropped(), x)
    names = frozenset(out.name for out in traced.outputs if hasattr(out, "name"))
    batched = Batch.of(Dropped(), (x,), {})
    return BatchHost(traced, batched.in_parts(microbatches), names, seed)


def test_each_micro_batch_has_a_seed_of_its_own() -> None:
    seeds = [int(seed) for seed in host().inputs[SEED]]
    assert seeds == [mix(3, 0), mix(3, 1)]
    assert len(set(seeds)) == 2


def test_windows_over_a_series_may_be_followed_by_rows_that_share_no_memory() -> None:
    """The graph was traced with windows; a copy of rows with the windows' strides loses values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    alone = copy.deepcopy(model)
    with fxpipe.compile(model, 2, microbatches=2, loss=mse_loss, partition=["2"]) as pipe:
        for x in (
            torch.randn(9).unfold(0, 4, 1),
            torch.randn(6, 4),
            torch.randn(6, 1).expand(6, 4),
        ):
            made = pipe.step(x, target=torch.ones(6, 4))
            there = loop.train(alone, 2, x, loss=mse_loss, target=torch.ones(6, 4))
            assert torch.equal(made, there.loss)
            loop.assert_same(loop.gradients(model), loop.gradients(alone))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(300, 300)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * scale
        return y


def test_the_gradient_of_a_shared_input_is_summed_as_a_loop_adds_it() -> None:
    """With five addends or more, ``torch.sum`` adds in another order."""
    torch.manual_seed(0)
    model, x, scale = Scaled(), torch.randn(8, 300), torch.randn(300, requires_grad=True)
    theirs = scale.detach().clone().requires_grad_()
    with fxpipe.compile(model, 1, microbatches=8, batch_dims={"scale": None}) as pipe:
        pipe(x, scale).square().sum().backward()
    for part in x.split(1):
        model(part, theirs).square().sum().backward()
    loop.assert_same({"scale": scale.grad}, {"scale": theirs.grad})


def test_a_micro_batchs_loss_weighs_its_share() -> None:
    here = host()
    assert here.micro.weights == [3 / 5, 2 / 5]
    here.traced = replace(here.traced, loss="loss")
    here.weigh_loss(torch.float64)
    assert [float(g) for g in here.gradients["loss"]] == here.micro.weights
    here.outputs["loss"] = [torch.tensor(1.0), torch.tensor(2.0)]
    torch.testing.assert_close(here.loss(), torch.tensor(1.4))


def test_a_seed_looked_at_is_the_one_drawn_next() -> None:
    ahead = next_seed()
    assert next_seed() == ahead
    assert draw_seed() == ahead
    assert draw_seed() != ahead


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_training_of_a_model_that_draws_nothing_leaves_torchs_generator_alone(
    schedule: str,
) -> None:
    with pipe_of(2, schedule, optimizer=adam) as pipe:
        x, y = batch()
        pipe.step(x, target=y)
        before = torch.get_rng_state()
        pipe.step(x, target=y)
        pipe(x)
        assert torch.equal(torch.get_rng_state(), before)

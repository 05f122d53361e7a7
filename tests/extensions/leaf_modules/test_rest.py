"""A line of the model's own forward that cannot be traced: what follows is called as it is."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers.modeling_outputs import BaseModelOutput

import fxpipe
from tests.helpers.profiles import some
from tests.helpers.speech import MODELS, sounds, speech
from tests.oracles import loop

Function = Callable[[Any, Tensor], Tensor]


class Wraps(nn.Linear):
    """Returns a dict with attributes and indices, as models of transformers do."""

    def forward(self, x: Tensor) -> Any:
        return BaseModelOutput(super().forward(x))


class Net(nn.Module):
    """Any function of three layers, a weight of its own, and some other modules."""

    calls: Tensor

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.rand(4))
        self.norm, self.wraps = nn.BatchNorm1d(4), Wraps(4, 4)
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.scaled = nn.Embedding(8, 4, max_norm=0.5)
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(4, 20, [5, 10], div_value=2.0)
        self.register_buffer("calls", torch.zeros(()))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def branches(net: Any, x: Tensor) -> Tensor:
    y: Tensor = net.last(net.middle(net.first(x))) * net.scale
    return y if y.sum() > 0 else -y  # here


def masks(net: Any, x: Tensor) -> Tensor:
    y = net.middle(net.first(x))
    z, chosen = y.clone(), y[:, 0] > 0
    z[chosen] = y[chosen] * net.scale  # here
    made: Tensor = net.last(z)
    return made


def reads(net: Any, x: Tensor) -> Tensor:
    y: Tensor = net.middle(net.first(x))
    return y * y.mean().item()


def lists(net: Any, x: Tensor) -> Tensor:
    y: Tensor = net.middle(net.first(x))
    return y * len([v for v in y.flatten().tolist() if v > 0])


def as_array(net: Any, x: Tensor) -> Tensor:
    y: Tensor = net.middle(net.first(x))
    return y + torch.from_numpy(2 * y.detach().numpy())


def differentiates(net: Any, x: Tensor) -> Tensor:
    y = net.middle(net.first(x))
    made: Tensor = net.last(torch.func.grad(lambda z: (z * net.scale).tanh().sum())(y))
    return made


def packs(net: Any, x: Tensor) -> Tensor:
    y = net.middle(net.first(x))
    lengths = (y[:, 0] > 0).long() + 1
    sequences = y.unsqueeze(1).expand(-1, 3, -1)
    packed = pack_padded_sequence(sequences, lengths, batch_first=True, enforce_sorted=False)
    made: Tensor = pad_packed_sequence(net.recurrent(packed)[0], True, total_length=3)[0]
    return made[:, 0]


def chooses(net: Any, x: Tensor) -> Tensor:
    y: Tensor = net.middle(net.first(x))
    made: Tensor = torch.cond(y.sum() > 0, torch.sin, lambda y: y * y, (y,))
    return made


def chooses_a_layer(net: Any, x: Tensor) -> Tensor:
    y = net.first(x)
    made: Tensor = net.middle(y) if y.sum() > 0 else net.last(y)
    return made


def scales_rows(net: Any, x: Tensor) -> Tensor:
    y = net.middle(net.first(x))
    made: Tensor = net.scaled((y[:, 0] > 0).long()) + y
    return made if made.sum() > 0 else -made


def adapts(net: Any, x: Tensor) -> Tensor:
    y = net.middle(net.first(x))
    words = (y[:, 0] > 0).long() * 12
    made: Tensor = net.softmax(y, words).output.unsqueeze(1) * y
    return made if made.sum() > 0 else -made


def uses_a_weight_twice(net: Any, x: Tensor) -> Tensor:
    y: Tensor = F.linear(net.middle(net.first(x)), net.first.weight)
    return y if y.sum() > 0 else -y


def counts_and_normalizes(net: Any, x: Tensor) -> Tensor:
    y: Tensor = net.middle(net.first(x))
    y = y if y.sum() > 0 else -y
    net.calls.add_(1)
    made: Tensor = net.norm(y) / net.calls
    return made


def writes_into_what_a_layer_gives(net: Any, x: Tensor) -> Tensor:
    y = net.first(x)
    y += net.middle(x)
    made: Tensor = net.last(y)
    return made if made.sum() > 0 else -made


def checks(net: Any, x: Tensor) -> Tensor:
    if x.max() > 100:
        raise ValueError("too large")
    y: Tensor = net.last(net.middle(net.first(x)))
    return y if y.sum() > 0 else -y


def reads_an_object(net: Any, x: Tensor) -> Tensor:
    made = net.wraps(net.middle(net.first(x)))
    y: Tensor = net.last(made[0]) * made.last_hidden_state
    return y if y.sum() > 0 else -y  # here


EVERY = [
    *(branches, masks, reads, lists, as_array, differentiates, packs, chooses, chooses_a_layer),
    *(scales_rows, adapts, uses_a_weight_twice, counts_and_normalizes),
    *(writes_into_what_a_layer_gives, checks, reads_an_object),
]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.cond's own
@pytest.mark.parametrize("function", some(EVERY))
def test_what_follows_the_line_is_called_and_what_comes_before_is_cut(
    function: Function, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = Net(function)
    alone = copy.deepcopy(model)
    theirs = torch.optim.SGD(alone.parameters(), lr=0.5)
    cuts: Any = "auto" if function is chooses_a_layer else ["middle"]
    with (
        caplog.at_level(logging.WARNING, "fxpipe"),
        fxpipe.compile(
            model,
            2 * ["cpu"],
            microbatches=2,
            loss=F.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
            partition=cuts,
        ) as pipe,
    ):
        for rows in (8, 8, 6):
            x, y = torch.randn(rows, 4), torch.randn(rows, 4)
            made = pipe.step(x, target=y)
            expected = loop.train(alone, 2, x, loss=F.mse_loss, target=y)
            theirs.step()
            theirs.zero_grad()
            assert torch.equal(made, expected.loss)
    loop.assert_same(model.state_dict(), alone.state_dict())
    messages = [r.getMessage() for r in caplog.records if r.name == "fxpipe"]
    (message,) = (m for m in messages if "What forward does after its call of '" in m)
    assert message.startswith("Net cannot be traced at ")
    assert "in one stage: no cut falls into it, autograd drives backward" in message
    assert "in a submodule of its own" in message


def test_the_models_own_checks_are_made_in_every_step() -> None:
    model, x = Net(checks), torch.randn(8, 4)
    with fxpipe.compile(model, 2 * ["cpu"], microbatches=2, loss=F.mse_loss) as pipe:
        pipe.step(x, target=x)
        with pytest.raises(fxpipe.FxpipeError, match="too large"):
            pipe.step(x + 1000, target=x)


def test_what_forward_draws_by_itself_is_drawn_once() -> None:
    def draws(net: Any, x: Tensor) -> Tensor:
        y = F.dropout(net.middle(net.first(x)), 0.5)
        z = net.last(y)
        made: Tensor = z - y if z.sum() > 0 else y - z
        return made

    torch.manual_seed(0)
    model = Net(draws)
    with torch.no_grad():
        model.last.weight.copy_(torch.eye(4))
        model.last.bias.zero_()
    with fxpipe.compile(model, 2 * ["cpu"], microbatches=2, loss=F.mse_loss) as pipe:
        assert pipe.step(torch.randn(8, 4), target=torch.zeros(8, 4)) == 0


def test_a_line_before_all_calls_leaves_one_stage(caplog: pytest.LogCaptureFixture) -> None:
    def begins(net: Any, x: Tensor) -> Tensor:
        made: Tensor = net.last(net.first(x if x.sum() > 0 else -x))
        return made

    torch.manual_seed(0)
    model = Net(begins)
    alone = copy.deepcopy(model)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with (
        caplog.at_level(logging.WARNING, "fxpipe"),
        fxpipe.compile(model, ["cpu"], microbatches=2, loss=F.mse_loss) as pipe,
    ):
        made = pipe.step(x, target=y)
    assert torch.equal(made, loop.train(alone, 2, x, loss=F.mse_loss, target=y).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
    assert "The model is therefore called as it is, with 'first', 'last'" in caplog.text


def test_a_branch_that_reads_another_weight_later_is_refused_by_name() -> None:
    def reads_another(net: Any, x: Tensor) -> Tensor:
        y = net.middle(net.first(x))
        made: Tensor = y * net.first.weight[0] if y.sum() > 0 else y
        return made

    torch.manual_seed(0)
    model = Net(reads_another)
    with torch.no_grad():
        for layer in (model.first, model.middle):
            layer.weight.copy_(torch.eye(4))
            layer.bias.zero_()
    x = torch.ones(4, 4)
    with fxpipe.compile(model, 2 * ["cpu"], microbatches=2, loss=F.mse_loss) as pipe:
        pipe.step(-x, target=x)
        message = r"the rest of forward reads 'first.weight', and did not when .* was traced"
        with pytest.raises(fxpipe.FxpipeError, match=message):
            pipe.step(x, target=x)


@pytest.mark.parametrize("base", MODELS)
def test_ctc_models_of_speech_train_by_their_own_loss(base: str) -> None:
    torch.manual_seed(0)
    dropouts = "hidden_dropout", "attention_dropout", "feat_proj_dropout", "activation_dropout"
    none = dict.fromkeys(("layerdrop", *dropouts), 0.0)
    model = speech(base, apply_spec_augment=False, **none)
    alone = copy.deepcopy(model)
    x, labels = sounds()
    labels[0, 3:] = -100
    with fxpipe.compile(model, 2 * ["cpu"], microbatches=2, partition=["lm_head"]) as pipe:
        made = pipe.step(x, labels=labels)
    assert torch.equal(made, loop.train(alone, 2, x, labels=labels).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_a_cut_in_the_rest_or_in_a_leaf_module_is_refused_with_its_reason() -> None:
    model = Net(masks)
    for partition, why in (
        (["last"], "submodule 'last' computes nothing outside of .* cut at a submodule that"),
        (["middle.0"], "submodule 'middle.0' is inside of 'middle', .* cut at 'middle'"),
    ):
        model.middle = nn.Sequential(nn.Linear(4, 4))  # type: ignore[assignment]
        with (
            fxpipe.compile(
                model,
                2,
                loss=F.mse_loss,
                extensions=[fxpipe.LeafModules("middle")],
                partition=partition,
            ) as pipe,
            pytest.raises(fxpipe.PartitionError, match=why),
        ):
            pipe.step(torch.randn(8, 4), target=torch.randn(8, 4))


def test_the_text_of_a_plan_names_a_rest_and_a_loss_as_they_are() -> None:
    with fxpipe.compile(Net(masks), 2, microbatches=2, loss=F.mse_loss) as pipe:
        pipe.prepare(torch.randn(8, 4), target=torch.randn(8, 4))
        text = str(pipe.plan)
        assert "self.fxpipe_rest(" in text and "self.fxpipe_loss(" in text

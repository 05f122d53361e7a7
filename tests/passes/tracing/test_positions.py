"""Positions that a model of transformers counts by itself need no mask in a trace, either."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import masking_utils

import fxpipe
from tests.oracles import loop

WORDS = 31
SIZES: dict[str, Any] = {
    **{"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "head_dim": 4, "use_cache": False},
}


class Looks(nn.Module):
    """Adds the number of each word's text in its row, as transformers finds it in positions."""

    def __init__(self, positions: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.positions = nn.Linear(6, 6), positions

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        found = masking_utils.find_packed_sequence_indices(self.positions(x, given))
        made: Tensor = self.linear(x)
        return made if found is None else made + found


def written(x: Tensor, given: Tensor) -> Tensor:
    made = torch.arange(6).unsqueeze(0) + 0
    made[:, 3:] = torch.arange(3)
    return made


def written_through_a_view(x: Tensor, given: Tensor) -> Tensor:
    made = torch.arange(6)
    row = made.unsqueeze(0)
    made[3:].sub_(3)
    return row


KNOWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "counted": lambda x, given: torch.arange(x.shape[1]).unsqueeze(0),
    "counted on": lambda x, given: (torch.arange(x.shape[1]) + 3)[None],
    "counted for each row": lambda x, given: torch.arange(6).unsqueeze(0).expand(x.shape[0], -1),
    "counted for several axes": lambda x, given: (
        torch.arange(6).view(1, 1, -1).expand(4, x.shape[0], -1)[2]
    ),
    "counted from the other side": lambda x, given: 2 + torch.arange(2, 8, device=x.device)[None],
}
OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "given": lambda x, given: given,
    "made of what is given": lambda x, given: torch.arange(6)[None] + 0 * given,
    "counted over the end of a row": lambda x, given: (
        torch.arange(6).expand(x.shape[0], -1).contiguous().view(-1)[None, 3:9]
    ),
    "in steps of two": lambda x, given: torch.arange(0, 12, 2)[None],
    "written": written,
    "written through a view": written_through_a_view,
}


@pytest.mark.parametrize("made", [*KNOWN, *OTHERS])
def test_positions_are_known_where_the_model_counts_them_and_looked_at_elsewhere(made: str) -> None:
    torch.manual_seed(0)
    model = Looks({**KNOWN, **OTHERS}[made])
    x = torch.randn(8, 6)
    with fxpipe.compile(model, ["cpu"], microbatches=2) as pipe:
        for given in (torch.arange(6), torch.arange(6).remainder(3), torch.arange(6)):
            rows = given.repeat(8, 1)
            assert torch.equal(pipe(x, rows), model(x, rows))
        looked = any("cumsum" in str(node.target) for node in nodes(pipe))
    assert looked == (made in OTHERS)


@pytest.mark.parametrize("packed", [False, True])
def test_training_with_shared_keys_equals_the_loop_with_and_without_packed_texts(
    packed: bool,
) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    alone = copy.deepcopy(model)
    words = torch.randint(WORDS, (8, 6))
    texts = {"position_ids": torch.arange(6).remainder(3).repeat(8, 1)}
    more: dict[str, Any] = texts if packed else {}
    with fxpipe.compile(model, 2, schedule="1f1b", microbatches=4) as pipe:
        for _ in range(2):
            made = pipe.step(input_ids=words, labels=words, **more)
            train = partial(loop.train, alone, 4, loss=lambda output: output.loss)
            expected = train(input_ids=words, labels=words, **more)
            assert torch.equal(made, expected.loss)
        attention = [n for n in nodes(pipe) if "scaled_dot_product" in str(n.target)]
        assert attention
        masked = [len(node.all_input_nodes) > 3 for node in attention]  # queries, keys and values
        assert masked == [packed] * len(attention)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def nodes(pipe: fxpipe.Pipeline) -> list[torch.fx.Node]:
    graphs = (stage.forward.graph for stage in pipe.plan.stages if stage.forward is not None)
    return [node for graph in graphs for node in graph.nodes]

"""Models of others with a line that no tracer takes: a submodule around it is called as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from tests.helpers.profiles import deep
from tests.leaf_modules.draws import seeded
from tests.oracles import loop


class Call(NamedTuple):
    """A model and a step of it."""

    model: nn.Module
    args: tuple[Tensor, ...]
    kwargs: Mapping[str, Tensor] = {}
    target: Tensor | None = None
    loss: Callable[..., Tensor] | None = None


def words(length: int = 8) -> Tensor:
    return torch.randint(2, 20, (4, length))


def longformer() -> Call:
    """It pads to its windows by a branch on sizes and masks."""
    config = transformers.LongformerConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        attention_window=[4, 4],
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    x = words()
    mask = torch.ones_like(x)
    return Call(
        transformers.LongformerForMaskedLM(config), (x,), {"attention_mask": mask, "labels": x}
    )


def qwen3_moe() -> Call:
    """Its experts are looped over by which of them were hit."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        experts_implementation="eager",
        use_cache=False,
    )
    x = words()
    return Call(transformers.Qwen3MoeForCausalLM(config), (x,), {"labels": x})


def encodec() -> Call:
    """Its padding is a number read from a tensor."""
    config = transformers.EncodecConfig(
        num_filters=4,
        hidden_size=8,
        codebook_size=16,
        codebook_dim=8,
        upsampling_ratios=[2, 2],
        num_lstm_layers=1,
        num_residual_layers=1,
        target_bandwidths=[1.5],
        sampling_rate=1000,
    )
    x = torch.randn(4, 1, 64)
    model = transformers.EncodecModel(config)
    return Call(model, (x,), {}, x, lambda out, target: F.mse_loss(out["audio_values"], target))


def detr() -> Call:
    """It looks for values that are not finite."""
    backbone = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        out_features=["stage4"],
        layer_type="basic",
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_queries=5,
        num_labels=3,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
    )

    def loss(out: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(out["logits"].flatten(0, 1), target.flatten())

    model = transformers.DetrForObjectDetection(config)
    return Call(model, (torch.randn(4, 3, 32, 32),), {}, torch.randint(4, (4, 5)), loss)


@pytest.mark.parametrize("make", [encodec, *deep(longformer, qwen3_moe, detr)])
def test_its_step_equals_the_loops(make: Callable[[], Call]) -> None:
    torch.manual_seed(0)
    model, args, kwargs, target, loss = make()
    alone = copy.deepcopy(model.train())
    with fxpipe.compile(model, 2 * ["cpu"], microbatches=2, loss=loss) as pipe:
        made = pipe.step(*args, target=target, return_output=False, **kwargs)
    whole = loop.train(alone, 2, *args, loss=loss, target=target, **dict[str, Any](kwargs))
    assert torch.equal(made, whole.loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


@pytest.mark.deep
def test_layers_that_marian_drops_are_those_of_a_loop_with_the_same_draws() -> None:
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=20,
        d_model=16,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=16,
        pad_token_id=0,
        decoder_start_token_id=0,
        encoder_layerdrop=0.4,
        decoder_layerdrop=0.4,
        dropout=0.0,
        use_cache=False,
    )
    model = transformers.MarianMTModel(config).train()
    alone = copy.deepcopy(model)
    x, labels = words(6), words(5)
    losses = []
    with fxpipe.compile(model, 2 * ["cpu"], microbatches=2) as pipe:
        for step in range(3):
            torch.manual_seed(step)
            losses.append(pipe.step(x, labels=labels))
    for step, made in enumerate(losses):
        with seeded([alone.model.encoder, alone.model.decoder], step, 2):
            assert torch.equal(made, loop.train(alone, 2, x, labels=labels).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))

"""Train a small model of every architecture that transformers has, beside a plain loop.

Each name in the tables from configurations to models (of text to go on with, of masked text, of
text to text, and of classes of images) becomes a small model with random weights, and is trained
over two CPU devices and in a plain loop over the same micro-batches. Nothing is downloaded. What
comes of each is one row: equal to the bit, how far apart, or why there is nothing to compare.

Run it with ``python -m benchmarks.models.many``; it takes some twenty minutes on two cores. Kinds
and names of architectures choose some, whose rows replace those of the same day's results.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from multiprocessing import get_context
from typing import Any, Protocol, TypeVar

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

import fxpipe
from benchmarks.machine import Machine, describe
from benchmarks.models.cases import Batch
from benchmarks.models.exact import MICROBATCHES, ROWS, step
from benchmarks.report import RESULTS, Figure, Grid, Report
from examples.plain import one_thread

KINDS: dict[str, Mapping[str, Any]] = {
    "CausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "MaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "Seq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "ImageClassification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
NAME = "models-many"
"""Of the results."""

OUTCOMES = ("equal", "differs", "refused", "fails", "not built")
PROCESSES = 2
MODELS = 20
"""That one process tries; torch and transformers keep much of each."""

STEPS = 3
LAYERS = 2
LENGTH = 16
WORDS = 96
SECONDS = 240
"""How long one model may take."""

PARAMETERS = 40_000_000
"""How many a small model may have."""

DEEP = r"(num_|n_)?(hidden_|encoder_|decoder_)?layers?|num_\w+_layers|(num_|n_)blocks"
"""The pattern of the names of numbers of layers."""

SIZES: tuple[tuple[str, int], ...] = (
    (r"\w*vocab_size\w*|n_token|encoder_hash_byte_group_vocab", WORDS),
    (r"num_kv_shared_layers|num_nextn_predict_layers", 0),
    (r"n_group|topk_group|num_expert_group", 1),
    (DEEP, LAYERS),
    (r"depths?|num_block_repeats|stage_num_blocks|stage_numb_of_layers", 1),
    (r"num_self_attends_per_block|n_shared_experts", 1),
    (r"\w*experts_per_tok(en)?|\w*top_?k|moe_k", 2),
    (r"\w*(num|n_routed|local)_experts", 4),
    (r"n_groups|mamba_ngroups|window_size", 2),
    (r"attention_head_dim|mamba_d_head|mamba_headdim", 16),
    (r"(?!qk_head)\w*head_dim|attention_head_size|d_head|d_kv", 8),
    (r"rotary_dim", 4),
    (r"\w*heads?", 4),
    (r"\w*(intermediate_size|ffn_dim|ffn_hidden_size)|d_ff|n_inner|d_inner|mamba_d_ssm", 64),
    (r"attention_hidden_size|image_size", 64),
    (r"max_\w*position_embeddings|n_positions|max_seq_len|max_sequence_length", 64),
    (r"embed_dim", 24),
    (r"\w*hidden_size(_\w+)?|d_model|d_latents|n_embd|\w+_embed_dim|emb_dim", 32),
    (r"embedding_(size|dim)|dim|hidden_dim|adapter_in\w+", 32),
    (r"\w+_lora_rank|num_latents", 16),
    (r"patch_size", 8),
)
"""Patterns of the names of sizes, and what each may be at most; the first that fits counts."""

UNCHANGED = ("id2label", "label2id", "per_layer_config")
"""Tables in configurations that no size is in."""

OWN: dict[str, dict[str, Any]] = {
    "bit": {"num_groups": 8},
    "cvt": {"depth": [1, 2, 3]},
    "dots3_note_text": {"layer_types": ["indexed_attention"] * 2, "per_layer_config": {}},
    "efficientnet": {"hidden_dim": 320, "width_coefficient": 0.25},
    "esm": {"mask_token_id": 2, "pad_token_id": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hgnet_v2": {"hidden_sizes": [256, 512, 1024, 2048]},
    "levit": {"image_size": 224, "patch_size": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 16},
    "neomme": {"head_dim": 16},
    "perceiver": {"max_position_embeddings": 16},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 4]},
    "regnet": {"groups_width": 8},
    "textnet": {"hidden_sizes": [64, 64, 128, 256, 512]},
    "xmod": {"default_language": "en_XX"},
}
"""Values of configurations that names do not tell."""


@dataclass(frozen=True)
class Row:
    """What came of one architecture.

    Attributes:
        kind: of model, one of ``KINDS``.
        name: of the architecture.
        outcome: one of ``OUTCOMES``.
        remark: by how much or why, or what is called as it is.
    """

    kind: str
    name: str
    outcome: str
    remark: str


class NotBuiltError(Exception):
    """There is no small model, or it does not train by itself."""


def main() -> int:
    """Returns the exit status: 1 where a model differs, or fails with an error of others."""
    told = "Train models of transformers beside a loop."
    rows = tried(told, attempt, published, reported, PROCESSES)
    return int(any(row.outcome in ("differs", "fails") for row in rows))


class Tried(Protocol):
    """What came of one architecture."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...


R = TypeVar("R", bound=Tried)


def tried(
    description: str,
    attempt: Callable[[tuple[str, str]], R],
    published: Callable[[Machine], dict[tuple[str, str], R]],
    reported: Callable[[Sequence[R], Machine], Report],
    processes: int,
) -> Sequence[R]:
    """Try all architectures, or those that the command line names, and publish a report.

    Args:
        description: of the command.
        attempt: tries an architecture, which is its kind and name.
        published: the rows of the same day's results, by kind and name.
        reported: the report of some rows.
        processes: how many try at a time.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("names", nargs="*", help="kinds or architectures; all by default")
    names = set(parser.parse_args().names)
    machine = describe()
    every = [(kind, name) for kind, table in KINDS.items() for name in table]
    wanted = [each for each in every if not names or names & set(each)]
    rows = published(machine) if names else {}
    context = get_context("forkserver")
    context.set_forkserver_preload(["fxpipe", "transformers"])
    with context.Pool(processes, maxtasksperchild=MODELS) as pool:
        for count, row in enumerate(pool.imap_unordered(attempt, wanted), 1):
            rows[row.kind, row.name] = row
            print(f"{count}/{len(wanted)}", row, flush=True)
            # an error later on shall lose nothing
            report = reported([rows[each] for each in every if each in rows], machine)
            report.write(RESULTS)
    report.publish()
    return [*rows.values()]


def published(machine: Machine) -> dict[tuple[str, str], Row]:
    """The rows of the same day's results, if there are any."""
    path = RESULTS / f"{NAME}-{machine.date}.json"
    grids = json.loads(path.read_text())["grids"] if path.exists() else [{"rows": []}]
    return {(row[0], row[1]): Row(*row) for row in grids[0]["rows"]}


def reported(rows: Sequence[Row], machine: Machine) -> Report:
    counts = Counter(row.outcome for row in rows)
    told = {
        "transformers": transformers.__version__,
        "batch": f"{ROWS} in {MICROBATCHES} micro-batches, {STEPS} steps with AdamW",
        "equal": "losses, weights and buffers have the bits of a loop over the same micro-batches",
        "refused": "by an error of fxpipe's own",
        "not built": "no small configuration was found, or the model does not train by itself",
        "rows": "all of one day; a later call replaces those that it tries again",
    }
    figures = [Figure("architectures", len(rows)), *(Figure(o, counts[o]) for o in OUTCOMES)]
    grid = Grid(("kind", "architecture", "outcome", "remark"), [astuple(row) for row in rows])
    title = "Every architecture of transformers beside a plain loop"
    return Report(NAME, title, told, figures, machine, [grid])


def attempt(architecture: tuple[str, str]) -> Row:
    """Train one architecture both ways, whatever comes of it."""
    with limited(SECONDS), one_thread(), warned() as leaves:
        try:
            outcome, remark = compared(*built(*architecture))
        except NotBuiltError as error:
            outcome, remark = "not built", str(error)
        except fxpipe.FxpipeError as error:
            outcome, remark = "refused", named(error)
        except Exception as error:
            outcome, remark = "fails", named(error)
    told = [remark] if outcome not in ("equal", "differs") else [remark, *leaves]
    return Row(*architecture, outcome, brief("; ".join(filter(None, told))))


def built(kind: str, name: str) -> tuple[nn.Module, list[Batch], nn.Module, list[Tensor]]:
    """A small model with its batches, and what the plain loop makes of both.

    Raises:
        NotBuiltError: there is none, or the loop is at fault.
    """
    try:
        model, batches = made(kind, name)
        return model, batches, *looped(model, batches)
    except NotBuiltError:
        raise
    except Exception as error:
        raise NotBuiltError(named(error)) from error


def made(kind: str, name: str, layers: int = LAYERS) -> tuple[nn.Module, list[Batch]]:
    """A small model of an architecture, in training, and batches for it.

    Args:
        kind: of model, one of ``KINDS``.
        name: of the architecture.
        layers: how many it has, or more if there are more kinds of layers.
    """
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    default = transformers.CONFIG_MAPPING[name]()
    config = type(default)(**small(default.to_dict(), layers) | OWN.get(name, {}))
    for each in (config, getattr(config, "text_config", config)):
        each.use_cache = False
    config.is_decoder = kind == "CausalLM"
    if kind == "Seq2SeqLM":
        for token in ("decoder_start_token_id", "pad_token_id"):
            if getattr(config, token, None) is None:
                setattr(config, token, 0)
    names = KINDS[kind][name]
    own = getattr(transformers, names if isinstance(names, str) else names[0])
    model = own(config if isinstance(config, own.config_class) else config.get_text_config())
    if (count := sum(parameter.numel() for parameter in model.parameters())) > PARAMETERS:
        raise NotBuiltError(f"no small one: {count:,} parameters")
    return model.train(), [batch(kind, config, model.main_input_name) for _ in range(STEPS)]


def small(values: Mapping[str, Any], least: int) -> dict[str, Any]:
    """Those values of a configuration that are to be others, with at least so many layers.

    A list with an entry for each layer keeps one of each kind, and there are as many layers.
    """
    depth = values.get("num_hidden_layers", values.get("num_layers"))
    lists = {n: v for n, v in values.items() if isinstance(v, list) and len(v) == depth}
    kinds = {n: [v for i, v in enumerate(each) if v not in each[:i]] for n, each in lists.items()}
    layers = max([least, *map(len, kinds.values())])
    changed = {}
    for name, value in values.items():
        new = value
        if name in kinds:
            new = [kinds[name][i % len(kinds[name])] for i in range(layers)]
            new = [reduced(name, each, least) for each in new]
        elif isinstance(value, (list, tuple)):
            new = [reduced(name, each, least) for each in value]
        elif not isinstance(value, dict):
            new = reduced(name, value, least)
        elif name not in UNCHANGED and (inner := small(value, least)):
            new = {**{key: value[key] for key in value if key == "model_type"}, **inner}
        if new != (list(value) if isinstance(value, tuple) else value):
            changed[name] = new
    if "num_hidden_layers" in changed:
        changed["num_hidden_layers"] = layers
    keys, heads = values.get("num_key_value_heads"), values.get("num_attention_heads")
    return changed | ({"num_key_value_heads": 2} if keys and heads and keys < heads else {})


def reduced(name: str, value: Any, layers: int) -> Any:
    """One value: a size, where it is too large or missing; no dropout; a word that there is."""
    if isinstance(value, float) and "drop" in name:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | None):
        return value
    if name in ("hidden_sizes", "embed_dims"):
        return value and value // 4
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            most = layers if pattern == DEEP else size
            return most if value is None else min(most, value)
    return 1 if value and value >= WORDS and re.fullmatch(r"\w+_token_(id|index)", name) else value


def batch(kind: str, config: Any, main: str) -> Batch:
    """Words and what is to come of them, or images and their classes.

    Args:
        kind: of the model.
        config: its configuration.
        main: the name of its first input.
    """
    vocabulary = getattr(config.get_text_config(), "vocab_size", None) or WORDS
    words = torch.randint(10, min(WORDS, vocabulary), (ROWS, LENGTH))
    if kind != "ImageClassification":
        return Batch(kwargs={"input_ids": words, "labels": words})
    labels = torch.randint(2, (ROWS,))
    if main == "input_ids":
        return Batch(kwargs={"input_ids": words, "labels": labels})
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 64)
    height, width = (size, size) if isinstance(size, int) else size
    return Batch(kwargs={main: torch.randn(ROWS, 3, height, width), "labels": labels})


def looped(model: nn.Module, batches: Sequence[Batch]) -> tuple[nn.Module, list[Tensor]]:
    """A copy that a plain loop has trained, and the losses."""
    alone = copy.deepcopy(model)
    optimizer = optimizer_of(alone)
    losses = []
    for each in batches:
        optimizer.zero_grad()
        losses.append(step(alone, None, each))
        optimizer.step()
    if not all(loss.isfinite() for loss in losses):
        raise NotBuiltError(f"its losses are {', '.join(f'{loss:.3g}' for loss in losses)}")
    return alone, losses


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def compared(
    model: nn.Module, batches: Sequence[Batch], alone: nn.Module, expected: Sequence[Tensor]
) -> tuple[str, str]:
    """Train over two devices: the outcome, and a remark.

    Raises:
        NotBuiltError: not even two plain loops are equal.
    """
    before = copy.deepcopy(model)
    optimizer = optimizer_of(model)
    devices = ["cpu", "cpu"]
    with fxpipe.compile(model, devices, microbatches=MICROBATCHES, optimizer=optimizer) as pipe:
        losses = [pipe.step(**each.kwargs) for each in batches]
    if not (apart := distances(model, losses, alone, expected)):
        return "equal", ""
    if distances(*looped(before, batches), alone, expected):
        raise NotBuiltError("two plain loops differ")
    name = max(apart, key=apart.__getitem__)
    return "differs", f"{len(apart)} tensors, by {apart[name]:.1e} at most, in {name}"


def distances(
    model: nn.Module, losses: Sequence[Tensor], alone: nn.Module, expected: Sequence[Tensor]
) -> dict[str, float]:
    """By name, how far apart two values are that are not the same bits."""
    ours = {**{f"loss {i}": loss for i, loss in enumerate(losses)}, **model.state_dict()}
    theirs = {**{f"loss {i}": loss for i, loss in enumerate(expected)}, **alone.state_dict()}
    return {
        name: float((value.detach().double() - theirs[name].detach().double()).abs().max())
        for name, value in ours.items()
        if not torch.equal(value, theirs[name])
    }


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise a TimeoutError in what takes longer."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def warned() -> Iterator[list[str]]:
    """Note which modules the library says that it calls as they are."""
    heard = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fxpipe")
    logger.addHandler(handler)
    try:
        yield heard
    finally:
        logger.removeHandler(handler)


def named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def brief(text: str) -> str:
    """One line for a table, without folders of this machine and what each such warning says."""
    line = re.sub(r"/\S*/(site-packages|lib/python[\d.]+)/", "", " ".join(text.split()))
    return re.sub(r": no cut falls into (.(?!; ))*.", "", line).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())

"""Frameworks take a pipe for a module, and make of it what they make of the model itself.

The plain runs accumulate gradients over as many batches as the pipe has micro-batches: so both
split the data alike, and end with the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fxpipe
from tests.oracles import loop

MICROBATCHES, ROWS = 4, 32

pytestmark = pytest.mark.filterwarnings("ignore")  # what frameworks warn of is theirs


def framework(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install .[frameworks]")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    middle = [nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8)]
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Linear(8, 3))


def piped(model: nn.Module, **options: Any) -> fxpipe.Pipeline:
    return fxpipe.compile(model, devices=2, microbatches=MICROBATCHES, **options)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 4, generator=generator)
    return TensorDataset(x, torch.randint(3, (ROWS,), generator=generator))


def batches(parts: int) -> DataLoader[tuple[Tensor, ...]]:
    """Batches of 8 rows, each in so many parts."""
    return DataLoader(data(), batch_size=8 // parts)


# accelerate


@pytest.fixture(params=["no", "bf16"])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    state = framework("accelerate.state").AcceleratorState
    state._reset_state(reset_partial_state=True)  # one process has one
    yield request.param
    state._reset_state(reset_partial_state=True)


def accelerated(
    net: nn.Module, precision: str, folder: Path, *, parts: int, resume: bool = False
) -> list[Tensor]:
    """A script as in accelerate's own guide, of two epochs or the second; what it evaluates to."""
    accelerator = framework("accelerate").Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=parts
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    module, optimizer, loader, scheduler = accelerator.prepare(
        net, optimizer, batches(parts), StepLR(optimizer, 3)
    )
    assert module is net and accelerator.unwrap_model(module) is net
    if resume:
        accelerator.load_state(str(folder / "state"))
    for epoch in range(resume, 2):
        for x, y in loader:
            with accelerator.accumulate(module):
                accelerator.backward(cross_entropy(module(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if epoch == 0:
            accelerator.save_state(str(folder / "state"))
    accelerator.save_model(module, str(folder))
    module.eval()
    with torch.no_grad():
        seen = [accelerator.gather_for_metrics(module(x[None])) for x in data().tensors[0][:4]]
    module.train()
    return seen


def test_accelerate_trains_saves_and_resumes_a_pipe(precision: str, tmp_path: Path) -> None:
    plain, model = net(), net()
    expected = accelerated(plain, precision, tmp_path / "plain", parts=MICROBATCHES)
    with piped(model) as pipe:
        for resume in (False, True):
            seen = accelerated(pipe, precision, tmp_path, parts=1, resume=resume)
            loop.assert_same(model.state_dict(), plain.state_dict())
            assert torch.equal(torch.stack(seen), torch.stack(expected))
    saved = framework("safetensors.torch").load_file(tmp_path / "model.safetensors")
    loop.assert_same({name: saved[name] for name in plain.state_dict()}, plain.state_dict())


# Lightning


@pytest.mark.deep
def test_lightning_trains_logs_validates_saves_and_resumes_a_pipe(tmp_path: Path) -> None:
    lightning = framework("pytorch_lightning")

    class Task(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net
            self.seen: list[Any] = []

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_epoch=True)
            return loss

        def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
            assert not self.net.training
            self.log("error", cross_entropy(self.net(batch[0]), batch[1]))

        def on_validation_epoch_end(self) -> None:
            self.seen.append(self.trainer.callback_metrics["error"].item())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
            return [optimizer], [StepLR(optimizer, 1)]

    def fit(net: nn.Module, parts: int, resume: Any = None) -> tuple[Any, list[float]]:
        task = Task(net)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=2,
            callbacks=[lightning.callbacks.ModelCheckpoint(save_top_k=-1)],
            accumulate_grad_batches=parts,
            gradient_clip_val=1.0,
            num_sanity_val_steps=0,
            logger=False,
            default_root_dir=tmp_path / str(parts),
            enable_progress_bar=False,
        )
        loaders = batches(parts), DataLoader(data(), batch_size=1)
        trainer.fit(task, *loaders, ckpt_path=resume, weights_only=False)
        assert net.training
        return trainer, task.seen

    plain, model = net(), net()
    made, expected = fit(plain, MICROBATCHES)
    logged = made.callback_metrics["loss_epoch"]
    with piped(model) as pipe:
        made, seen = fit(pipe, 1)
        torch.testing.assert_close(made.callback_metrics["loss_epoch"], logged)
        assert seen == expected
        loop.assert_same(model.state_dict(), plain.state_dict())
        [path] = Path(made.checkpoint_callback.dirpath).glob("epoch=0-*.ckpt")
        _, seen = fit(pipe, 1, resume=path)
        assert seen == expected[1:]
    loop.assert_same(model.state_dict(), plain.state_dict())


# transformers


class Scored(nn.Module):
    """A model that is none of transformers, and takes no more arguments than it names."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(x)
        loss = {} if labels is None else {"loss": cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


class Rows(Dataset[dict[str, Any]]):
    """Rows with a column that no model takes."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**{name: rows[index] for name, rows in self.columns.items()}, "source": "here"}


def trainer(kind: Any, net: nn.Module, rows: Rows, folder: Path, parts: int) -> Any:
    transformers = framework("transformers")
    framework("accelerate")
    return kind(
        model=net,
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=8 // parts,
            gradient_accumulation_steps=parts,
            per_device_eval_batch_size=1,
            max_steps=4,
            logging_steps=1,
            save_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            label_names=["labels"],
            learning_rate=1e-2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=rows,
        eval_dataset=rows,
        compute_metrics=lambda made: {"mean": float(made.predictions.mean())},
    )


def told(trainer: Any) -> list[dict[str, float]]:
    """What a trainer has logged, but for times and the mean over what it has run itself."""
    skipped = ("runtime", "per_second", "flos", "train_loss")
    history = trainer.state.log_history
    return [{k: v for k, v in line.items() if not any(s in k for s in skipped)} for line in history]


def assert_trained_alike(
    kinds: Sequence[Any], model: nn.Module, rows: Rows, folder: Path, **options: Any
) -> None:
    """A run, the second half of it once more, and the plain one are the same."""
    plain, start = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    expected = trainer(framework("transformers").Trainer, plain, rows, folder / "plain", 4)
    expected.train()
    with piped(model, **options) as pipe:
        for kind, resume in zip(kinds, (None, str(folder / "checkpoint-2")), strict=True):
            made = trainer(kind, pipe, rows, folder, 1)
            made.train(resume_from_checkpoint=resume)
            assert told(made) == told(expected)
            loop.assert_same(model.state_dict(), plain.state_dict())
            pipe.load_state_dict(start)


@pytest.mark.deep
def test_a_trainer_trains_logs_evaluates_saves_and_resumes_a_pipe(tmp_path: Path) -> None:
    x, y = data().tensors
    kind = framework("transformers").Trainer
    framework("accelerate")
    torch.manual_seed(0)
    assert_trained_alike([kind] * 2, Scored(), Rows({"x": x, "labels": y}), tmp_path)


@pytest.mark.deep
def test_a_trainer_counts_the_targets_of_a_pipe_of_gpt2(tmp_path: Path) -> None:
    """Rows are padded, so that micro-batches have other numbers of targets."""
    transformers = framework("transformers")
    framework("accelerate")

    class Saving(transformers.Trainer):  # type: ignore[misc, name-defined]
        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            self.model.save_pretrained(output_dir or self.args.output_dir)

    class Stepping(Saving):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss: Tensor = model.train().step(**inputs, num_items_in_batch=num_items_in_batch)
            return loss

    shape = {"vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **drops, **ends))
    words = torch.randint(32, (ROWS, 8))
    labels = words.where(torch.arange(8) < torch.arange(ROWS)[:, None] % 5 + 3, -100)
    rows = Rows({"input_ids": words, "labels": labels})
    assert_trained_alike([Saving, Stepping], gpt2, rows, tmp_path, reduction="sum")
    trained = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-4")
    assert trained.generate(words[:1, :4], max_new_tokens=2).shape == (1, 6)


# peft


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_peft_train_alone_and_are_merged_afterwards() -> None:
    peft, transformers = framework("peft"), framework("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **drops, **ends))
    lora = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    model = peft.get_peft_model(gpt2, peft.LoraConfig(task_type="CAUSAL_LM", **lora))
    plain, words = copy.deepcopy(model), torch.randint(32, (ROWS, 8))

    def trained(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)

    optimizer = trained(plain)
    with piped(model, optimizer=trained(model)) as pipe:
        for _ in range(3):
            optimizer.zero_grad()
            for part in words.chunk(MICROBATCHES):
                (plain(input_ids=part, labels=part).loss / MICROBATCHES).backward()
            optimizer.step()
            pipe.step(input_ids=words, labels=words)
    loop.assert_same(model.state_dict(), plain.state_dict())
    merged = model.merge_and_unload()
    assert type(merged) is type(gpt2)
    torch.testing.assert_close(merged(words).logits, plain(words).logits)


def test_a_framework_leaves_a_pipe_where_it_is_that_has_a_device_map(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    accelerate, transformers = framework("accelerate"), framework("transformers")

    def moved(*_: Any) -> None:
        pytest.fail("it was moved")

    monkeypatch.setattr(fxpipe.Pipeline, "_apply", moved)
    with piped(Scored()) as pipe:
        # what dict(enumerate(pipe.devices)) is over two GPUs
        places = {0: torch.device("cuda:0"), 1: torch.device("cuda:1")}
        pipe.hf_device_map = places
        assert accelerate.Accelerator(cpu=True).prepare(pipe) is pipe
        x, y = data().tensors
        made = trainer(transformers.Trainer, pipe, Rows({"x": x, "labels": y}), tmp_path, 1)
        assert made.model is pipe and made.is_model_parallel
    with piped(Scored()) as pipe:
        assert accelerate.Accelerator(cpu=True).prepare(pipe, device_placement=[False]) is pipe

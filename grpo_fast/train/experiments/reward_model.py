"""Training a reward model on pairs by Bradley and Terry's loss, by transformers' own Trainer."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from grpo_fast.data.pairs import Pair, pairs_of
from grpo_fast.data.splits import Splits
from grpo_fast.rewards.reward_model import encode_pairs, padded, set_padding
from grpo_fast.rollout.own.model import positions
from grpo_fast.train.config import require
from grpo_fast.train.config.recipes import save_config
from grpo_fast.train.config.reward_model import RewardModelConfig
from grpo_fast.train.evaluation.evaluate import mean_and_error
from grpo_fast.train.files import plain_json
from grpo_fast.train.models.loading import build_tokenizer, load_scorer
from grpo_fast.train.models.policy import in_silence
from grpo_fast.train.report.curves import plot_runs
from grpo_fast.train.runs.folder import check_folder, locked

LINES = 20  # of metrics, over the whole training
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def train_reward_model(config: RewardModelConfig) -> dict[str, float]:
    """Train, judge held-out pairs, save; returns what also lies in `output_dir/summary.json`."""
    with locked(config.output_dir) as folder:
        check_folder(folder)
        return _train(config, folder)


def _train(config: RewardModelConfig, folder: Path) -> dict[str, float]:
    torch.manual_seed(config.seed)
    splits = Splits(config.data, config.seed)
    symbols = splits.symbols() if config.data.task in ("sort", "arithmetic") else None
    train = pairs_of(splits.train, symbols, seed=config.seed)
    test = pairs_of(splits.test, symbols, seed="test")
    model, tokenizer = load_scorer(config.model, build_tokenizer(config.model, splits))
    pad_id = set_padding(model, tokenizer)
    listed = train if isinstance(train, list) else [train[0]]  # made pairs are all alike
    _check_lengths(tokenizer, [*test, *listed], model)
    save_config(config, folder / "config.yaml")
    trainer = BradleyTerryTrainer(
        model=model, args=_arguments(config, folder), train_dataset=train,
        data_collator=lambda pairs: collate(pairs, tokenizer, pad_id), center=config.center,
    )  # fmt: skip
    if not config.progress:
        trainer.remove_callback(PrinterCallback)
    result = trainer.train()
    lines = [json.dumps(plain_json(line)) for line in trainer.state.log_history]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    margins = held_out_margins(model, test, tokenizer, pad_id, config.batch_size)
    accuracy, error = mean_and_error([float(margin > 0) for margin in margins])
    summary = {
        "eval_accuracy": accuracy, "eval_accuracy_se": error, "eval_n": float(len(margins)),
        "eval_margin": mean_and_error(margins)[0], "train_loss": result.training_loss,
        "steps": float(config.steps), "seconds": result.metrics["train_runtime"],
    }  # fmt: skip
    with in_silence():
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
    text = json.dumps(plain_json(summary), indent=2) + "\n"
    (folder / "summary.json").write_text(text, encoding="utf-8")
    plot_runs([folder], folder / "curves.png")
    return summary


def bradley_terry(
    chosen: Tensor,  # (B,) scores
    rejected: Tensor,  # (B,)
    margin: Tensor,  # (B,)
    center: float = 0.0,
) -> Tensor:
    """mean(−log σ(chosen − rejected − margin)) + center · mean((chosen + rejected)²).

    As TRL's RewardTrainer has it; the second term (2312.09244) settles the scores' origin.
    """
    loss = -logsigmoid(chosen - rejected - margin).mean()
    return loss + center * (chosen + rejected).square().mean()


class BradleyTerryTrainer(Trainer):
    """Batches hold the chosen texts of B pairs, then their rejected ones."""

    def __init__(self, *, center: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.center = center
        self.model_accepts_loss_kwargs = False  # the loss is a mean over the pairs of a batch

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], **_: Any) -> Tensor:
        margin = inputs.pop("margin")
        chosen, rejected = model(**inputs).logits[:, 0].float().chunk(2)
        return bradley_terry(chosen, rejected, margin, self.center)


def collate(pairs: Sequence[Pair], tokenizer: Any, pad_id: int) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` (2B, L), and `margin` (B,)."""
    prompts = [pair.prompt for pair in pairs]
    texts = [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)]
    ids = encode_pairs(tokenizer, prompts * 2, texts)
    return {**padded(ids, pad_id, "cpu"), "margin": torch.tensor([pair.margin for pair in pairs])}


@torch.no_grad()
def held_out_margins(
    model: Any, pairs: Sequence[Pair], tokenizer: Any, pad_id: int, batch_size: int
) -> list[float]:
    model.eval()
    margins: list[float] = []
    for first in range(0, len(pairs), batch_size):
        chosen = [pairs[i] for i in range(first, min(first + batch_size, len(pairs)))]
        batch = collate(chosen, tokenizer, pad_id)
        inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
        scores = model(**inputs).logits[:, 0].float()
        better, worse = scores.chunk(2)
        margins += (better - worse).tolist()
    return margins


def accuracy_line(summary: dict[str, float]) -> str:
    """`held-out pairs: 97.3% ± 1.0 in the right order (n=256, ± one standard error)`."""
    share, error = (100 * summary[name] for name in ("eval_accuracy", "eval_accuracy_se"))
    count = f"(n={summary['eval_n']:.0f}, ± one standard error)"
    return f"held-out pairs: {share:.1f}% ± {error:.1f} in the right order {count}"


def _check_lengths(tokenizer: Any, pairs: Sequence[Pair], model: Any) -> None:
    room = positions(model.config.get_text_config())
    expected = f"at most {room} tokens (max_position_embeddings of the model) in a pair"
    for pair in pairs:
        longest = max(map(len, encode_pairs(tokenizer, [pair.prompt] * 2, pair[1:3])))
        require(longest <= room, "data", expected, f"{longest} in {str(pair.prompt)[:60]!r}")


def _arguments(config: RewardModelConfig, folder: Path) -> TrainingArguments:
    optim = config.optim
    return TrainingArguments(
        output_dir=str(folder), max_steps=config.steps, seed=config.seed,
        per_device_train_batch_size=config.batch_size, learning_rate=optim.lr,
        lr_scheduler_type=SCHEDULES[optim.schedule], warmup_steps=optim.warmup,
        weight_decay=optim.weight_decay, adam_beta1=optim.betas[0], adam_beta2=optim.betas[1],
        adam_epsilon=optim.eps, max_grad_norm=optim.max_grad_norm, save_strategy="no",
        report_to="none", logging_steps=max(1, config.steps // LINES), remove_unused_columns=False,
        disable_tqdm=not (config.progress and sys.stderr.isatty()), dataloader_pin_memory=False,
    )  # fmt: skip

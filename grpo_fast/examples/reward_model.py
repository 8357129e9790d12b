"""Train a reward model on pairs of a better and a worse answer, with transformers' Trainer.

    python -m grpo_fast.examples.reward_model [--pairs pairs.jsonl --model PATH] [--out FOLDER]
    grpo-fast train sort steps=300 'rewards=[
      {name: "grpo_fast.examples.reward_model:RewardModel", in_process: true,
       options: {path: runs/reward-model/model}}, {name: sort_positions, weight: 0}]'

Without `--pairs`, the script generates pairs for the recipe `sort`, and trains a model with 0.2 M
parameters. The model learns which of two answers has more symbols in the right places. This takes
half a minute on 2 CPU cores.

`--pairs` is a file with one JSON object per line. An object has the texts `prompt`, `chosen` and
`rejected`. Every tenth pair is held out to measure the accuracy.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import typer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification as Scorer
from transformers import AutoTokenizer, BatchEncoding, LlamaConfig, PreTrainedModel, Trainer
from transformers import PreTrainedTokenizerBase as TokenizerBase
from transformers import PreTrainedTokenizerFast as FastTokenizer
from transformers import TrainingArguments as Arguments

Pair = dict[str, str]  # prompt, chosen and rejected
ORDER = ("chosen", "rejected")
DIGITS, SYMBOLS = 4, 10
# Weight of the loss term mean((chosen + rejected)²), which keeps the mean of the scores near 0
# (arXiv 2312.09244).
CENTER = 0.01


def sort_pairs(count: int, seed: int) -> list[Pair]:
    """Generate pairs for the recipe `sort`.

    The chosen answer has fewer wrong symbols than the rejected answer.
    """
    rng = random.Random(seed)
    pairs: list[Pair] = []
    for _ in range(count):
        digits = [str(rng.randrange(SYMBOLS)) for _ in range(DIGITS)]
        worse = rng.randint(1, DIGITS)
        texts = [with_mistakes(sorted(digits), n, rng) for n in (rng.randrange(worse), worse)]
        prompt = " ".join([*digits, "="])
        pairs.append({"prompt": prompt, "chosen": texts[0], "rejected": texts[1]})
    return pairs


def with_mistakes(answer: list[str], wrong: int, rng: random.Random) -> str:
    """Return the answer with `wrong` symbols replaced, or, in a quarter of the cases, cut off."""
    if rng.random() < 0.25:
        return " ".join(answer[: len(answer) - wrong])
    places = rng.sample(range(len(answer)), wrong)
    others = [[s for s in map(str, range(SYMBOLS)) if s != right] for right in answer]
    return " ".join(rng.choice(others[i]) if i in places else x for i, x in enumerate(answer))


def tiny_model() -> tuple[PreTrainedModel, FastTokenizer]:
    """Return a small Llama scorer with random weights, and a tokenizer for the symbols."""
    words = ["<|pad|>", "<|eos|>", *map(str, range(SYMBOLS)), "="]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<|pad|>", "eos_token": "<|eos|>"}
    wrapped = FastTokenizer(tokenizer_object=tokenizer, **special)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=192, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=64, initializer_range=0.05, num_labels=1,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return Scorer.from_config(config), wrapped


class PairTrainer(Trainer):
    """Trainer for pairs of texts.

    The first half of a batch contains the chosen texts, and the second half the rejected texts.
    """

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], *_: object, **__: object
    ) -> torch.Tensor:
        """Return the mean of −log σ(chosen − rejected), plus the centering term."""
        chosen, rejected = model(**inputs).logits[:, 0].float().chunk(2)
        loss = -logsigmoid(chosen - rejected).mean()
        return loss + CENTER * (chosen + rejected).square().mean()


def encode(
    tokenizer: TokenizerBase, prompts: Sequence[str], completions: Sequence[str]
) -> BatchEncoding:
    """Tokenize each prompt with its completion and EOS."""
    rows = []
    special = [x.content for x in tokenizer.added_tokens_decoder.values() if x.special]
    for prompt, completion in zip(prompts, completions, strict=True):
        for token in special:  # a completion must not end its own turn
            completion = completion.replace(token, " ")
        ids = tokenizer(prompt, completion)["input_ids"]
        has_end = ids and ids[-1] in tokenizer.all_special_ids
        rows.append({"input_ids": ids if has_end else [*ids, tokenizer.eos_token_id]})
    return tokenizer.pad(rows, padding_side="right", return_tensors="pt")


def collate(pairs: list[Pair], tokenizer: TokenizerBase) -> BatchEncoding:
    """Return the rows of all chosen answers, followed by those of the rejected answers."""
    texts = [pair[name] for name in ORDER for pair in pairs]
    return encode(tokenizer, [pair["prompt"] for pair in pairs] * 2, texts)


class RewardModel:
    """Reward function that scores each prompt, a text, and its completion with a trained model.

    Args:
        path: folder or hub id of a sequence classification model with one output.

    Raises:
        ValueError: the model has several outputs, or a causal LM, which has no score.
    """

    def __init__(self, path: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        model, loaded = Scorer.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
        if loaded["missing_keys"] or model.config.num_labels != 1:
            raise ValueError(f"path: expected a trained model with one output, got {path!r}")
        self.model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> torch.Tensor:
        batch = encode(self.tokenizer, prompts, completions).to(self.model.device)
        return self.model(**batch).logits[:, 0].float().cpu()


def train(
    out: Path, pairs_file: str | None, model_path: str | None, steps: int, lr: float
) -> float:
    """Train a reward model and save it to out/model.

    Args:
        out: Folder of the run.
        pairs_file: File with one pair per line, as a JSON object. None: pairs are generated.
        model_path: Folder or hub id of the initial model. Needed with `pairs_file`.
        steps: Number of updates. Each uses 64 pairs.
        lr: Largest learning rate of the schedule.

    Returns:
        The accuracy on held-out pairs.
    """
    torch.manual_seed(0)
    if pairs_file is None:
        pairs = sort_pairs(64 * steps, seed=0)
        held_out = sort_pairs(1024, seed=1)
        model, tokenizer = tiny_model()
    else:
        every = [json.loads(line) for line in Path(pairs_file).read_text("utf-8").splitlines()]
        pairs = [x for i, x in enumerate(every) if i % 10]
        held_out = every[::10]
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        model = Scorer.from_pretrained(model_path, num_labels=1)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        # The model computes the score at the last token before the padding. It needs the id of the
        # pad token to find the padding.
        model.config.pad_token_id = tokenizer.pad_token_id
    arguments = Arguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=64, learning_rate=lr,
        lr_scheduler_type="linear", warmup_steps=50, save_strategy="no", report_to="none",
        logging_steps=max(1, steps // 10), remove_unused_columns=False, disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = PairTrainer(model, arguments, partial(collate, tokenizer=tokenizer), pairs)
    # With True, Trainer would divide the loss by a token count, but the loss is already a mean.
    trainer.model_accepts_loss_kwargs = False
    trainer.train()
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    score = RewardModel(str(out / "model"))
    prompts = [pair["prompt"] for pair in held_out]
    chosen, rejected = (score(prompts, [x[name] for x in held_out]) for name in ORDER)
    return float((chosen > rejected).float().mean())


def main(
    pairs: str | None = None,
    model: str | None = None,
    out: Path = Path("runs/reward-model"),
    steps: int = 600,
    lr: float = 1e-3,
) -> None:
    """Train a reward model on the file --pairs, from the folder or hub id --model.

    Without these options, generate pairs, and train a small model from random weights.
    """
    if (pairs is None) != (model is None):
        raise typer.BadParameter("--pairs and --model: expected both or neither")
    share = train(out, pairs, model, steps, lr)
    print(f"{share:.1%} of the held-out pairs in the right order; model: {out / 'model'}")


if __name__ == "__main__":
    typer.run(main)

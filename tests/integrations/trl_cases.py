"""Functions that build TRL trainers for parity tests, with a tiny model and fixed completions."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import FAMILIES, SIZES, TEXTS, tiny_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")
SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32}
PROMPT_CHARACTERS = 40
COMPLETION = 6
# Settings that all TRL trainers in these tests share.
SETTINGS = {
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "report_to": [],
    "use_cpu": True, "bf16": False, "logging_steps": 1, "optim": "sgd", "save_strategy": "no",
    "disable_tqdm": True, "lr_scheduler_type": "constant", "gradient_checkpointing": False,
}  # fmt: skip
TIMES = ("step_time", "runtime", "per_second", "total_flos")


def compare_logs(theirs: list[dict], ours: list[dict], tolerance: float, near_zero: float) -> None:
    assert len(theirs) == len(ours)
    for a, b in zip(theirs, ours, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            if any(word in key for word in TIMES):
                continue
            if a[key] is None or b[key] is None:
                assert a[key] is b[key], key
            else:
                wanted = pytest.approx(a[key], rel=tolerance, abs=near_zero)
                assert b[key] == wanted, (key, a["step"])


# The questions have different lengths. No question is a prefix of a different question.
QUESTIONS = (
    "Ada sold 48 of her clips in April and half", "Weng minds children for $12 an hour, and",
    "Betty saves for a wallet that costs $100.", "Julie read 12 pages of a book yesterday.",
    "A letter has 3 pages, and he writes two", "Mark's garden has flowers of three",
    "Four pizzas have eight slices each, so", "Ken puts two pounds of jelly beans in",
)  # fmt: skip


def prompts(count: int) -> list[str]:
    return [text[: PROMPT_CHARACTERS - 3 * i] for i, text in enumerate(QUESTIONS[:count])]


def folder(path: Path, family: str = "llama", **changes: Any) -> str:
    """Save a tiny model with a BPE tokenizer in `path`, and return the path as a string."""
    from grpo_fast.data.tokenizer import build_bpe_tokenizer

    if not (path / "config.json").exists():
        tokenizer = build_bpe_tokenizer(TEXTS, 260)
        special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        fields = {**special, **SMALL, **changes, "vocab_size": len(tokenizer)}
        model = (
            tiny_model(family, **fields)
            if family in FAMILIES
            else other_model(family, {**SIZES, **fields})
        )
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return str(path)


def other_model(family: str, fields: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, bos_token_id=None, **fields)
    )


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [(sum(ids) % 7) / 7 + 0.1 * len(ids) for ids in completion_ids]


class Injected:
    """Replacement for `_generate_single_turn` that returns random tokens without using the model.

    A completion depends only on the prompt, its index and `seed`. Two trainers therefore get the
    same completions, and so does a resumed run. With `cut`, no completion has an EOS token.
    `tokens` counts the tokens of all calls.
    """

    def __init__(self, vocabulary: int, seed: int = 0, cut: bool = False) -> None:
        self.vocabulary, self.seed, self.cut, self.tokens = vocabulary, seed, cut, 0

    def __call__(self, prompt_ids: list, *_: Any, **__: Any) -> tuple[list[list[int]], list | None]:
        drawn = [self._one(sum(ids) + 31 * place) for place, ids in enumerate(prompt_ids)]
        self.tokens += sum(map(len, drawn))
        return drawn, None

    def _one(self, number: int) -> list[int]:
        random = torch.Generator().manual_seed(2 * number + self.seed)
        length = int(torch.randint(2, COMPLETION + 1, (), generator=random))
        if self.cut:
            length = COMPLETION
        ids = torch.randint(2, self.vocabulary, (length,), generator=random).tolist()
        return [*ids[:-1], 1] if length < COMPLETION else ids


def adapter(options: dict[str, Any]) -> Any:
    """Remove `peft_config` or `lora` from `options`, and return a PEFT config or None.

    `lora` is a dictionary with changes to a default LoraConfig.
    """
    from peft import LoraConfig

    lora, given = options.pop("lora", None), options.pop("peft_config", None)
    usual = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    return given if lora is None else LoraConfig(**{**usual, **lora})


def trainer(cls: type, path: str, output: Path, *, completions: Any = None, **options: Any) -> Any:
    """Build a trainer for the model in `path`.

    Args:
        cls: GRPOTrainer or a subclass.
        path: Folder of the model.
        output: Folder of the run.
        completions: Replacement for `_generate_single_turn`, or None for `Injected`.
        **options: Fields of GRPOConfig. Further keys are `lora` or `peft_config`, `loading`
            (arguments of `from_pretrained`), `dtype` (of the weights), `data` (rows of the data
            set), `evaluation` (True adds an evaluation set) and `more` (arguments of `cls`).
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig

    evaluation, peft_config = options.pop("evaluation", False), adapter(options)
    dtype, loading = options.pop("dtype", torch.float32), options.pop("loading", {})
    rows, more = options.pop("data", None), options.pop("more", {})
    settings = SETTINGS | {
        "output_dir": str(output), "num_generations": 4, "max_steps": 2, "learning_rate": 0.05,
        "max_completion_length": COMPLETION, "seed": 7, "max_grad_norm": 0.0, **options,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **loading)
    data = Dataset.from_list(rows or [{"prompt": prompt} for prompt in prompts(8)])
    fields = {
        "model": model, "reward_funcs": reward, "args": GRPOConfig(**settings),
        "train_dataset": data, "eval_dataset": data.select(range(2)) if evaluation else None,
        "processing_class": AutoTokenizer.from_pretrained(path, padding_side="left"),
        "peft_config": peft_config,
    }  # fmt: skip
    made = cls(**{**fields, **more})
    made.remove_callback(__import__("transformers").PrinterCallback)
    made._generate_single_turn = completions or Injected(model.config.vocab_size)
    return made


def distillation(folders: tuple[str, str], output: Any, cls: Any = None, **options: Any) -> Any:
    """Build a DistillationTrainer (or `cls`).

    Args:
        folders: Folders of the student model and of the teacher model.
        output: Folder of the run.
        cls: Class of the trainer.
        **options: Fields of DistillationConfig, and `lora` as in `trainer`.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DistillationConfig, DistillationTrainer

    settings = SETTINGS | {
        "output_dir": str(output), "max_steps": 3, "gradient_accumulation_steps": 2,
        "learning_rate": 0.1, "max_completion_length": COMPLETION, **options,
    }  # fmt: skip
    peft_config = adapter(settings)
    models = [AutoModelForCausalLM.from_pretrained(x, dtype=torch.float32) for x in folders]
    data = Dataset.from_dict({"prompt": prompts(8)})
    made = (cls or DistillationTrainer)(
        model=models[0], teacher_model=models[1], args=DistillationConfig(**settings),
        train_dataset=data, eval_dataset=data.select(range(2)), peft_config=peft_config,
        processing_class=AutoTokenizer.from_pretrained(folders[0], padding_side="left"),
    )  # fmt: skip
    sampled = Injected(models[0].config.vocab_size)
    made._generate_single_turn = lambda *given: sampled(*given)[0]
    return made

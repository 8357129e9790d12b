"""Functions that build TRL trainers for parity tests, with a tiny model and fixed completions.

For tests of tools, `train_caller` builds a model that calls a calculator, and `Calculator` is a TRL
environment that provides it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig

from grpo_fast.data.tokenizer import build_bpe_tokenizer
from tests.tiny import FAMILIES, SIZES, TEXTS, tiny_model

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


def compare_runs(
    theirs: Any, ours: Any, tolerance: float = 1e-4, near_zero: float = 1e-6, weights: float = 1e-5
) -> None:
    """Check that two trainers have equal logs and equal weights.

    `tolerance` is relative, and `near_zero` is absolute. Both apply to the logs. `weights` is the
    absolute tolerance of the weights.
    """
    compare_logs(theirs.state.log_history, ours.state.log_history, tolerance, near_zero)
    expected = theirs.model.state_dict()
    for name, x in ours.model.state_dict().items():
        wanted = expected[name].float()
        torch.testing.assert_close(x.float(), wanted, rtol=0, atol=weights, msg=name)


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
    if not (path / "config.json").exists():
        tokenizer = build_bpe_tokenizer(TEXTS, 260)
        special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        fields = {**special, **SMALL, **changes, "vocab_size": len(tokenizer)}
        build = tiny_model if family in FAMILIES else other_model
        model = build(family, **fields)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return str(path)


def other_model(family: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, bos_token_id=None, **SIZES | fields)
    return AutoModelForCausalLM.from_config(config)


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


def build(cls: type, config: type, path: str, options: dict[str, Any], **more: Any) -> Any:
    """Build a trainer for the model in `path`.

    Args:
        cls: Class of the trainer.
        config: Class of its config.
        path: Folder of the model.
        options: Fields of the config. Further keys are `lora` (changes to a default LoraConfig),
            `data` (rows of the data set) and `evaluation` (True adds an evaluation set).
        **more: Further arguments of `cls`.
    """
    rows = options.pop("data", None) or [{"prompt": prompt} for prompt in prompts(8)]
    more["train_dataset"] = Dataset.from_list(rows)
    if options.pop("evaluation", False):
        more["eval_dataset"] = more["train_dataset"].select(range(2))
    if (lora := options.pop("lora", None)) is not None:
        more["peft_config"] = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **lora})
    if "model" not in more:
        more["model"] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    made = cls(args=config(**SETTINGS | options), processing_class=tokenizer, **more)
    made.remove_callback(PrinterCallback)
    return made


def trainer(cls: type, path: str, output: Path, *, completions: Any = None, **options: Any) -> Any:
    """Build a trainer for the model in `path`.

    Args:
        cls: GRPOTrainer or a subclass.
        path: Folder of the model.
        output: Folder of the run.
        completions: Replacement for `_generate_single_turn`. If None, `Injected` is used.
        **options: Three keys are used here: `loading` (arguments of `from_pretrained`), `dtype`
            (dtype of the weights) and `more` (arguments of `cls`). All others go to `build`.
    """
    loading = {"dtype": options.pop("dtype", torch.float32), **options.pop("loading", {})}
    more = {"model": AutoModelForCausalLM.from_pretrained(path, **loading), "reward_funcs": reward,
            **options.pop("more", {})}  # fmt: skip
    settings = {
        "output_dir": str(output), "num_generations": 4, "max_steps": 2, "learning_rate": 0.05,
        "max_completion_length": COMPLETION, "seed": 7, "max_grad_norm": 0.0, **options,
    }  # fmt: skip
    made = build(cls, GRPOConfig, path, settings, **more)
    made._generate_single_turn = completions or Injected(made.model.config.vocab_size)
    return made


QUESTION = [{"role": "user", "content": "3 times 4?"}]
CALL = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 3, "b": 4}}}


def multiply(a: int, b: int) -> int:
    """
    Multiplies two numbers.

    Args:
        a: The first one.
        b: The second one.

    Returns:
        Their product.
    """
    return a * b


class Calculator:
    """TRL environment with the tool `multiply`."""

    def reset(self, **_: Any) -> None:
        return None

    def multiply(self, a: int, b: int) -> int:
        return a * b


Calculator.multiply.__doc__ = multiply.__doc__  # TRL passes it to the model


def train_caller(path: Path) -> str:
    """Train a tiny model on one conversation with a tool call, and save it.

    Return `path` as a string.
    """
    import trl

    from grpo_fast.data.tokenizer import build_bpe_tokenizer
    from tests.tiny import tiny_model

    template = Path(trl.__file__).parent / "chat_templates" / "qwen3_instruct_2507.jinja"
    chat = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    chat += [{"role": "tool", "name": "multiply", "content": "12"}]
    chat += [{"role": "assistant", "content": "It is 12."}]
    tokenizer = build_bpe_tokenizer(["x"], 260)
    tokenizer.chat_template = template.read_text()
    text = tokenizer.apply_chat_template(chat, tools=[multiply], tokenize=False)
    tokenizer = build_bpe_tokenizer([text] * 5, 500)
    tokenizer.chat_template = template.read_text()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    labels = ids.clone()
    labels[:, : len(tokenizer(text[: text.index("<|im_start|>assistant")])["input_ids"])] = -100
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": len(tokenizer)}
    model = tiny_model("llama", **sizes, **special)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for _ in range(60):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.05, float(loss)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)

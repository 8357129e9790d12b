"""Time and memory of a step of GRPOTrainer and of FastGRPOTrainer, without rollout.

    python -m benchmarks.trainers.trl [--quick] [--device cuda] [--json results.json]

A third trainer is GRPOTrainer with our LM head. All trainers have the same weights and get the same
micro-batch, which has 8 completions of 64 tokens for one prompt of 512 tokens. It has the fields
that `training_step` gets after generation and rewards. A step computes the forward pass, loss,
metrics and gradients. The losses, metrics and gradients of all trainers are compared before they
are timed. The steps are timed in interleaved rounds in one process. The peak memory of a step
includes the gradients, but neither weights nor inputs.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import measure
from benchmarks.trainers.options import Defaults, new_parser, parsed, save

os.environ.setdefault("HF_HUB_OFFLINE", "1")

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
MODELS: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
             "vocab_size": 2048},
    "mid": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
            "vocab_size": 32000},
    # Sizes of Qwen2.5-0.5B, too large for a quick run on a CPU.
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "vocab_size": 151936, "num_attention_heads": 14},
}  # fmt: skip
PROMPT = 512
GROUP = 8
COMPLETION = 64
# "TRL, fast head" is TRL's trainer with its padded forward pass and our LM head. It shows how much
# of the speedup of FastGRPOTrainer comes from the head.
TRAINERS = ("TRL", "TRL, fast head", "grpo_fast")
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}


DEFAULTS = Defaults(threads=2, budget=(20.0, 3.0), rounds=(20, 5))


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS))
    parser.add_argument("--dtype", default="fp32", choices=list(TOLERANCE), help="of the weights")
    options = parsed(parser, DEFAULTS)
    options.models = options.models or (["tiny"] if options.quick else ["tiny", "mid"])
    logging.disable(logging.WARNING)
    cases = [measure_model(options, name) for name in options.models]
    settings = {"prompt": PROMPT, "group": GROUP, "completion": COMPLETION, "dtype": options.dtype}
    save(options, "training_step of GRPOTrainer without rollout", settings, cases=cases)


def measure_model(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Compare the results of the trainers, and measure their times and their memory."""
    trainers = make_trainers(options, name)
    batch = prepared_batch(options, MODELS[name]["vocab_size"])
    difference = verified(trainers, batch, TOLERANCE[options.dtype])
    steps = {label: step_of(trainer, batch) for label, trainer in trainers.items()}
    result: dict[str, Any] = {"model": name, **MODELS[name], "gradient_difference": difference}
    result |= measure.measured(steps, options)
    for label in TRAINERS:
        mine = result[label]
        speedup = result["TRL"]["median_ms"] / mine["median_ms"]
        times = f"{mine['median_ms']:9.1f} ms ± {mine['spread_ms']:6.1f}"
        print(f"{name:5} {label:15} {times}  {mine['workspace_mib']:7.0f} MiB  {speedup:6.2f}x")
    print(f"      gradients within {difference:.1e} of TRL's")
    return result


def make_trainers(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Build all trainers with the same random weights. Return them by name."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import GRPOTrainer

    from grpo_fast.data.tokenizer import build_bpe_tokenizer
    from grpo_fast.integrations.trl import FastGRPOTrainer
    from grpo_fast.integrations.trl.head import use_fast_head

    tokenizer = build_bpe_tokenizer(["What is 12 + 30? 42"], 260)
    torch.manual_seed(0)
    config = LlamaConfig(
        **{**HEADS, **MODELS[name]}, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16 if options.dtype == "bf16" else torch.float32)
    made = {}
    for label, cls in zip(TRAINERS, (GRPOTrainer, GRPOTrainer, FastGRPOTrainer), strict=True):
        trainer = make_trainer(
            cls, model, tokenizer, ["What is 12 + 30?"], lambda **_: [], options.device,
            per_device_train_batch_size=GROUP, num_generations=GROUP,
            max_completion_length=COMPLETION,
        )  # fmt: skip
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.to(options.device).train()
        if label == TRAINERS[1]:
            use_fast_head(trainer)
        made[label] = trainer
    return made


def make_trainer(
    cls: Any, model: Any, tokenizer: Any, prompts: list[str], reward: Callable[..., Any],
    device: str, **settings: Any,
) -> Any:  # fmt: skip
    """Build a trainer that does not log, with a copy of the model.

    `cls` is the class of the trainer. `settings` are further arguments of `GRPOConfig`.
    """
    from datasets import Dataset
    from transformers.utils import logging as logging_of_transformers
    from trl import GRPOConfig

    logging_of_transformers.disable_progress_bar()
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), report_to=[], bf16=False, save_strategy="no",
        gradient_checkpointing=False, use_cpu=device == "cpu", **settings,
    )  # fmt: skip
    return cls(
        model=copy.deepcopy(model), reward_funcs=reward, args=arguments, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
    )  # fmt: skip


def prepared_batch(options: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    """Return a micro-batch in the form in which TRL passes it to the loss.

    It has one prompt and 8 completions. Three completions have fewer than 64 tokens, and their
    padding is masked.
    """
    random = torch.Generator().manual_seed(1)
    prompt = torch.randint(2, vocabulary, (PROMPT,), generator=random)
    completions = torch.randint(2, vocabulary, (GROUP, COMPLETION), generator=random)
    mask = torch.ones_like(completions)
    for row, length in ((1, 48), (4, 20), (6, 60)):
        mask[row, length:] = 0
    batch = {
        "prompt_ids": prompt.repeat(GROUP, 1),
        "prompt_mask": torch.ones(GROUP, PROMPT, dtype=torch.int64),
        "completion_ids": completions.masked_fill(mask == 0, 0),
        "completion_mask": mask,
        "advantages": torch.randn(GROUP, generator=random),
        "num_items_in_batch": mask.sum(),
    }
    return {name: value.to(options.device) for name, value in batch.items()}


def step_of(trainer: Any, batch: dict[str, Any]) -> measure.Step:
    """Return a step that deletes the old gradients and calls `training_step` with `batch`."""
    trainer._prepare_inputs = lambda _: batch

    def reset() -> None:
        trainer._metrics["train"].clear()
        trainer.model.zero_grad(set_to_none=True)

    return measure.Step(lambda: (trainer.training_step(trainer.model, batch, None),), reset)


def verified(trainers: dict[str, Any], batch: dict[str, Any], tolerance: float) -> float:
    """Compare the losses, metrics and gradients of all trainers with those of the first trainer.

    Returns:
        The largest relative L2 difference of the gradients.

    Raises:
        SystemExit: a difference is larger than `tolerance`.
    """
    gradients, metrics = [], []
    for trainer in trainers.values():
        loss = float(step_of(trainer, batch)()[0])
        parts = [p.grad.float().flatten().cpu() for p in trainer.model.parameters()]
        gradients.append(torch.cat(parts))
        logged = {k: v[-1] for k, v in trainer._metrics["train"].items() if k != "step_time"}
        metrics.append({"the loss": loss, **logged})
        trainer.model.zero_grad(set_to_none=True)
    norms = torch.stack([(gradients[0] - g).norm() for g in gradients[1:]])
    difference = float(norms.max() / gradients[0].norm())
    expected = metrics[0]
    same = all(
        found.keys() == expected.keys()
        and all(abs(found[k] - x) <= tolerance * max(abs(x), 1.0) for k, x in expected.items())
        for found in metrics
    )
    if not (difference <= tolerance and same):
        raise SystemExit(f"not timed: gradients differ by {difference:.2g}, metrics: {metrics}")
    return difference


if __name__ == "__main__":
    main()

"""On-policy distillation: a student learns from a teacher on the student's own completions.

    grpo-fast train sort steps=400
    python -m grpo_fast.examples.distillation runs/sort/model

The student has half of the teacher's width and starts from random weights. It gets no reward. At
every token of its completions, the loss is the exact reverse KL to the teacher over the full
vocabulary, which `linear_divergence` computes without storing the logits. The divergence from a
served teacher works in the same way: pass the ids and log-probabilities that the server returned as
a `TeacherTopK` in place of the `TeacherHead`.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import typer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from grpo_fast import TeacherHead, linear_divergence
from grpo_fast.attention import head_of, pack_groups, prepare
from grpo_fast.rollout import generate

GROUP = 16  # completions per prompt
PROMPTS = 16  # prompts per step
DIGITS = 4


def hidden_states(model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
    """Return the last hidden states of a packed row of T tokens, shape (T, H)."""
    return model.base_model(**inputs).last_hidden_state[0]


def distill(teacher_path: str, steps: int = 150, seed: int = 0) -> list[dict[str, float]]:
    """Train a student, and return the divergence and the accuracy of every step.

    Args:
        teacher_path: folder of a model that the recipe `sort` has trained.
        steps: number of steps. Each step samples completions and makes one update.
        seed: seed of the student's weights, the prompts and the sampling.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    # 1. Load the teacher, and build a student of half its width.
    tokenizer = AutoTokenizer.from_pretrained(teacher_path)
    teacher = AutoModelForCausalLM.from_pretrained(teacher_path).eval()
    config = AutoConfig.from_pretrained(teacher_path)
    config.hidden_size //= 2
    config.intermediate_size //= 2
    config.head_dim = config.hidden_size // config.num_attention_heads
    student = AutoModelForCausalLM.from_config(config)
    for model in (teacher, student):
        prepare(model)  # a packed row contains each prompt once
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    history = []
    for step in range(steps):
        # 2. Sample completions of prompts of the recipe `sort` with the student.
        digits = [[rng.randrange(10) for _ in range(DIGITS)] for _ in range(PROMPTS)]
        prompts = [" ".join(map(str, each)) + " =" for each in digits]
        samples = generate(
            student, prompts, group_size=GROUP, tokenizer=tokenizer, max_new_tokens=DIGITS,
            seed=(seed, step),
        )  # fmt: skip
        # 3. Pack them into one row, and compute the teacher's and the student's hidden states.
        completions = samples.completion_ids
        groups = [
            (samples.prompt_ids[at], completions[at : at + GROUP])
            for at in range(0, len(samples), GROUP)
        ]
        packed = pack_groups(groups)
        with torch.no_grad():
            states = hidden_states(teacher, packed.model_inputs)[packed.predicting]  # (R, H')
        head = head_of(teacher)
        target = TeacherHead(states, head.weight.detach(), head.bias, **head.logit_kwargs)
        hidden = hidden_states(student, packed.model_inputs)  # (T, H)
        # 4. Minimise the mean divergence of the R completion tokens.
        own = head_of(student)
        output = linear_divergence(
            hidden, own.weight, target, "reverse_kl", bias=own.bias, hidden_rows=packed.predicting,
            **own.logit_kwargs,
        )  # fmt: skip
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        schedule.step()
        sorted_texts = [" ".join(map(str, sorted(each))) for each in digits for _ in range(GROUP)]
        right = sum(a.strip() == b for a, b in zip(samples.texts, sorted_texts, strict=True))
        history.append({"divergence": output.loss.item(), "accuracy": right / len(samples)})
    return history


def main(teacher: str, steps: int = 150, seed: int = 0) -> None:
    """Train a student of the model in the folder TEACHER, and print every tenth step."""
    for step, row in enumerate(distill(teacher, steps, seed), start=1):
        if step in (1, steps) or step % 10 == 0:
            print(f"step {step:3}: KL {row['divergence']:.4f}, right {row['accuracy']:6.1%}")


if __name__ == "__main__":
    typer.run(main)

"""Cases that train on two ranks under DDP, once with `GRPOTrainer` and once with `FastGRPOTrainer`.

The two ranks have different completions.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from trl import GRPOTrainer

from grpo_fast.integrations.trl import FastGRPOTrainer
from tests.integrations import trl_cases

VOCABULARY = 260
# Several updates per generation, so that ratios leave the clip range.
MOVING = {"num_iterations": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.02, "entropy_target": 4.8,
            "entropy_coef_delta": 0.01, "entropy_coef_max": 0.1}  # fmt: skip
SYNCED = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.6}
# Options of each case. A loss type may divide by the completions, by the tokens of a rank or by the
# tokens of all ranks. Each of these divisors is in at least one case.
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", **MOVING},
    "bnpo": {"loss_type": "bnpo", "beta": 0.05, **MOVING},
    "dr_grpo": {"loss_type": "dr_grpo", **MOVING},
    "dapo": {"loss_type": "dapo", **MOVING, "max_steps": 3},
    "sapo": {"loss_type": "sapo", "beta": 0.1, **SYNCED, **MOVING, "max_steps": 4},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", **MOVING},
    "lora": {"loss_type": "dapo", "beta": 0.1, "lora": {}, "gradient_checkpointing": True,
             **MOVING},
    "entropy": {"loss_type": "dapo", **ADAPTIVE, **MOVING, "max_steps": 3},
    # Each group has some of its completions on the first rank and some on the second.
    "split_groups": {"loss_type": "dapo", "per_device_train_batch_size": 2, "max_grad_norm": 0.5,
                     "gradient_accumulation_steps": 1, "steps_per_generation": 4, "max_steps": 4},
    # In "empty_rank", the second rank has no scored token. In "no_prompt", the completions of the
    # second rank have empty prompts.
    "empty_rank": {"loss_type": "dapo", "mask_truncated_completions": True, **MOVING},
    "no_prompt": {"loss_type": "dapo", "beta": 0.05, **MOVING},
    "evaluation": {"loss_type": "dapo", "evaluation": True, "beta": 0.05,
                   "num_generations_eval": 2, **MOVING},
}  # fmt: skip
RESUMED = {"resumed": {}, "resumed_lora": {"lora": {}}}
# Options of the cases in which the trainers sample completions from the model. The case "greedy"
# compares `GRPOTrainer` with `FastGRPOTrainer`. The case "drawn" samples at random, and compares
# two runs of `FastGRPOTrainer`.
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"generation_kwargs": {"do_sample": False}, "max_completion_length": 9},
    # Each group has some of its completions on the first rank and some on the second.
    "drawn": {"top_k": 5, "temperature": 0.8, "num_generations": 8},
}
Result = dict[str, Any]


def build(cls: type, folder: Path, output: Path, options: dict[str, Any], cut: bool = False) -> Any:
    drawn = trl_cases.Injected(VOCABULARY, distributed.get_rank(), cut)
    options = {"max_grad_norm": 100.0, "completions": drawn, **options}
    return trl_cases.trainer(cls, str(folder), output, **options)


class NoPrompt:
    """Mixin that removes all prompts from a trainer's batches on the second rank."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        if distributed.get_rank() == 1:
            output["prompt_mask"][:] = 0
        return output


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return float(torch.stack([(x - b[name]).abs().max() for name, x in a.items()]).max())


def between_ranks(found: dict[str, Tensor]) -> float:
    """Return the largest difference between the weights of this rank and of rank 0."""
    first = {name: x.clone() for name, x in found.items()}
    for x in first.values():
        distributed.broadcast(x, 0)
    return furthest(found, first)


Weights = dict[str, Tensor]


def outcome(
    wrapped: str, processes: int, logs: list, expected: Weights, found: Weights, **more: Any
) -> Result:
    """Return the result of a case on this rank.

    Returns:
        A dictionary of the arguments other than `expected` and `found`. It also has "weights", the
        largest difference between expected and found weights, and "ranks", the largest difference
        between the found weights of this rank and of rank 0.
    """
    apart = {"weights": furthest(expected, found), "ranks": between_ranks(found)}
    return {"wrapped": wrapped, "processes": processes, "logs": logs, **apart, **more}


def compared(theirs: Any, ours: Any) -> Result:
    return outcome(
        type(ours.model_wrapped).__name__, ours.accelerator.num_processes,
        [theirs.state.log_history, ours.state.log_history], weights(theirs), weights(ours),
        path=getattr(ours, "fast_path", None), tokens=ours._generate_single_turn.tokens,
    )  # fmt: skip


def run(name: str, folder: Path, output: Path) -> Result:
    """Train with `GRPOTrainer` and with `FastGRPOTrainer`, and compare both runs."""
    cut = name == "empty_rank" and distributed.get_rank() == 1
    pair = []
    for cls in (GRPOTrainer, FastGRPOTrainer):
        cls = type(cls.__name__, (NoPrompt, cls), {}) if name == "no_prompt" else cls
        pair.append(build(cls, folder, output / cls.__name__, CASES[name], cut))
        pair[-1].train()
        if "evaluation" in CASES[name]:
            pair[-1].evaluate()
    return compared(*pair)


def resume(name: str, folder: Path, output: Path) -> Result:
    """Train four steps with both trainers, and repeat the last two steps from a checkpoint.

    Returns:
        The comparison of the two resumed runs. "from_start" has one number for each trainer: the
        largest weight difference between its resumed run and its uninterrupted run.
    """
    options = {"beta": 0.05, **MOVING, **RESUMED[name], "max_steps": 4, "optim": "adamw_torch"}
    options |= {"learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 2}
    pair, again = [], []
    for cls in (GRPOTrainer, FastGRPOTrainer):
        place = output / cls.__name__
        pair.append(build(cls, folder, place, options))
        pair[-1].train()
        again.append(build(cls, folder, place, options))
        again[-1].train(resume_from_checkpoint=str(place / "checkpoint-2"))
    result = compared(*again)
    gaps = [furthest(weights(a), weights(b)) for a, b in zip(pair, again, strict=True)]
    return {**result, "from_start": gaps}


class Sampled:
    """Wrapper that puts back a trainer's original sampling function and records its tokens.

    The attribute `tokens` is a hash of all sampled tokens. Tokens 1 to 89 end a completion, so that
    the lengths of the completions differ.
    """

    def __init__(self, trainer: Any) -> None:
        del trainer._generate_single_turn
        trainer.eos_token_ids = trainer.generation_config.eos_token_id = list(range(1, 90))
        self.inner, self.tokens = trainer._generate_single_turn, 0

    def __call__(self, *args: Any, **more: Any) -> Any:
        found = self.inner(*args, **more)
        for ids in found[0]:
            self.tokens = (31 * self.tokens + sum(ids)) % 1_000_003
        return found


def sampled(name: str, folder: Path, output: Path) -> Result:
    """Train twice with completions sampled from the model, and compare the two runs.

    The runs must sample the same tokens.
    """
    pair, options = [], {"loss_type": "dapo", "beta": 0.05, **MOVING, **SAMPLED[name]}
    for cls in (GRPOTrainer if name == "greedy" else FastGRPOTrainer, FastGRPOTrainer):
        pair.append(build(cls, folder, output, options))
        pair[-1]._generate_single_turn = Sampled(pair[-1])
        pair[-1].train()
    assert pair[0]._generate_single_turn.tokens == pair[1]._generate_single_turn.tokens
    return compared(*pair)


def cases(folder: Path) -> Iterator[tuple[str, Callable[[], Result]]]:
    torch.manual_seed(0)
    for names, work in ((CASES, run), (RESUMED, resume), (SAMPLED, sampled)):
        for name in names:
            yield f"trl-{name}", partial(work, name, folder / "model", folder / name)

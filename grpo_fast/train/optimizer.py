"""AdamW with gradient clipping and a schedule, and supervised training with it before a run.

Steps with a non-finite gradient are skipped.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from grpo_fast.attention import PackedTree, pack_groups
from grpo_fast.data import Example
from grpo_fast.errors import NonFiniteGradient, require
from grpo_fast.rollout import encode_prompts
from grpo_fast.train import ranks
from grpo_fast.train.config import OptimConfig, WarmStartConfig
from grpo_fast.train.models.policy import Policy

log = logging.getLogger(__name__)

MAX_SKIPS_IN_A_ROW = 3
WARMUP = 20  # steps of a warm start in which the learning rate rises
COUNTERS = ("steps", "skipped", "skipped_in_a_row")  # attributes that a checkpoint stores


class Optimizer:
    """AdamW with gradient clipping and a learning rate schedule.

    A step whose gradient is not finite is skipped. Three such steps in a row raise an error.

    Args:
        parameters: the parameters to train.
        config: the section `optim`.
        total_steps: optimizer steps of the run, which determine the schedule.
    """

    def __init__(
        self, parameters: list[nn.Parameter], config: OptimConfig, total_steps: int
    ) -> None:
        require(parameters, "parameters", "at least one that is trained", "none")
        self.parameters = parameters
        self.config = config
        self.total_steps = total_steps
        self.adam = torch.optim.AdamW(
            parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True
        )
        # Create the moments now. AdamW would create them in its first step, where an out-of-memory
        # error would end a run, and a checkpoint could not be loaded into them.
        for p in parameters:
            self.adam.state[p] = {
                "step": torch.zeros((), device=p.device),  # fused AdamW needs it on this device
                "exp_avg": torch.zeros_like(p, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(p, requires_grad=False),
            }
        self.steps = 0
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.has_moved = False  # True if weights may have changed since the run was last recorded

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        config = self.config
        return config.lr * schedule(config.schedule, self.steps, config.warmup, self.total_steps)

    def step(self) -> float:
        """Apply and clear the gradients. Return their norm before clipping.

        If the norm is infinite or NaN, the step is skipped.

        Raises:
            NonFiniteGradient: three steps in a row were skipped.
        """
        ranks.sum_gradients(self.parameters)  # the norm must include all ranks
        total = nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        norm = float(ranks.full_tensor(total))
        if math.isfinite(norm):
            for group in self.adam.param_groups:
                group["lr"] = self.learning_rate
            self.has_moved = True
            self.adam.step()
            self.skipped_in_a_row = 0
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
            log.warning("gradient norm %s: step skipped (%d so far)", norm, self.skipped)
        self.steps += 1  # the schedule counts skipped steps, too
        self.adam.zero_grad()
        if self.skipped_in_a_row >= MAX_SKIPS_IN_A_ROW:
            said = f"{MAX_SKIPS_IN_A_ROW} gradients in a row were not finite"
            error = NonFiniteGradient(f"{said} (the last norm: {norm})")
            raise ranks.common(error)  # all ranks have the same norm
        return norm

    def state_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in COUNTERS}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        vars(self).update({name: state[name] for name in COUNTERS})

    def moments(self, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
        """Return the state tensors of Adam, keyed by name.

        The name of a tensor is the parameter's name followed by Adam's key, such as `.exp_avg`.

        Args:
            names: name of each parameter.
        """
        return {
            f"{names[parameter]}.{kind}": value
            for parameter, state in self.adam.state.items()
            for kind, value in state.items()
        }


def schedule(kind: str, step: int, warmup: int, total: int) -> float:
    """Return the factor by which the learning rate is multiplied at a step.

    Args:
        kind: constant, linear or cosine. The last two decrease to 0 at `total`.
        step: number of the step, counted from 0.
        warmup: steps of the linear warm-up.
        total: steps of the run.
    """
    # Use step + 1, because with a factor of 0 the first step would change nothing.
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant" or total <= warmup:
        return 1.0
    rest = max(0.0, 1.0 - (step - warmup) / (total - warmup))
    return rest if kind == "linear" else 0.5 * (1.0 - math.cos(math.pi * rest))


def warm_start(
    policy: Policy,
    examples: Sequence[Example],
    config: WarmStartConfig,
    *,
    seed: int,
    log: Callable[[int, dict[str, float]], object],
) -> None:
    """Train a policy with supervised learning on gold solutions, each followed by EOS.

    Args:
        policy: the policy to train.
        examples: training examples. Only examples with a solution are used.
        config: the section `warm_start`.
        seed: seed of the order of the examples.
        log: function that is called as log(0, metrics) after every step.

    Raises:
        ValueError: no example has a solution.
    """
    # 1. Select the examples, and build a separate optimizer for the supervised training.
    usable = [e for e in examples if e.solution]
    came = "none; warm_start=null starts without a supervised phase"
    require(usable, "warm_start", "examples with a solution", came)
    optim = OptimConfig(lr=config.lr, schedule="cosine", warmup=WARMUP, weight_decay=0.01)
    optimizer = Optimizer(policy.trainable(), optim, config.steps)
    # 2. Train on random batches of solutions.
    rng = random.Random(f"{seed}/warm start")
    policy.model.train()
    for step in range(1, config.steps + 1):
        chosen = rng.sample(usable, min(config.batch_size, len(usable)))
        loss = -policy.logps(_packed(policy, chosen)).mean()
        # Divide by the number of ranks, because all ranks compute the same gradient and the
        # optimizer sums the gradients over the ranks.
        (loss / ranks.size()).backward()
        optimizer.step()
        log(0, {"warm_start/step": float(step), "warm_start/loss": loss.item()})


def _packed(policy: Policy, examples: Sequence[Example]) -> PackedTree:
    """Pack examples into one row. The completion of a prompt is its solution followed by EOS."""
    prompts = [example.prompt for example in examples]
    prompt_ids = encode_prompts(policy.tokenizer, prompts, policy.template_kwargs)
    texts = (policy.tokenizer(e.solution, add_special_tokens=False) for e in examples)
    solutions = ([*text["input_ids"], policy.tokenizer.eos_token_id] for text in texts)
    groups = [(prompt, [ids]) for prompt, ids in zip(prompt_ids, solutions, strict=True)]
    return pack_groups(groups, device=policy.device)

"""Updates of the policy: the optimizer, and the passes that compute the gradients of the loss.

The optimizer is AdamW with gradient clipping and a schedule. It skips steps with a non-finite
gradient. A run may begin with supervised training. The gradients of an optimizer step are
accumulated over its micro-batches.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from grpo_fast import DivergenceTerm, LossConfig, LossOutput, TeacherHead, linear_grpo_loss
from grpo_fast.attention import Head, PackedTree, pack_groups
from grpo_fast.data import Example
from grpo_fast.errors import NonFiniteGradient, require
from grpo_fast.objective.kl import EXACT, KL_ESTIMATORS
from grpo_fast.rollout import encode_prompts
from grpo_fast.train import ranks
from grpo_fast.train.batch import FIXED, MicroBatch, StepBatch, Totals
from grpo_fast.train.config import OptimConfig, WarmStartConfig
from grpo_fast.train.critic import Critic
from grpo_fast.train.metrics import LossMetrics
from grpo_fast.train.policy import Policy, Reference

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
        loss = -policy.logps(_pack_solutions(policy, chosen)).mean()
        # Divide by the number of ranks, because all ranks compute the same gradient and the
        # optimizer sums the gradients over the ranks.
        (loss / ranks.size()).backward()
        optimizer.step()
        log(0, {"warm_start/step": float(step), "warm_start/loss": loss.item()})


def _pack_solutions(policy: Policy, examples: Sequence[Example]) -> PackedTree:
    """Pack examples into one row. The completion of a prompt is its solution followed by EOS."""
    prompts = [example.prompt for example in examples]
    prompt_ids = encode_prompts(policy.tokenizer, prompts, policy.template_kwargs)
    texts = (policy.tokenizer(e.solution, add_special_tokens=False) for e in examples)
    solutions = ([*text["input_ids"], policy.tokenizer.eos_token_id] for text in texts)
    groups = [(prompt, [ids]) for prompt, ids in zip(prompt_ids, solutions, strict=True)]
    return pack_groups(groups, device=policy.device)


# ------------------------------------------------------------------------------ Passes of an update
@torch.no_grad()
def precompute(
    batch: StepBatch,
    policy: Policy,
    loss: LossConfig,
    *,
    keep_old: bool,
    reference: Reference | None = None,
    critic: Critic | None = None,
    reward_beta: float | None = None,
) -> None:
    """Compute the columns in `FIXED` with the current weights, unless the batch already has them.

    Args:
        batch: the samples of a step.
        policy: the policy.
        loss: configuration of the loss, which sets the temperature and the KL estimator.
        keep_old: if True, compute the old log-probs, which are the policy's log-probs before the
            first update. A step with a single update does not need them, because its ratio is
            exactly 1.
        reference: the reference model, or None.
        critic: the value function, or None.
        reward_beta: weight of the KL divergence in the rewards. If it is None, the rewards do not
            contain a KL divergence.
    """
    if batch.has_fixed:
        return
    keep_old = keep_old or reward_beta is not None
    temperature = float(loss.temperature)
    for micro in batch.micro_batches:
        # 1. Evaluate the reference model. An exact divergence needs the hidden states of the
        # reference. All other estimators need its log-probs.
        if reference is not None and loss.kl_estimator in EXACT:
            micro.write("ref_hidden", reference.hidden(micro.packed))
        elif reference is not None:
            micro.write("ref_logps", reference.logps(micro.packed, temperature, micro.support))
        # 2. Evaluate the policy. A shared critic uses the same hidden states.
        hidden = None
        if keep_old or (critic is not None and critic.is_shared):
            hidden = policy.hidden(micro.packed)
        if keep_old:
            micro.write("old_logps", policy.logps(micro.packed, temperature, hidden, micro.support))
        # 3. Evaluate the critic.
        if critic is not None:
            micro.write("values", critic.values(micro.packed, hidden))
    # 4. Compute advantages and returns from the values.
    if critic is not None:
        batch.exchange(FIXED)
        critic.estimate_advantages(batch, reward_beta, loss.kl_estimator)
    batch.has_fixed = True


def accumulate(
    policy: Policy,
    minibatch: list[MicroBatch],
    config: LossConfig,
    *,
    correct_sampling: bool,
    validate: str,
    critic: Critic | None = None,
    ref_head: Head | None = None,
    totals: Totals | None = None,
) -> LossMetrics:
    """Accumulate the gradients of one optimizer step in the parameters.

    Args:
        policy: the policy.
        minibatch: this rank's micro-batches of the optimizer step.
        config: configuration of the loss.
        correct_sampling: pass the sampler's log-probs to the loss.
        validate: argument `validate` of `linear_grpo_loss`.
        critic: value function whose loss is added, or None.
        ref_head: LM head of the reference. Only an exact KL needs it.
        totals: counts over all ranks that normalize the losses. None counts `minibatch`.

    Returns:
        The metrics of the optimizer step on this rank.
    """
    if totals is None:
        items = max(1, sum(batch.active_tokens for batch in minibatch))
        totals = Totals(items, sum(map(len, minibatch)), 0)
    alone = policy_term(config)
    seen = LossMetrics()
    for batch in minibatch:
        mask = batch.completion_mask
        sampling_logps = batch.column("logps")
        assert sampling_logps is not None
        term = exact_kl(batch, ref_head, config)
        # 1. Compute hidden states and the fused loss inside the model's forward pass, where FSDP2
        # has gathered the weights of the head.
        loss, hidden, output = policy.inside(partial(
            packed_loss, policy, batch, alone, num_items_in_batch=totals.items,
            num_completions_in_batch=totals.completions, divergence=term, validate=validate,
            sampling_logps=sampling_logps if correct_sampling else None,
        ))  # fmt: skip
        metrics = {"loss": loss, **output.metrics}
        if term is not None:
            metrics["kl"] = metrics.pop("divergence")
        # 2. Run the backward pass. With a critic, the backward pass includes the value loss.
        if critic is None:
            loss.backward()
        else:
            metrics |= critic.backward(loss, batch, hidden, totals.items)
        # 3. Record metrics. Skip idle micro-batches, which exist only because FSDP2 requires the
        # same number of passes on all ranks.
        if batch.is_idle:
            continue
        ref_logps = batch.column("ref_logps")
        if ref_logps is not None and not config.uses_reference:
            differences = ref_logps - output.logps
            kl, _ = KL_ESTIMATORS[config.kl_estimator](differences, *config.kl_limits)
            metrics["kl"] = kl[mask].sum() / mask.sum().clamp(min=1)
        seen.add(metrics, batch.active_tokens)
        seen.logps.append((output.logps[mask], sampling_logps[mask]))
    return seen


def packed_loss(
    policy: Policy, batch: MicroBatch, config: LossConfig, **options: Any
) -> tuple[Tensor, Tensor, LossOutput]:
    """Compute the fused loss of a micro-batch with T tokens.

    Args:
        policy: the policy.
        batch: the micro-batch.
        config: configuration of the loss.
        **options: arguments of `linear_grpo_loss` that do not come from the policy or the
            micro-batch.

    Returns:
        The loss, the hidden states of shape (T, H), and the LossOutput.
    """
    hidden = policy.hidden(batch.packed)
    head = policy.head
    by_token = batch.column("token_advantages")
    output = linear_grpo_loss(
        hidden, head.weight, batch.packed.target_ids,
        batch.advantages if by_token is None else by_token, config.replace(**head.logit_kwargs),
        completion_mask=batch.completion_mask, cu_seqlens=batch.packed.cu_seqlens,
        old_logps=batch.column("old_logps"), ref_logps=batch.column("ref_logps"),
        support=batch.support, hidden_rows=batch.packed.predicting, bias=head.bias, **options,
    )  # fmt: skip
    return output.loss, hidden, output


def policy_term(config: LossConfig) -> LossConfig:
    """Return the loss configuration without an exact KL, which a DivergenceTerm adds."""
    if config.kl_estimator not in EXACT:
        return config
    return config.replace(beta=0.0, kl_estimator=LossConfig.kl_estimator)


def exact_kl(batch: MicroBatch, ref_head: Head | None, config: LossConfig) -> DivergenceTerm | None:
    """Return the loss term of an exact KL to the reference, or None if the loss has none."""
    ref_hidden = batch.column("ref_hidden")
    if ref_hidden is None or ref_head is None:
        return None
    weight, bias = (None if x is None else ranks.full_tensor(x.detach()) for x in ref_head[:2])
    temperature = float(config.temperature)
    teacher = TeacherHead(ref_hidden, weight, bias, temperature, **ref_head.logit_kwargs)
    return DivergenceTerm(teacher, EXACT[config.kl_estimator], config.beta)

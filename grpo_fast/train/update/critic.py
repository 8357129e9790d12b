"""PPO's value function: V of the state before each completion token, and its share of a step.

V(s_t) is read at the row that predicts token t: a prompt's last row serves all first tokens.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo_fast.attention import PackedTree, pack_groups
from grpo_fast.objective.advantages import whitened
from grpo_fast.objective.aggregation import Total, step_weights
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.gae import gae, lam_by_length
from grpo_fast.objective.kl import KL_ESTIMATORS
from grpo_fast.objective.value import explained_variance, value_losses
from grpo_fast.train.config import CriticConfig, ModelConfig, OptimConfig
from grpo_fast.train.models.loading import load_policy
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.ranks import sharding
from grpo_fast.train.ranks.distributed import sum_
from grpo_fast.train.update.batch import StepBatch
from grpo_fast.train.update.micro_batch import MicroBatch
from grpo_fast.train.update.optimizer import Optimizer

HEAD_FILE = "value_head.safetensors"


class Critic:
    """A linear value head, zero at the start, on the policy's trunk or on one of its own.

    trunk: a model of the critic's own; None: the policy's, which the value loss then trains.
    """

    def __init__(self, policy: Policy, config: CriticConfig, trunk: Policy | None = None) -> None:
        self.config = config
        self.is_shared = trunk is None
        self.trunk = trunk or policy
        width = self.trunk.head.weight.shape[1]
        self.head = nn.Linear(width, 1, device=policy.device, dtype=torch.float32)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)
        self.trunk.model.train()

    def parameters(self) -> list[nn.Parameter]:
        return [*self.head.parameters(), *([] if self.is_shared else self.trunk.trainable())]

    def optimizer(self, config: OptimConfig, total_steps: int) -> Optimizer:
        """The policy's kind of optimizer for the critic's own parameters, at its own rate."""
        rate = self.config.lr or config.lr
        return Optimizer(self.parameters(), config.model_copy(update={"lr": rate}), total_steps)

    def values(self, packed: PackedTree, policys_hidden: Tensor | None = None) -> Tensor:
        """(R,) fp32 values of the states that predict the completion tokens.

        policys_hidden: (T, H) of the policy for the same row, which a shared trunk need not repeat.
        """
        states = policys_hidden if self.is_shared else None
        states = self.trunk.hidden(packed) if states is None else states
        return self.head(states.float())[:, 0][packed.predicting]

    def backward(
        self, policy_loss: Tensor, batch: MicroBatch, hidden: Tensor, weights: Tensor
    ) -> dict[str, Tensor]:
        """Gradients of policy_loss + coef·Σ w_t·ℓ_t; metrics of the two losses.

        Args:
            hidden: (T, H) of the policy, with its graph.
            weights: (R,) w_t, 0 where a token does not count.
        """
        if not self.is_shared:  # the policy's activations are gone before the critic's come
            policy_loss.backward()
        old = batch.column("values")
        returns = batch.column("returns")
        assert old is not None and returns is not None
        values = self.values(batch.packed, hidden)
        losses, clipped = value_losses(
            values, old, returns, self.config.loss, epsilon=self.config.epsilon
        )  # fmt: skip
        value_loss = (weights * losses).sum()
        weighted = self.config.coef * value_loss
        total = policy_loss.detach() + weighted
        (policy_loss + weighted if self.is_shared else weighted).backward()
        fraction = clipped[batch.completion_mask].float().sum() / max(batch.active_tokens, 1)
        return {"loss": total, "value/loss": value_loss, "value/clip_ratio": fraction}

    def values_after_the_end(self, batch: StepBatch) -> Tensor:
        """Return (N·G,) V of the state after the last token of each sample that was cut off.

        It is 0 for a sample that ended with EOS or that belongs to another rank. The state is in
        no micro-batch: these samples are packed once more, with one more token.
        """
        is_cut = batch.samples.truncated.tolist()
        following = torch.zeros(len(is_cut))
        for micro in batch.micro_batches:
            cut = [i for i in micro.chosen if is_cut[i] and not batch.mask_truncated]
            if micro.is_idle:
                cut = []
            if cut:
                following[cut] = self._last_values(batch, cut).cpu()
            elif self.trunk.is_sharded:  # all ranks make equally many forward passes
                self._last_values(batch, micro.chosen[:1])
        return following

    def _last_values(self, batch: StepBatch, cut: list[int]) -> Tensor:
        samples = batch.samples
        groups = []
        for _, members in groupby(cut, key=lambda i: i // batch.group_size):
            listed = list(members)
            # Any last token will do: only the state that predicts it is read.
            completions = [samples.completion(i) for i in listed]
            longer = [torch.cat([ids, ids[-1:]]) for ids in completions]
            groups.append((samples.prompt(listed[0]), longer))
        packed = pack_groups(groups, shared=batch.shared, device=batch.device)
        return self.values(packed)[packed.cu_seqlens[1:].long() - 1]

    def estimate_advantages(
        self, batch: StepBatch, beta: float | None, estimator: str, following: Tensor | None
    ) -> None:
        """Write the GAE of every token, whitened, and its return = advantage + value. Collective.

        Mean and deviation are those of the tokens that count, over the whole step; other tokens
        get 0.

        Args:
            beta: weight of the KL to the reference that is subtracted from each token's reward.
            following: (N·G,) of `values_after_the_end`.
        """
        config = self.config
        samples = batch.samples
        assert samples.values is not None
        # 1. One row per sample, as `gae` takes them.
        lengths = torch.tensor(samples.lengths)
        is_token = torch.arange(int(lengths.max())) < lengths[:, None]

        def by_sample(column: Tensor) -> Tensor:
            rows = torch.zeros(is_token.shape, dtype=column.dtype)
            rows[is_token] = column.cpu()
            return rows

        counts = by_sample(batch.completion_mask)
        values = by_sample(samples.values)
        rewards = by_sample(rewards_with_kl(batch, beta, estimator))
        # 2. Advantages, and returns by a lambda of their own.
        alpha = config.lam_alpha
        lam = config.lam if alpha is None else lam_by_length(counts.sum(1), alpha)
        lam_returns = config.lam if config.lam_returns is None else config.lam_returns
        following = None if following is None else sum_(following)
        ends: Any = {"mask": counts, "following": following}
        advantages = gae(rewards, values, config.gamma, lam, **ends)
        same = alpha is None and lam_returns == lam
        towards = advantages if same else gae(rewards, values, config.gamma, lam_returns, **ends)
        returns = towards + torch.where(counts, values, 0.0)
        # 3. Whiten over the step.
        if config.whiten and counts.any():
            advantages = torch.where(counts, whitened(advantages.double(), counts), 0.0).float()
        samples.token_advantages = advantages[is_token].to(batch.device)
        samples.returns = returns[is_token].to(batch.device)

    def shard(self, mesh: Any) -> None:
        sharding.shard(self.head, mesh, self.head.weight.device)
        if not self.is_shared:
            self.trunk.shard(mesh)

    def weights(self) -> dict[str, Tensor]:
        """As `Policy.weights`, of the head and of a trunk of its own."""
        head = {f"head.{name}": tensor for name, tensor in self.head.named_parameters()}
        trunk = {} if self.is_shared else self.trunk.weights()
        return head | {f"trunk.{name}": tensor for name, tensor in trunk.items()}

    def save(self, directory: str | Path) -> None:
        """The head as safetensors; a model of its own beside it, as `critic.path` takes both."""
        from safetensors.torch import save_file

        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        if not self.is_shared:
            self.trunk.save(folder)
        state = {name: value.cpu() for name, value in self.head.state_dict().items()}
        save_file(state, folder / HEAD_FILE)


def load_critic(critic: CriticConfig | None, model: ModelConfig, policy: Policy) -> Critic | None:
    """The critic of a run, with the head that lies in `critic.path`, if one does; None without.

    model: the policy's, whose dtype and options a model of the critic's own takes.
    """
    if critic is None:
        return None
    if critic.kind == "shared":
        return Critic(policy, critic)
    if critic.path is None:
        return Critic(policy, critic, policy.trainable_copy())
    own = model.model_copy(update={"path": critic.path, "config": None})
    try:
        trunk = load_policy(own, policy.tokenizer, empty=policy.is_empty)
    except ValueError as error:
        raise ValueError(str(error).replace("model.path:", "critic.path:")) from error
    trunk.freeze_head()
    loaded = Critic(policy, critic, trunk)
    file = Path(critic.path) / HEAD_FILE
    if file.is_file():
        from safetensors.torch import load_file

        try:
            loaded.head.load_state_dict(load_file(file))
        except Exception as error:  # the reader has no public class for it
            expected = f"expected a value head of width {loaded.head.in_features} in {file}"
            raise ValueError(f"critic.path: {expected}, got {error}") from error
    return loaded


def token_weights(
    batch: MicroBatch, config: LossConfig, items: Total | None, completions: int
) -> Tensor:  # (R,)
    """w_t of the policy's loss for every token of a micro-batch, 0 where one does not count;
    `items` and `completions` are the whole optimizer step's.
    """
    ends = batch.packed.cu_seqlens.long()
    counts = batch.completion_mask
    before = torch.nn.functional.pad(counts.long().cumsum(0), (1, 0))
    active = before[ends[1:]] - before[ends[:-1]]
    weights = step_weights(
        str(config.aggregation), active, batch.active_tokens,
        max_completion_length=config.max_completion_length, num_items_in_batch=items,
        num_completions_in_batch=completions, group_size=config.group_size,
    )  # fmt: skip
    # Told its size, a GPU need not be waited for.
    return weights.repeat_interleave(ends.diff(), output_size=len(counts)) * counts


def rewards_with_kl(batch: StepBatch, beta: float | None, estimator: str) -> Tensor:
    """Return (R,): −β·kl_t of each token plus its own reward; by default all at the last token."""
    samples = batch.samples
    rewards = torch.zeros_like(samples.logps)
    if beta is not None:
        assert samples.ref_logps is not None and samples.old_logps is not None
        rewards = -beta * KL_ESTIMATORS[estimator](samples.ref_logps - samples.old_logps)[0]
    if samples.token_rewards is not None:
        return rewards + samples.token_rewards.to(rewards)
    rewards[samples.rows[1:] - 1] += batch.advantages.to(rewards)
    return rewards


def value_metrics(batch: StepBatch) -> dict[str, float]:
    """Return `value/…` of the values behind the step's advantages, over its active tokens."""
    samples = batch.samples
    assert samples.values is not None and samples.returns is not None
    counts = batch.completion_mask.to(samples.values.device)
    values = samples.values[counts]
    returns = samples.returns[counts]
    metrics: dict[str, Any] = {
        "value/mean": values.double().mean(),
        "value/error": (values - returns).double().square().mean(),
        "value/explained_variance": explained_variance(values, returns),
    }
    return {name: float(value) for name, value in metrics.items()}

"""The value function of PPO, its loss, and the advantages that are computed from its values.

The value V(s_t) of the state before token t is computed from the hidden state that predicts token
t. The last hidden state of a prompt therefore gives the value of the state before the first token
of each of its completions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from grpo_fast.attention import PackedTree
from grpo_fast.objective.advantages import whitened
from grpo_fast.objective.kl import KL_ESTIMATORS
from grpo_fast.objective.ppo import explained_variance, gae, value_losses
from grpo_fast.rollout.samples import Samples
from grpo_fast.train import ranks
from grpo_fast.train.batch import MicroBatch, StepBatch
from grpo_fast.train.config import CriticConfig
from grpo_fast.train.policy import Policy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Critic:
    """Value function: a linear head on the layers of a model. The head's weights start at zero.

    Args:
        policy: the policy.
        config: the section `critic`. With `kind: shared`, the value loss also trains the policy's
            layers. With `kind: model`, the critic is a copy of the policy.
    """

    def __init__(self, policy: Policy, config: CriticConfig) -> None:
        self.config = config
        self.is_shared = config.kind == "shared"
        self.trunk = policy if self.is_shared else policy.trainable_copy()
        width = self.trunk.head.weight.shape[1]
        self.head = nn.Linear(width, 1, device=policy.device, dtype=torch.float32)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)
        self.trunk.model.train()

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that only the critic trains."""
        return [*self.head.parameters(), *([] if self.is_shared else self.trunk.trainable())]

    def values(self, packed: PackedTree, policys_hidden: Tensor | None = None) -> Tensor:
        """Compute the value of the state before each completion token.

        Args:
            packed: a packed row with T tokens, of which R are completion tokens.
            policys_hidden: the policy's hidden states for the row, shape (T, H). A shared critic
                uses them if they are given, which saves a forward pass.

        Returns:
            fp32 tensor of shape (R,).
        """
        states = policys_hidden if self.is_shared else None
        states = self.trunk.hidden(packed) if states is None else states
        return self.head(states.float())[:, 0][packed.predicting]

    def backward(
        self, policy_loss: Tensor, batch: MicroBatch, hidden: Tensor, items: int
    ) -> dict[str, Tensor]:
        """Compute the gradients of the total loss, policy_loss + coef · mean of the value losses.

        Args:
            policy_loss: the policy's loss of the micro-batch, a 0-d tensor that requires grad.
            batch: the micro-batch.
            hidden: the policy's hidden states, shape (T, H). They require grad.
            items: number of tokens over which the value losses of the optimizer step are averaged.

        Returns:
            Metrics of the two losses.
        """
        # With a separate model, run the policy's backward pass first. This frees its activations
        # before the critic computes its own.
        if not self.is_shared:
            policy_loss.backward()
        old = batch.column("values")
        returns = batch.column("returns")
        assert old is not None and returns is not None
        values = self.values(batch.packed, hidden)
        config = self.config
        losses, clipped = value_losses(values, old, returns, config.loss, epsilon=config.epsilon)
        value_loss = losses[batch.completion_mask].sum() / items
        weighted = config.coef * value_loss
        total = policy_loss.detach() + weighted
        (policy_loss + weighted if self.is_shared else weighted).backward()
        fraction = clipped[batch.completion_mask].float().sum() / max(batch.active_tokens, 1)
        return {"loss": total, "value/loss": value_loss, "value/clip_ratio": fraction}

    def estimate_advantages(self, batch: StepBatch, beta: float | None, estimator: str) -> None:
        """Compute the advantage (GAE) and the return of each token.

        The results are written into the columns `token_advantages` and `returns` of the samples.
        With `critic.whiten`, the advantages are whitened over the tokens of the step that
        contribute to the loss, and the advantages of all other tokens are 0.

        Args:
            batch: the samples of the step with their values.
            beta: weight of the KL divergence in the rewards. If it is None, the rewards do not
                contain a KL divergence.
            estimator: estimator of the KL divergence.
        """
        config = self.config
        samples = batch.samples
        assert samples.values is not None
        # 1. Convert the flat columns to padded rows, one per sample, as `gae` expects.
        lengths = torch.tensor(samples.lengths)
        is_token = torch.arange(int(lengths.max())) < lengths[:, None]

        def by_sample(column: Tensor) -> Tensor:  # (R,) -> (samples, longest)
            return pad_sequence(column.cpu().split(samples.lengths), batch_first=True)

        counts = by_sample(batch.completion_mask)
        values = by_sample(samples.values)
        rewards = token_rewards(samples).to(batch.device)
        if beta is not None:
            assert samples.ref_logps is not None and samples.old_logps is not None
            kl, _ = KL_ESTIMATORS[estimator](samples.ref_logps - samples.old_logps)
            rewards = rewards - beta * kl
        # 2. Compute the advantages and the returns.
        advantages = gae(by_sample(rewards), values, config.gamma, config.lam, mask=counts)
        returns = advantages + torch.where(counts, values, 0.0)
        # 3. Whiten the advantages over the step. Convert advantages and returns to flat columns.
        if config.whiten and counts.any():
            advantages = torch.where(counts, whitened(advantages.double(), counts), 0.0).float()
        samples.token_advantages = advantages[is_token].to(batch.device)
        samples.returns = returns[is_token].to(batch.device)

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard the value head, and the critic's separate model if it has one, over a mesh."""
        ranks.shard(self.head, mesh)
        if not self.is_shared:
            self.trunk.shard(mesh)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of the value head and of the separate model, keyed by name."""
        head = {f"head.{name}": tensor for name, tensor in self.head.named_parameters()}
        trunk = {} if self.is_shared else self.trunk.weights()
        return head | {f"trunk.{name}": tensor for name, tensor in trunk.items()}


def token_rewards(samples: Samples) -> Tensor:
    """Return the reward of each completion token, fp32 of shape (R,).

    The last token of a sample receives its reward, which is NaN if a function failed.
    """
    assert samples.rewards is not None
    rewards = torch.zeros(len(samples.logps))
    at_end = torch.tensor(samples.lengths) > 0
    rewards[samples.rows[1:][at_end] - 1] = samples.rewards[at_end]
    return rewards


def value_metrics(batch: StepBatch) -> dict[str, float]:
    """Return metrics that compare the critic's values with the returns of the step."""
    samples = batch.samples
    assert samples.values is not None and samples.returns is not None
    counts = batch.completion_mask.to(samples.values.device)
    values = samples.values[counts]
    returns = samples.returns[counts]
    return {
        "value/mean": float(values.double().mean()),
        "value/error": float((values - returns).double().square().mean()),
        "value/explained_variance": float(explained_variance(values, returns)),
    }

"""The value function of PPO, its loss, and the advantages that are computed from its values.

The value V(s_t) of the state before token t is computed from the hidden state that predicts token
t. The last hidden state of a prompt therefore gives the value of the state before the first token
of each of its completions.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from grpo_fast.attention import PackedTree, pack_groups
from grpo_fast.objective.advantages import whitened
from grpo_fast.objective.gae import gae, lam_by_length
from grpo_fast.objective.kl import KL_ESTIMATORS
from grpo_fast.objective.value import explained_variance, value_losses
from grpo_fast.train import ranks
from grpo_fast.train.batch import MicroBatch, StepBatch
from grpo_fast.train.config import CriticConfig, ModelConfig
from grpo_fast.train.models.loading import load_policy
from grpo_fast.train.models.policy import Policy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

HEAD_FILE = "value_head.safetensors"


class Critic:
    """Value function: a linear head on the layers of a model. The head's weights start at zero.

    Args:
        policy: the policy.
        config: the section `critic`.
        trunk: a separate model for the critic. None uses the policy's layers, which are then also
            trained by the value loss.
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
        self, policy_loss: Tensor, batch: MicroBatch, hidden: Tensor, weights: Tensor
    ) -> dict[str, Tensor]:
        """Compute the gradients of the total loss, policy_loss + coef · Σ weight · value_loss.

        Args:
            policy_loss: the policy's loss of the micro-batch, a 0-d tensor that requires grad.
            batch: the micro-batch.
            hidden: the policy's hidden states, shape (T, H). They require grad.
            weights: weights of the tokens in the loss, shape (R,).

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
        """Compute the value after the last token of each truncated sample.

        The micro-batches do not contain this state. Truncated samples are therefore packed again
        with one additional token.

        Returns:
            Tensor of shape (samples,). It is 0 for samples that ended with EOS or belong to other
            ranks.
        """
        is_cut = batch.samples.truncated.tolist()
        following = torch.zeros(len(is_cut))
        for micro in batch.micro_batches:
            is_read = not (micro.is_idle or batch.mask_truncated)
            cut = [i for i in micro.chosen if is_read and is_cut[i]]
            if cut:
                following[cut] = self._last_values(batch, cut).cpu()
            # Run a forward pass and ignore its result. All ranks with sharded weights must run the
            # same number of forward passes.
            elif self.trunk.is_sharded:
                self._last_values(batch, micro.chosen[:1])
        return following

    def _last_values(self, batch: StepBatch, cut: list[int]) -> Tensor:
        """Return the value after the last token of each sample whose index is in `cut`."""
        samples = batch.samples
        groups = []
        for _, members in groupby(cut, key=lambda i: i // batch.group_size):
            listed = list(members)
            # Append an arbitrary token to each completion, here its last token, because only the
            # state before the new token is used.
            completions = [samples.completion(i) for i in listed]
            longer = [torch.cat([ids, ids[-1:]]) for ids in completions]
            groups.append((samples.prompt(listed[0]), longer))
        packed = pack_groups(groups, shared=batch.shared, device=batch.device)
        return self.values(packed)[packed.cu_seqlens[1:].long() - 1]

    def estimate_advantages(
        self, batch: StepBatch, beta: float | None, estimator: str, following: Tensor | None
    ) -> None:
        """Compute the advantage (GAE) and the return of each token.

        The results are written into the columns `token_advantages` and `returns` of the samples.
        With `critic.whiten`, the advantages are whitened over the tokens of the step that
        contribute to the loss, and the advantages of all other tokens are 0.

        Args:
            batch: the samples of the step with their values.
            beta: weight of the KL divergence in the rewards. If it is None, the rewards do not
                contain a KL divergence.
            estimator: estimator of the KL divergence.
            following: result of `values_after_the_end` on this rank. If it is None, these values
                are 0.
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
        rewards = by_sample(rewards_with_kl(batch, beta, estimator))
        # 2. Compute the advantages with λ = `lam`, or with a λ that depends on the length. The
        # returns use λ = `lam_returns` if it is set.
        alpha = config.lam_alpha
        lam = config.lam if alpha is None else lam_by_length(counts.sum(1), alpha)
        lam_returns = config.lam if config.lam_returns is None else config.lam_returns
        following = None if following is None else ranks.sum_(following)
        ends: Any = {"mask": counts, "following": following}
        advantages = gae(rewards, values, config.gamma, lam, **ends)
        towards = advantages
        if alpha is not None or lam_returns != lam:
            towards = gae(rewards, values, config.gamma, lam_returns, **ends)
        returns = towards + torch.where(counts, values, 0.0)
        # 3. Whiten the advantages over the step. Convert advantages and returns to flat columns.
        if config.whiten and counts.any():
            advantages = torch.where(counts, whitened(advantages.double(), counts), 0.0).float()
        samples.token_advantages = advantages[is_token].to(batch.device)
        samples.returns = returns[is_token].to(batch.device)

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard the value head, and the critic's separate model if it has one, over a mesh."""
        ranks.shard(self.head, mesh, self.head.weight.device)
        if not self.is_shared:
            self.trunk.shard(mesh)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of the value head and of the separate model, keyed by name."""
        head = {f"head.{name}": tensor for name, tensor in self.head.named_parameters()}
        trunk = {} if self.is_shared else self.trunk.weights()
        return head | {f"trunk.{name}": tensor for name, tensor in trunk.items()}

    def save(self, directory: str | Path) -> None:
        """Save the value head and the separate model in a folder that `critic.path` accepts."""
        from safetensors.torch import save_file

        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        if not self.is_shared:
            self.trunk.save(folder)
        state = {name: value.cpu() for name, value in self.head.state_dict().items()}
        save_file(state, folder / HEAD_FILE)


def load_critic(critic: CriticConfig | None, model: ModelConfig, policy: Policy) -> Critic | None:
    """Build the critic of a run, and load its saved weights if `critic.path` is set.

    Args:
        critic: the section `critic`, or None for a run without a critic.
        model: the section `model`, whose dtype and options a separate model uses.
        policy: the policy.

    Raises:
        ValueError: the model or the value head cannot be loaded.
    """
    # 1. Without a path, build the head on the policy's layers or on a copy of the policy.
    if critic is None:
        return None
    if critic.kind == "shared":
        return Critic(policy, critic)
    if critic.path is None:
        return Critic(policy, critic, policy.trainable_copy())
    # 2. Load a separate model.
    own = model.model_copy(update={"path": critic.path, "config": None})
    try:
        trunk = load_policy(own, policy.tokenizer, empty=policy.is_empty)
    except ValueError as error:
        raise ValueError(str(error).replace("model.path:", "critic.path:")) from error
    trunk.freeze_head()
    loaded = Critic(policy, critic, trunk)
    # 3. Load a saved value head. If the folder has none, the weights of the head stay zero.
    file = Path(critic.path) / HEAD_FILE
    if file.is_file():
        from safetensors.torch import load_file

        try:
            loaded.head.load_state_dict(load_file(file))
        except Exception as error:  # safetensors has no public class for its errors
            expected = f"expected a value head of width {loaded.head.in_features} in {file}"
            raise ValueError(f"critic.path: {expected}, got {error}") from error
    return loaded


def rewards_with_kl(batch: StepBatch, beta: float | None, estimator: str) -> Tensor:
    """Return the reward of each token minus its weighted KL divergence, shape (R,).

    Args:
        batch: the samples of the step with their token rewards.
        beta: weight of the KL divergence. If it is None, nothing is subtracted.
        estimator: estimator of the KL divergence.
    """
    samples = batch.samples
    assert samples.token_rewards is not None
    if beta is None:
        return samples.token_rewards
    assert samples.ref_logps is not None and samples.old_logps is not None
    kl, _ = KL_ESTIMATORS[estimator](samples.ref_logps - samples.old_logps)
    return samples.token_rewards - beta * kl


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

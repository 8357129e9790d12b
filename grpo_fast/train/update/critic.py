"""PPO's value function: V of the state before each completion token, and its share of a step.

V(s_t) is read at the row that predicts token t: a prompt's last row serves all first tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo_fast.attention import PackedTree
from grpo_fast.objective.aggregation import Total, step_weights
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.value import explained_variance, value_losses
from grpo_fast.train.config import CriticConfig, ModelConfig, OptimConfig
from grpo_fast.train.models.loading import load_policy
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.ranks import sharding
from grpo_fast.train.update.batch import StepBatch
from grpo_fast.train.update.micro_batch import MicroBatch
from grpo_fast.train.update.optimizer import Optimizer

HEAD_FILE = "value_head.safetensors"


class Critic:
    """A linear value head, zero at the start, on the policy's trunk or on one of its own.

    trunk: a model of the critic's own; None: the policy's, which the value loss then trains.
    """

    def __init__(self, policy: Policy, config: CriticConfig, trunk: Policy | None = None) -> None:
        self.config, self.is_shared, self.trunk = config, trunk is None, trunk or policy
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
        self, policy_loss: Tensor, batch: MicroBatch, hidden: Tensor, weights: Tensor, share: float
    ) -> dict[str, Tensor]:
        """Gradients of share·(policy_loss + coef·Σ w_t·ℓ_t); metrics of the two losses.

        Args:
            hidden: (T, H) of the policy, with its graph.
            weights: (R,) w_t, 0 where a token does not count.
            share: of this micro-batch in the loss of its optimizer step.
        """
        if not self.is_shared:  # the policy's activations are gone before the critic's come
            (policy_loss * share).backward()
        assert batch.old_values is not None and batch.returns is not None
        values = self.values(batch.packed, hidden)
        losses, clipped = value_losses(
            values, batch.old_values, batch.returns, self.config.loss,
            epsilon=self.config.epsilon, delta=self.config.delta,
        )  # fmt: skip
        value_loss = (weights * losses).sum()
        weighted = self.config.coef * value_loss
        total = policy_loss.detach() + weighted
        ((policy_loss + weighted if self.is_shared else weighted) * share).backward()
        fraction = clipped[batch.completion_mask].float().sum() / max(batch.active_tokens, 1)
        return {"loss": total, "value/loss": value_loss, "value/clip_ratio": fraction}

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
    loaded, file = Critic(policy, critic, trunk), Path(critic.path) / HEAD_FILE
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
    ends, counts = batch.packed.cu_seqlens.long(), batch.completion_mask
    before = torch.nn.functional.pad(counts.long().cumsum(0), (1, 0))
    active = before[ends[1:]] - before[ends[:-1]]
    weights = step_weights(
        str(config.aggregation), active, batch.active_tokens,
        max_completion_length=config.max_completion_length, num_items_in_batch=items,
        num_completions_in_batch=completions, group_size=config.group_size,
    )  # fmt: skip
    # Told its size, a GPU need not be waited for.
    return weights.repeat_interleave(ends.diff(), output_size=len(counts)) * counts


def value_metrics(batch: StepBatch) -> dict[str, float]:
    """`value/…` of the values that the step's advantages were made from, over its active tokens."""
    counts = torch.cat(batch.of_each("completion_mask"))
    values = torch.cat(batch.of_each("old_values"))[counts]
    returns = torch.cat(batch.of_each("returns"))[counts]
    metrics: dict[str, Any] = {
        "value/mean": values.double().mean(),
        "value/error": (values - returns).double().square().mean(),
        "value/explained_variance": explained_variance(values, returns),
    }
    return {name: float(value) for name, value in metrics.items()}

"""Replacement for OpenRLHF's `PolicyLoss` (openrlhf 0.11) that uses our kernels.

It accepts the same arguments and returns the same results.

    trainer.actor_loss_fn = PolicyLoss(trainer.actor_loss_fn)

The results differ in three cases. A NaN at a masked token does not change the loss. The loss of a
batch without active tokens is 0 instead of NaN. With gspo, the ratio of a completion is at most
e^20.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from grpo_fast import LossConfig, grpo_loss
from grpo_fast.errors import require

LOG_RATIO_BOUND = 20.0  # OpenRLHF clamps the log ratio of a token to [-20, 20]
OPTIONS = {
    "clip_eps_low", "clip_eps_high", "dual_clip", "token_level_loss", "policy_loss_type",
    "is_correction_level", "is_correction_mode", "is_correction_gating", "is_correction_threshold",
}  # fmt: skip
LEVELS = {"ppo": "token", "gspo": "sequence"}  # policy_loss_type -> level of the importance ratio
# Type of the result: (loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio).
Returned = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


class PolicyLoss(nn.Module):
    """OpenRLHF's policy loss: PPO with an optional dual clip, or GSPO.

    Args:
        theirs: OpenRLHF's `PolicyLoss`, from which the options are copied.

    Raises:
        ValueError: The options of `theirs` differ from those of openrlhf 0.11.
    """

    def __init__(self, theirs: nn.Module) -> None:
        super().__init__()
        options = {n: x for n, x in vars(theirs).items() if n[0] != "_" and n != "training"}
        expected = f"the options of openrlhf 0.11, {sorted(OPTIONS)}"
        require(options.keys() == OPTIONS, "PolicyLoss", expected, sorted(options))
        self.options = SimpleNamespace(**options)
        level = LEVELS[self.options.policy_loss_type]
        self.by_sequence = level == "sequence"
        self.by_token = self.options.token_level_loss and not self.by_sequence
        dual: dict[str, Any] = {"loss_type": "dapo"}
        if self.options.dual_clip is not None:
            dual = {"loss_type": "dual_clip", "dual_clip_c": float(self.options.dual_clip)}
        self.config = LossConfig(
            epsilon_low=self.options.clip_eps_low, epsilon_high=self.options.clip_eps_high,
            importance_sampling_level=level,
            aggregation="token_mean_global" if self.by_token else "sequence_mean", **dual,
        )  # fmt: skip

    def forward(
        self,
        log_probs: Tensor,  # (B, L)
        old_log_probs: Tensor,  # (B, L)
        advantages: Tensor,  # (B, L)
        action_mask: Tensor | None = None,  # (B, L) bool or 0/1
        rollout_log_probs: Tensor | None = None,  # (B, L)
        dp_size: int = 1,
        batch_num_tokens: float | Tensor | None = None,
        global_batch_size: float | Tensor | None = None,
    ) -> Returned:
        """Compute the loss and OpenRLHF's metrics.

        Args:
            log_probs: Current log-probabilities, shape (B, L), with a gradient.
            old_log_probs: Log-probabilities before the update, shape (B, L).
            advantages: Advantage of each token, shape (B, L).
            action_mask: True or 1 at completion tokens, shape (B, L). None: all tokens.
            rollout_log_probs: Log-probabilities of the sampler, shape (B, L). Needed only with a
                correction of the mismatch between sampler and trainer.
            dp_size: Number of data-parallel ranks.
            batch_num_tokens: Number of tokens on all ranks. None: the tokens of this call.
            global_batch_size: Number of completions on all ranks. None: the completions of this
                call.

        Returns:
            The loss and OpenRLHF's metrics clip_ratio, ppo_kl, vllm_kl and is_filter_ratio, each
            0-d. is_filter_ratio is the fraction of tokens or completions that the correction
            removed. The last two metrics are None without a correction.
        """
        keep = torch.ones_like(log_probs).bool() if action_mask is None else action_mask.bool()
        behaviour = old_log_probs
        weighted = advantages
        vllm_kl = None
        filtered = None
        # 1. Correct the mismatch between sampler and trainer. With gspo, use the sampler's
        # log-probabilities as the old log-probabilities. Otherwise, weight the advantages.
        corrects = self.options.is_correction_level != "off"
        if corrects and self.by_sequence:
            behaviour = rollout_log_probs
        elif corrects:
            with torch.no_grad():
                coefficient, filtered = self._correction(old_log_probs, rollout_log_probs, keep)
                weighted = advantages * coefficient
                vllm_kl = _mean(rollout_log_probs - old_log_probs, keep)
        # 2. Compute the loss. OpenRLHF clamps the log ratio of each token, except with gspo. A
        # clamped token gets no gradient.
        if not self.by_sequence:
            is_clamped = (log_probs.detach() - behaviour).abs() > LOG_RATIO_BOUND
            log_probs = torch.where(is_clamped, log_probs.detach(), log_probs)
        tokens: float | Tensor = keep.sum().clamp(min=1)
        completions: float | Tensor = keep.any(-1).sum().clamp(min=1)
        if batch_num_tokens is not None:
            tokens = batch_num_tokens / dp_size
        if global_batch_size is not None:
            completions = global_batch_size / dp_size
        loss = grpo_loss(
            log_probs, weighted, self.config, completion_mask=keep, old_logps=behaviour,
            num_items_in_batch=tokens if self.by_token else None,
            num_completions_in_batch=None if self.by_token else completions,
        ).loss  # fmt: skip
        # 3. Compute OpenRLHF's metrics.
        with torch.no_grad():
            clip_ratio = _mean(self._clipped(log_probs - behaviour, advantages, keep), keep)
            ppo_kl = _mean(old_log_probs - log_probs, keep)
        return loss, clip_ratio, ppo_kl, vllm_kl, filtered

    def _clipped(self, log_ratio: Tensor, advantages: Tensor, keep: Tensor) -> Tensor:
        """Return True at the tokens whose loss is clipped, shape (B, L)."""
        if self.by_sequence:
            log_ratio = _row_mean(log_ratio, keep)
        ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        high = ratio > 1 + self.config.epsilon_high
        low = ratio < 1 - self.config.epsilon_low
        return ((advantages > 0) & high) | ((advantages < 0) & low)

    def _correction(
        self, old_log_probs: Tensor, rollout_log_probs: Tensor, keep: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the weights that correct the mismatch between sampler and trainer.

        Returns:
            The weights of the tokens, shape (B, L) or (B, 1), and the fraction of tokens or
            completions outside the threshold, 0-d.
        """
        low, high = self.options.is_correction_threshold
        gating = self.options.is_correction_gating
        per_sequence = self.options.is_correction_level == "seq"
        log_ratio = old_log_probs - rollout_log_probs
        statistic = log_ratio
        if gating != "ratio":
            p = rollout_log_probs.exp().clamp(1e-6, 1 - 1e-6)
            q = old_log_probs.exp().clamp(1e-6, 1 - 1e-6)
            statistic = (p - q).abs()
            if gating == "binary_kl":
                statistic = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        if per_sequence:
            statistic = _row_mean(statistic, keep)
        if gating == "ratio":
            statistic = statistic.exp()
        inside = (statistic >= low) & (statistic <= high)
        if per_sequence:  # as in OpenRLHF, an empty completion is never inside
            inside = inside & keep.any(-1, keepdim=True)
        if self.options.is_correction_mode == "clip":
            coefficient = statistic.clamp(low, high)
        else:
            coefficient = torch.where(inside, log_ratio.exp(), 0.0)
        return coefficient, (~inside).float().mean() if per_sequence else _mean(~inside, keep)


def _mean(x: Tensor, keep: Tensor) -> Tensor:
    """Return the mean of `x` over the tokens in `keep`, 0-d. For a bool `x`, count True as 1."""
    return torch.where(keep, x, 0.0).sum() / keep.sum().clamp(min=1)


def _row_mean(x: Tensor, keep: Tensor) -> Tensor:
    """Return the mean of `x` over each completion's tokens in `keep`, or 0 if it has none."""
    return torch.where(keep, x, 0.0).sum(-1, keepdim=True) / keep.sum(-1, keepdim=True).clamp(min=1)

"""OpenRLHF's `PolicyLoss` (openrlhf >= 0.11) on our kernels: the same constructor and result.

    trainer.actor_loss_fn = PolicyLoss.like(trainer.actor_loss_fn)

Differences that are meant: what is masked is inert, whatever it holds; a batch without an active
token gives loss 0, not NaN; the ratio of a completion (gspo) is bounded by e^20.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from grpo_fast import LossConfig, grpo_loss
from grpo_fast.errors import conflict, require

LOG_RATIO_BOUND = 20.0  # OpenRLHF clamps the log ratio of a token here

# Where the importance ratio is taken.
POLICY_LOSS_TYPES = {"ppo": "token", "gspo": "sequence"}
CHOICES = {
    "policy_loss_type": POLICY_LOSS_TYPES,
    "is_correction_level": ("off", "token", "seq"),
    "is_correction_mode": ("mask", "clip"),
    "is_correction_gating": ("ratio", "binary_kl", "tv"),
}
# (loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio)
Returned = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(eq=False, repr=False)
class PolicyLoss(nn.Module):
    """OpenRLHF's policy loss (PPO with an optional dual clip, or GSPO), its options and defaults.

    Raises:
        ValueError: an option out of its range, or two that exclude each other.
    """

    clip_eps_low: float = 0.2
    clip_eps_high: float = 0.2
    dual_clip: float | None = None
    token_level_loss: bool = True
    policy_loss_type: str = "ppo"
    is_correction_level: str = "off"
    is_correction_mode: str = "mask"
    is_correction_gating: str = "ratio"
    is_correction_threshold: Any = (0.5, 5.0)

    def __post_init__(self) -> None:
        super().__init__()
        self._check()
        self.by_sequence = POLICY_LOSS_TYPES[self.policy_loss_type] == "sequence"
        self.token_level_loss = self.token_level_loss and not self.by_sequence
        self.config = self._config()

    @classmethod
    def like(cls, theirs: Any) -> PolicyLoss:
        """The options of an OpenRLHF `PolicyLoss`; ValueError where it has others."""
        state = {name for name in vars(theirs) if not name.startswith("_") and name != "training"}
        options = {field.name for field in fields(cls)}
        expected = f"the options of openrlhf 0.11, {sorted(options)}"
        require(state == options, "PolicyLoss", expected, sorted(state))
        return cls(**{name: getattr(theirs, name) for name in options})

    def _check(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            require(value in choices, name, f"one of {list(choices)}", repr(value))
        for name in ("clip_eps_low", "clip_eps_high"):
            require(getattr(self, name) >= 0, name, "a number >= 0", getattr(self, name))
        level, gating = self.is_correction_level, self.is_correction_gating
        if self.is_correction_mode == "clip" and (level == "seq" or gating != "ratio"):
            other = f"is_correction_level={level!r} and is_correction_gating={gating!r}"
            why = "only the ratio of a token is clipped; use 'mask'"
            raise conflict("is_correction_mode='clip'", other, why)
        bounds = self.is_correction_threshold
        require(len(bounds) == 2, "is_correction_threshold", "(low, high)", bounds)
        if gating != "ratio" and level != "off" and bounds[0] > 0:
            why = "a divergence has an upper bound only; use (0, high)"
            came = f"is_correction_threshold={bounds}"
            raise conflict(came, f"is_correction_gating={gating!r}", why)
        fits = self.dual_clip is None or self.dual_clip > 1
        require(fits, "dual_clip", "None or a number > 1", self.dual_clip)

    def _config(self) -> LossConfig:
        dual: dict[str, Any] = {"loss_type": "dapo"}
        if self.dual_clip is not None:
            dual = {"loss_type": "dual_clip", "dual_clip_c": float(self.dual_clip)}
        return LossConfig(
            epsilon_low=self.clip_eps_low, epsilon_high=self.clip_eps_high,
            importance_sampling_level=POLICY_LOSS_TYPES[self.policy_loss_type],
            aggregation="token_mean_global" if self.token_level_loss else "sequence_mean", **dual,
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
        """(loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio), 0-d; the last two: of a correction.

        `batch_num_tokens` and `global_batch_size` count the whole batch, all ranks; without the one
        that the reduction needs, this call's own count is taken (and `dp_size` is not used).
        """
        mask = torch.ones_like(log_probs) if action_mask is None else action_mask
        keep = mask.bool()
        corrected = self.is_correction_level != "off"
        if corrected and rollout_log_probs is None:
            level = f"is_correction_level={self.is_correction_level!r}"
            raise conflict(
                "rollout_log_probs=None", level, "the correction reads them; pass (B, L)"
            )
        behaviour, weighted, vllm_kl, filtered = old_log_probs, advantages, None, None
        if corrected and self.by_sequence:
            # The sequence's ratio is then taken to the rollout's policy.
            behaviour = rollout_log_probs
        elif corrected:
            with torch.no_grad():
                coefficient, filtered = self._correction(old_log_probs, rollout_log_probs, keep)
                weighted = advantages * coefficient
                vllm_kl = _mean(rollout_log_probs - old_log_probs, keep)
        if not self.by_sequence:  # OpenRLHF's clamp has no gradient beyond its bound
            is_clamped = (log_probs.detach() - behaviour).abs() > LOG_RATIO_BOUND
            log_probs = torch.where(is_clamped, log_probs.detach(), log_probs)
        loss = grpo_loss(
            log_probs, weighted, self.config, completion_mask=mask, old_logps=behaviour,
            **self._totals(keep, dp_size, batch_num_tokens, global_batch_size),
        ).loss  # fmt: skip
        with torch.no_grad():
            clip_ratio = _mean(self._clipped(log_probs - behaviour, advantages, keep), keep)
            ppo_kl = _mean(old_log_probs - log_probs, keep)
        return loss, clip_ratio, ppo_kl, vllm_kl, filtered

    def _totals(
        self,
        keep: Tensor,
        dp_size: int,
        tokens: float | Tensor | None,
        completions: float | Tensor | None,
    ) -> dict[str, Any]:
        if self.token_level_loss:
            own = keep.sum().clamp(min=1)
            return {"num_items_in_batch": own if tokens is None else tokens / dp_size}
        own = keep.any(-1).sum().clamp(min=1)  # a completion without a token does not count
        return {"num_completions_in_batch": own if completions is None else completions / dp_size}

    def _clipped(self, log_ratio: Tensor, advantages: Tensor, keep: Tensor) -> Tensor:
        """(B, L) whether the clipped surrogate is the smaller one."""
        if self.by_sequence:
            log_ratio = _row_mean(log_ratio, keep)
        ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        high, low = ratio > 1 + self.clip_eps_high, ratio < 1 - self.clip_eps_low
        return ((advantages > 0) & high) | ((advantages < 0) & low)

    def _correction(
        self, old_log_probs: Tensor, rollout_log_probs: Tensor, keep: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(B, L) weight of each token's loss, and the fraction of tokens or sequences outside."""
        low, high = self.is_correction_threshold
        per_sequence = self.is_correction_level == "seq"
        log_ratio = old_log_probs - rollout_log_probs
        statistic = self._statistic(old_log_probs, rollout_log_probs)
        if per_sequence:
            statistic = _row_mean(statistic, keep)
        if self.is_correction_gating == "ratio":
            statistic = statistic.exp()
        inside = (statistic >= low) & (statistic <= high)
        if per_sequence:  # OpenRLHF's statistic of an empty completion is NaN: outside
            inside = inside & keep.any(-1, keepdim=True)
        if self.is_correction_mode == "clip":
            coefficient = statistic.clamp(low, high)
        else:
            coefficient = torch.where(inside, log_ratio.exp(), 0.0)
        return coefficient, (~inside).float().mean() if per_sequence else _mean(~inside, keep)

    def _statistic(self, old_log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
        """(B, L) the log ratio of each token, or a divergence between the two policies."""
        if self.is_correction_gating == "ratio":
            return old_log_probs - rollout_log_probs
        p, q = (x.exp().clamp(1e-6, 1 - 1e-6) for x in (rollout_log_probs, old_log_probs))
        if self.is_correction_gating == "tv":
            return (p - q).abs()
        return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def _mean(x: Tensor, keep: Tensor) -> Tensor:
    terms = x & keep if x.dtype == torch.bool else torch.where(keep, x, 0.0)
    return terms.sum() / keep.sum().clamp(min=1)


def _row_mean(x: Tensor, keep: Tensor) -> Tensor:
    """(B, 1): the mean over each completion's tokens, 0 where it has none."""
    return torch.where(keep, x, 0.0).sum(-1, keepdim=True) / keep.sum(-1, keepdim=True).clamp(min=1)

"""Packed rows of samples from TRL's asynchronous GRPO (`trl.experimental.async_grpo`, TRL 1.16).

A prefix that several samples share is computed once.

    from grpo_fast.attention import head_of, register

    model.set_attn_implementation(register())
    # `samples` are items of the rollout queue, or TreeRow.samples.
    batch = pack_samples(samples, device=model.device)
    hidden = model.model(**batch.pack.model_inputs).last_hidden_state[0]
    head = head_of(model)
    config = LossConfig(**head.logit_kwargs)
    out = linear_grpo_loss(hidden, head.weight, config=config, bias=head.bias, **batch.loss_inputs)
    out.loss.backward()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.attention import PackedTree, pack_tree
from grpo_fast.errors import require


class TreeBatch(NamedTuple):
    """One packed row of B samples. The loss trains R tokens of the row."""

    pack: PackedTree
    advantages: Tensor  # (B,) fp32
    old_logps: Tensor  # (R,) fp32 log-probabilities of the sampler

    @property
    def loss_inputs(self) -> dict[str, Tensor]:
        """Return the keyword arguments of `linear_grpo_loss` that depend on the samples."""
        return {
            "target_ids": self.pack.target_ids, "hidden_rows": self.pack.predicting,
            "cu_seqlens": self.pack.cu_seqlens, "advantages": self.advantages,
            "old_logps": self.old_logps,
        }  # fmt: skip


def pack_samples(
    samples: Sequence[Mapping[str, Any]], *, device: torch.device | str = "cpu"
) -> TreeBatch:
    """Pack samples into one row for `linear_grpo_loss`.

    A trained token that several samples share is computed once. The loss counts it once for each of
    these samples.

    Args:
        samples: Mappings with `input_ids`, `completion_mask` and `old_log_probs`, each of shape
            (n,), and with a number `advantage`.
        device: Device of the returned tensors.

    Returns:
        The packed row, the advantages, and the sampler's log-probabilities.

    Raises:
        ValueError: A sample has fields of different lengths or no token to train. The message names
            the sample.
    """
    pack = pack_tree([(s["input_ids"], s["completion_mask"]) for s in samples], device=device)
    logps = []
    for number, sample in enumerate(samples):
        old = torch.as_tensor(sample["old_log_probs"], dtype=torch.float32, device="cpu")
        mask = torch.as_tensor(sample["completion_mask"], device="cpu")
        expected = f"old_log_probs for each of {len(mask)} ids"
        fits = old.shape == mask.shape
        require(fits, f"samples[{number}]", expected, tuple(old.shape))
        logps.append(old[mask.bool()])
    advantages = torch.tensor([float(sample["advantage"]) for sample in samples])
    return TreeBatch(pack, advantages.to(device), torch.cat(logps).to(device))

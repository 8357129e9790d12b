"""Samples of TRL's asynchronous GRPO (1.16, `trl.experimental.async_grpo`) as one row in which
every distinct prefix stands once.

    model.set_attn_implementation(register())  # of grpo_fast.attention
    batch = pack_samples(samples, device=model.device)  # of the rollout queue, or TreeRow.samples
    hidden = model.model(**batch.pack.model_inputs).last_hidden_state[0]
    head = head_of(model)
    config = LossConfig(**head.rule)
    out = linear_grpo_loss(hidden, head.weight, config=config, bias=head.bias, **batch.loss_inputs)
    out.loss.backward()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from grpo_fast.attention import pack_tree
from grpo_fast.errors import require
from grpo_fast.integrations.trees import TreeBatch


def pack_samples(
    samples: Sequence[Mapping[str, Any]], *, device: torch.device | str = "cpu"
) -> TreeBatch:
    """Pack samples for `linear_grpo_loss`; each trained token counts for every sample that has it.

    Args:
        samples: with `input_ids` (n,), `completion_mask` (n,), `old_log_probs` (n,), `advantage`.

    Raises ValueError, which names the sample, where lengths differ or no token can be trained.
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

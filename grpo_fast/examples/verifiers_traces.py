"""Pack traces that verifiers 0.4 recorded (schema version 1) into one row.

    from grpo_fast.attention import head_of, register

    model.set_attn_implementation(register())
    pack, inputs = pack_traces(traces, advantages, device=model.device)
    hidden = model.model(**pack.model_inputs).last_hidden_state[0]
    head = head_of(model)
    config = LossConfig(**head.logit_kwargs)
    out = linear_grpo_loss(hidden, head.weight, config=config, bias=head.bias, **inputs)
    out.loss.backward()

Every branch of a trace is a sample. A message that several branches share is computed once, and
counts in the loss only in the first of these branches. Branches share a prefix if its token ids and
its recorded expert routes are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from grpo_fast import Support
from grpo_fast.attention import PackedTree, pack_tree
from grpo_fast.data import read_traces
from grpo_fast.errors import require


def pack_traces(
    traces: Iterable[Any], advantages: Sequence[float], *, device: torch.device | str = "cpu"
) -> tuple[PackedTree, dict[str, Any]]:
    """Pack traces into one row for `linear_grpo_loss`.

    Args:
        traces: `Trace` objects, or their records as dictionaries. Records in files have no sampling
            masks and no expert routes. Objects, and records that a server sends, may have both.
        advantages: One advantage for each trace.
        device: Device of the returned tensors.

    Returns:
        The packed row, and the keyword arguments of `linear_grpo_loss`.

    Raises:
        ValueError: A trace cannot be trained on. The message names the trace and the node.
    """
    records = [t if isinstance(t, dict) else t.model_dump(mode="python") for t in traces]
    recorded = read_traces(records)
    fits = len(advantages) == len(recorded)
    require(fits, "advantages", f"{len(recorded)} numbers", len(advantages))
    branches = []
    values = []
    for trace, advantage in zip(recorded, advantages, strict=True):
        branches += trace.branches
        values += [advantage] * sum(len(branch.logps) for branch in trace.branches)
    samples = [(branch.ids, branch.trained) for branch in branches]
    pack = pack_tree(samples, apart=[branch.routes for branch in branches], device=device)
    inputs = {
        "target_ids": pack.target_ids,
        "hidden_rows": pack.predicting,
        "cu_seqlens": pack.cu_seqlens,
        "advantages": torch.tensor(values, dtype=torch.float32, device=device),
        "old_logps": torch.cat([branch.logps for branch in branches]).to(device),
        "support": Support.join([branch.support for branch in branches], pack.lengths, device),
    }
    return pack, inputs

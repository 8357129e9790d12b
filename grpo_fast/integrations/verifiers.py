"""Traces of verifiers (0.4, schema version 1) as one row: every message of every rollout once.

    model.set_attn_implementation(register())  # of grpo_fast.attention
    batch = pack_traces(traces, advantages=advantages, device=model.device)
    hidden = model.model(**batch.pack.model_inputs).last_hidden_state[0]
    head = head_of(model)
    config = LossConfig(**head.rule)
    out = linear_grpo_loss(hidden, head.weight, config=config, bias=head.bias, **batch.loss_inputs)
    out.loss.backward()

`traces` are Trace objects or their records. Every branch is a sample. A sampled message that
several branches share is trained in the first one only; prefixes share rows wherever their ids, and
the experts recorded for them, are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from grpo_fast import Support
from grpo_fast.attention import pack_tree
from grpo_fast.data import read_traces
from grpo_fast.errors import require
from grpo_fast.integrations.trees import TreeBatch


def pack_traces(
    traces: Iterable[Any],
    *,
    advantages: Sequence[float] | None = None,
    device: torch.device | str = "cpu",
) -> TreeBatch:
    """Pack traces for `linear_grpo_loss`.

    Args:
        traces: `Trace` objects, or their records as dictionaries. Sampling masks and routes are in
            objects and in the wire's records, not in those on disk.
        advantages: of each trace; None: the ones that its nodes have recorded.

    Raises ValueError, which names the trace and the node, for whatever cannot be trained on.
    """
    records = [t if isinstance(t, dict) else t.model_dump(mode="python") for t in traces]
    recorded = read_traces(records)
    if advantages is not None:
        fits = len(advantages) == len(recorded)
        require(fits, "advantages", f"{len(recorded)} numbers", len(advantages))
    branches = [(n, branch) for n, trace in enumerate(recorded) for branch in trace.branches]
    values = []
    for n, branch in branches:
        own = branch.advantages if advantages is None else torch.tensor(advantages[n])
        if own is None:
            expected = "advantages in its nodes, or the argument advantages"
            raise ValueError(f"traces[{n}]: expected {expected}, got neither")
        values.append(own.expand(len(branch.logps)))
    samples = [(branch.ids, branch.trained) for _, branch in branches]
    pack = pack_tree(samples, apart=[branch.routes for _, branch in branches], device=device)
    old_logps = torch.cat([branch.logps for _, branch in branches]).to(device)
    support = Support.join([branch.kept for _, branch in branches], pack.lengths, device)
    return TreeBatch(pack, torch.cat(values).float().to(device), old_logps, support)

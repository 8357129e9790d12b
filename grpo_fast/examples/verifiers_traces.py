"""Pack traces that verifiers 0.4 recorded (schema version 1) into one row.

    from grpo_fast.attention import head_of, prepare

    prepare(model)
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

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_fast import Support
from grpo_fast.attention import PackedTree, pack_tree
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
        ValueError: A trace cannot be trained on.
    """
    records = [t if isinstance(t, dict) else t.model_dump(mode="python") for t in traces]
    fits = len(advantages) == len(records)
    require(fits, "advantages", f"{len(records)} numbers", len(advantages))
    samples, routes, old_logps, supports, values = [], [], [], [], []
    for record, advantage in zip(records, advantages, strict=True):
        if not (record.get("agent") or {}).get("trainable", True):
            continue
        nodes = record["nodes"]
        used: set[int] = set()  # nodes of earlier branches, which are not trained again
        for path in branches(nodes):
            new = [nodes[i] for i in path if i not in used]
            mask = [m and i not in used for i in path for m in nodes[i]["mask"]]
            used.update(path)
            if not any(mask):
                continue
            samples.append(([t for i in path for t in nodes[i]["token_ids"]], mask))
            routes.append(torch.tensor([r for i in path for r in _routes(nodes[i])]))
            logps = torch.tensor([x for node in new for x in node["logprobs"]])
            require(len(logps) == sum(mask), "logprobs", f"{sum(mask)} numbers", len(logps))
            old_logps.append(logps)
            values.append(torch.full_like(logps, advantage))
            supports += [_support(node) for node in new]
    pack = pack_tree(samples, apart=routes, device=device)
    lengths = [len(counts) for _, counts in supports]
    has_support = any(len(ids) for ids, _ in supports)
    inputs = {
        "target_ids": pack.target_ids,
        "hidden_rows": pack.predicting,
        "cu_seqlens": pack.cu_seqlens,
        "advantages": torch.cat(values).to(device),
        "old_logps": torch.cat(old_logps).to(device),
        "support": Support.join(supports, lengths, device) if has_support else None,
    }
    return pack, inputs


def branches(nodes: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the path from the root to each leaf, as a list of node indices.

    An agent may attempt several compactions of its context and continue with one. The attempts that
    it abandoned are not leaves.
    """
    links = [(i, link) for i, node in enumerate(nodes) for link in node["semantic_parents"]]
    followed = {link["node"] for _, link in links if link["type"] == "compaction"}
    attempts = {i for i, link in links if link["type"] == "compaction_attempt"}
    inner = {node["parent"] for node in nodes} | (attempts - followed)
    paths = [[leaf] for leaf in range(len(nodes)) if leaf not in inner]
    for path in paths:
        while (parent := nodes[path[-1]]["parent"]) is not None:
            require(parent < path[-1], "parent", "an earlier node", parent)
            path.append(parent)
    return [path[::-1] for path in paths]


def _routes(node: Mapping[str, Any]) -> list[int]:
    """Return a number for each token that is equal for messages with equal expert routes."""
    routed = node.get("routed_experts")
    key = 0 if routed is None else hash(_array(routed).tobytes())
    return [key] * len(node["token_ids"])


def _support(node: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the ids that the sampler kept for each sampled token, and their numbers."""
    kept = node.get("sampling_mask")
    if kept is None:
        return torch.zeros(0).int(), torch.zeros(sum(node["mask"])).long()
    return torch.tensor(_array(kept["ids"])).int(), torch.tensor(_array(kept["counts"])).long()


def _array(value: Any) -> np.ndarray:
    """Convert an array to numpy. Servers send arrays as dictionaries with `dtype` and `data`."""
    is_sent = isinstance(value, Mapping)
    return np.frombuffer(value["data"], value["dtype"]) if is_sent else np.asarray(value)

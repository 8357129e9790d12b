"""Tests that pack recorded traces of verifiers into one row.

They check that the loss equals the loss of the same samples in separate rows.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_fast import LossConfig, grpo_loss, linear_grpo_loss
from grpo_fast.attention import head_of, register
from grpo_fast.examples import verifiers_traces
from grpo_fast.examples.verifiers_traces import branches, pack_traces
from tests.attention.test_trees import by_sample
from tests.tiny import tiny_model

RECORDED = Path(__file__).parent / "recorded" / "verifiers-0.4.0.jsonl"
NAMES = {"pack_traces": pack_traces, "LossConfig": LossConfig, "linear_grpo_loss": linear_grpo_loss}


def records():
    """Return four traces that verifiers 0.4.0 recorded, two for each of two tasks.

    Each trace has two branches, which share the first turn. One branch continues with a tool's
    result and a second turn. The other branch continues with a different result and two more turns.
    """
    return [json.loads(line) for line in RECORDED.read_text().splitlines()]


def flattened(model, samples, advantages, old):
    """Compute the loss of samples in separate rows, and return it with the model's gradients."""
    ends = torch.tensor([0, *(sum(trained) for _, trained in samples)]).cumsum(0).int()
    logps = by_sample(model, samples)
    out = grpo_loss(logps, advantages, LossConfig(), old_logps=old, cu_seqlens=ends)
    model.zero_grad()
    out.loss.backward()
    return out.loss.detach(), [p.grad.clone() for p in model.parameters()]


def test_traces_of_verifiers():
    """Check the example in the docstring of the module."""
    model, advantages = tiny_model("llama"), [1.0, -1.0, -0.5, 0.5]
    names = {"model": model, "traces": records(), "advantages": advantages, **NAMES}
    lines = verifiers_traces.__doc__.splitlines()
    exec("\n".join(line[4:] for line in lines if line.startswith("    ")), names)
    found = [p.grad.clone() for p in model.parameters()]
    pack = names["pack"]
    nodes = [node for record in records() for node in record["nodes"]]
    # A prefix that several branches share must be packed once. The last token of each branch must
    # not be packed, because it predicts nothing.
    assert pack.layout.total == sum(len(n["token_ids"]) for n in nodes) - 2 * 13 - 8
    assert len(pack.target_ids) == sum(map(sum, (n["mask"] for n in nodes)))
    # For comparison, build one sample with all turns for each branch. A turn that two branches
    # share is trained in only one of the two samples.
    samples, old, worth = [], [], []
    for record, advantage in zip(records(), advantages, strict=True):
        for path, shared in (([0, 1, 4, 5], ()), ([0, 1, 2, 3, 6, 7], (1,))):
            ids, mask = [], []
            for i in path:
                node = record["nodes"][i]
                ids += node["token_ids"]
                mask += [m and i not in shared for m in node["mask"]]
                old += [] if i in shared else node["logprobs"]
            samples.append((ids, mask))
            worth += [advantage] * sum(mask)
    loss, gradients = flattened(model, samples, torch.tensor(worth), torch.tensor(old))
    torch.testing.assert_close(names["out"].loss.detach(), loss, rtol=0, atol=1e-5)
    for mine, gradient in zip(found, gradients, strict=True):
        assert (mine - gradient).abs().max() <= 1e-5 * max(1, gradient.abs().max())
    with pytest.raises(ValueError, match="advantages: expected 4 numbers, got 2"):
        pack_traces(records(), [1, 2])


def wire(values, dtype):
    array = np.asarray(values, dtype=dtype)
    return {"__nd__": True, "dtype": dtype, "shape": list(array.shape), "data": array.tobytes()}


def test_sampling_masks_and_routes_come_over_the_wire():
    """Check that a recorded sampling mask becomes the support of the loss.

    Also check that tokens with equal ids but different expert routes do not share rows.
    """
    traces, model = records()[:2], tiny_model("llama")
    plain, inputs = pack_traces(traces, [1, -1])
    assert inputs["support"] is None
    node = traces[1]["nodes"][3]
    sampled = [t for t, m in zip(node["token_ids"], node["mask"], strict=True) if m]
    sets = [sorted({t, 7, 9}) for t in sampled]
    ids, sizes = sum(sets, []), [len(s) for s in sets]
    node["sampling_mask"] = {"ids": wire(ids, "int32"), "counts": wire(sizes, "int32")}
    pack, inputs = pack_traces(traces, [1, -1])
    counts = inputs["support"].offsets.diff().tolist()
    of_node = [n for n in counts if n]
    assert of_node == sizes and len(counts) == len(pack.target_ids)
    place = counts.index(of_node[0])
    assert pack.target_ids[place : place + len(sampled)].tolist() == sampled
    assert inputs["support"].ids.tolist() == ids
    model.set_attn_implementation(register())
    hidden = model.model(**pack.model_inputs).last_hidden_state[0]
    config = LossConfig()
    out = linear_grpo_loss(hidden, head_of(model).weight, config=config, **inputs)
    assert torch.isfinite(out.loss)
    for trace, first in zip(traces, (1, 2), strict=True):
        experts = np.zeros((12, 2, 1), dtype=np.uint8)
        experts[-3:] = first
        trace["nodes"][0]["routed_experts"] = wire(experts, "uint8")
    apart, _ = pack_traces(traces, [1, -1])
    assert apart.layout.total == plain.layout.total + 13


def test_branches_that_are_not_trained():
    """Check that an agent that is not trainable and an abandoned compaction add no branch."""
    record = records()[1]
    assert branches(record["nodes"]) == [[0, 1, 4, 5], [0, 1, 2, 3, 6, 7]]
    record["nodes"][5]["semantic_parents"] = [{"node": 4, "type": "compaction_attempt"}]
    assert branches(record["nodes"]) == [[0, 1, 2, 3, 6, 7]]
    judge = {**records()[0], "agent": {"trainable": False}}
    pack, _ = pack_traces([judge, record], [1, 1])
    assert pack.lengths == (15,)
    record["nodes"][3]["parent"] = 6
    with pytest.raises(ValueError, match="parent: expected an earlier node, got 6"):
        branches(record["nodes"])
    record = records()[0]
    record["nodes"][3]["logprobs"].pop()
    with pytest.raises(ValueError, match="logprobs: expected 10 numbers, got 9"):
        pack_traces([record], [1])

"""Recorded rollouts of agents, as traces in the format of verifiers 0.4 (schema version 1).

A trace is a tree of messages with their tokens. Each path from the root to a leaf is a branch, and
each branch becomes a sample. If several branches contain the same sampled message, the tokens of
this message are trained only in the first of these branches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.data.escape import reason
from grpo_fast.data.example import Example, Fields
from grpo_fast.data.readers import read_jsonl
from grpo_fast.data.trace_nodes import Node, is_number, read_node
from grpo_fast.errors import require

VERSION = 1  # version of the schema


class Branch(NamedTuple):
    """One path from the root to a leaf of a trace. It has n tokens, and r of them are trained.

    Attributes:
        ids: (n,) int64 token ids.
        trained: (n,) bool, True for the r tokens that are trained in this branch.
        logps: (r,) fp32, log-probabilities that the sampler reported.
        advantages: (r,) fp32, or None if the trace has no advantages.
        support: a pair of tensors, or None if nothing was recorded. The first tensor, (nnz,)
            int32, contains the ids that top_k and top_p kept for each trained token. The second
            tensor, (r,) int64, contains the number of these ids for each trained token.
        routes: (n,) int64. For each token, a hash of the experts recorded for its message, or 0 if
            none were recorded. Packing shares a token between branches only if its hashes agree.
    """

    ids: Tensor
    trained: Tensor
    logps: Tensor
    advantages: Tensor | None
    support: tuple[Tensor, Tensor] | None
    routes: Tensor


class RecordedTrace(NamedTuple):
    """One recorded rollout of an agent.

    Attributes:
        task: name of the task. All rollouts of a task form a group.
        reward: weighted sum of the recorded rewards, or None.
        branches: the branches that have at least one trained token.
    """

    task: str
    reward: float | None
    branches: list[Branch]


def load_traces(path: str | Path) -> list[RecordedTrace]:
    """Return the traces of a JSON lines file, or of all `.jsonl` files in a folder.

    Raises:
        ValueError: there is no trace, a line is not a trace, or two different traces have the
            same id.
    """
    files = sorted(Path(path).glob("*.jsonl")) if Path(path).is_dir() else [Path(path)]
    rows = [row for file in files for row in read_jsonl(file)]
    require(rows, str(path), "at least one trace", "none")
    return read_traces([record for _, record in rows], [where for where, _ in rows])


def trace_examples(path: str | Path) -> list[Example]:
    """Return one example for each task in a file of traces, in the order of first occurrence.

    The prompt of an example is the name of the task. The field `digest` is a hash of the task's
    traces. A resumed run compares it to detect that the data has changed.
    """
    traces = load_traces(path)
    digests = {task: blake2b() for task in dict.fromkeys(trace.task for trace in traces)}
    for trace in traces:
        digests[trace.task].update(repr(trace.reward).encode())
        for branch in trace.branches:
            parts = (x for x in branch[:4] if x is not None)
            digests[trace.task].update(b"".join(x.numpy().tobytes() for x in parts))
    return [Example(task, None, None, {"digest": h.hexdigest()}) for task, h in digests.items()]


def read_traces(
    records: Iterable[Fields], names: Sequence[str] | None = None
) -> list[RecordedTrace]:
    """Read traces from their records. Repeated traces are skipped.

    Args:
        records: results of `trace.to_record()` or of `trace.model_dump(mode="python")`. Only
            `model_dump` includes sampling masks and routed experts.
        names: name of each record, for error messages. Default: `traces[0]`, `traces[1]`, ….

    Raises:
        ValueError: a record is not a trace. The message names the record and the node.
    """
    by_id: dict[str, tuple[str, list[Node], RecordedTrace]] = {}
    for number, record in enumerate(records):
        # 1. Check the nodes, and build the branches.
        name = names[number] if names is not None else f"traces[{number}]"
        require(isinstance(record, Mapping), name, "a trace", type(record).__name__)
        version = record.get("version", VERSION)
        require(version == VERSION, f"{name}.version", f"{VERSION}, as of verifiers 0.4", version)
        try:
            nodes = [
                read_node(f"{name}.nodes[{i}]", node) for i, node in enumerate(record["nodes"])
            ]
            trace = _trace(name, record, nodes)
        except Exception as error:  # a record may contain values of any type
            if isinstance(error, ValueError) and str(error).startswith(name):
                raise
            expected = "the fields of a trace of verifiers"
            raise ValueError(f"{name}: expected {expected}, got {reason(error)}") from error
        # 2. Skip a trace that has already been read.
        key = repr(record.get("id", number))
        if key in by_id:
            first, others, _ = by_id[key]
            same = [(a.ids, a.mask) for a in nodes] == [(b.ids, b.mask) for b in others]
            require(same, name, f"the nodes of {first}, which has the same id {key}", "others")
            continue
        by_id[key] = name, nodes, trace
    return [trace for _, _, trace in by_id.values()]


def check_traces(traces: Iterable[RecordedTrace], name: str, vocab_size: int, most: float) -> None:
    """Check that all branches fit the model's vocabulary and its maximum length.

    Args:
        traces: the traces.
        name: name of the traces' file, for error messages.
        vocab_size: number of rows of the model's embedding.
        most: largest number of tokens in a branch, which is the model's number of positions.

    Raises:
        ValueError: a branch is too long, or has ids that are not in the vocabulary.
    """
    for trace in traces:
        for branch in trace.branches:
            largest, count = int(branch.ids.max()), len(branch.ids)
            expected = f"token ids from 0 to {vocab_size - 1}, as the model's embedding"
            require(largest < vocab_size, name, expected, f"{largest} in {trace.task!r}")
            expected = f"at most {most} tokens in a branch (max_position_embeddings of the model)"
            require(count <= most, name, expected, f"{count} in {trace.task!r}")


def _trace(name: str, record: Fields, nodes: list[Node]) -> RecordedTrace:
    # 1. Sum the weighted rewards.
    task = record.get("task") or {}
    rewards = (record.get("rewards") or {}).values()
    scores = [(r["score"], r.get("weight", 1.0)) for r in rewards if r is not None]
    are_numbers = all(is_number(x) for pair in scores for x in pair)
    require(are_numbers, f"{name}.rewards", "finite numbers", scores)
    reward = math.fsum(score * weight for score, weight in scores) if scores else None
    require(reward is None or is_number(reward), f"{name}.rewards", "a finite sum", reward)
    # 2. Build a branch for each leaf. If several branches contain a node, its tokens are trained
    # only in the first of them.
    is_trained = (record.get("agent") or {}).get("trainable", True)
    fits = isinstance(is_trained, bool)
    require(fits, f"{name}.agent.trainable", "true or false", repr(is_trained))
    seen: set[int] = set()
    branches = []
    for path in _paths(name, nodes, record["nodes"]) if is_trained else ():
        branch = _branch([(nodes[i], i not in seen) for i in path])
        first = f"{name}.nodes[{path[0]}]"
        require(not branch.trained[0], first, "no sampled token at position 0", "one")
        seen |= set(path)
        if branch.trained.any():
            branches.append(branch)
    return RecordedTrace(str(task.get("key") or task.get("hash") or name), reward, branches)


def _paths(name: str, nodes: list[Node], raw: Sequence[Fields]) -> list[list[int]]:
    """Return the path from the root to each leaf, as a list of node indices.

    A compaction attempt that the agent abandoned does not count as a leaf. In a compaction, an
    agent replaces its context with a shorter one. It may attempt several and continue with one.
    """
    # 1. Check that every parent is an earlier node, so that there are no cycles.
    for i, node in enumerate(nodes):
        above = node.parent
        fits = above is None or (type(above) is int and 0 <= above < i)
        require(fits, f"{name}.nodes[{i}].parent", f"None or one of the {i} nodes before it", above)
    # 2. Collect in `inner` all nodes that do not count as leaves: nodes with children, and
    # compaction attempts that the agent abandoned.
    links = [(i, link) for i, node in enumerate(raw) for link in node.get("semantic_parents") or ()]
    followed = {link["node"] for _, link in links if link["type"] == "compaction"}
    attempts = {i for i, link in links if link["type"] == "compaction_attempt"}
    inner = {node.parent for node in nodes} | (attempts - followed)
    # 3. Follow the parents from each leaf to its root.
    paths = []
    for leaf in range(len(nodes)):
        if leaf in inner:
            continue
        path = []
        at: int | None = leaf
        while at is not None:
            path.append(at)
            at = nodes[at].parent
        paths.append(path[::-1])
    return paths


def _branch(path: list[tuple[Node, bool]]) -> Branch:
    """Join the nodes of a path into a branch.

    Args:
        path: pairs of a node and a flag. The flag is True if this branch trains the node's tokens.
    """
    trained = [node for node, is_new in path if is_new]
    has_advantages = any(node.advantages is not None for node, _ in path)
    advantages = [n.advantages or [0.0] * len(n.logps) for n in trained]
    support = None
    if any(node.support is not None for node in trained):
        none = torch.empty(0).int()
        sets = [n.support or (none, torch.zeros(len(n.logps)).long()) for n in trained]
        ids, counts = (torch.cat(parts) for parts in zip(*sets, strict=True))
        support = ids, counts
    return Branch(
        torch.tensor([i for node, _ in path for i in node.ids]),
        torch.tensor([m and is_new for node, is_new in path for m in node.mask]),
        torch.tensor([x for node in trained for x in node.logps], dtype=torch.float32),
        torch.tensor([x for each in advantages for x in each]) if has_advantages else None,
        support,
        torch.tensor([node.routes for node, _ in path for _ in node.ids]),
    )

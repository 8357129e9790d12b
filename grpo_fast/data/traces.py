"""Recorded rollouts of agents: traces of verifiers (schema version 1, written by verifiers 0.4).

A trace is a graph of messages with their tokens. Each path from a root to a leaf is a branch, and
each branch is a sample. A sampled node that several branches share is trained in one only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.data.escape import reason
from grpo_fast.data.example import DatasetError, Example, need
from grpo_fast.data.files import read_jsonl

VERSION = 1  # of the schema
DTYPES = {"int32": torch.int32, "int64": torch.int64}


class Branch(NamedTuple):
    """A path through a trace: n tokens, of which r are trained."""

    ids: Tensor  # (n,) int64
    trained: Tensor  # (n,) bool
    logps: Tensor  # (r,) fp32, of the sampler
    advantages: Tensor | None  # (r,) fp32; None: nobody recorded any
    kept: tuple[Tensor, Tensor] | None  # (nnz,) int32, (r,) int64: what each was drawn from, counts
    routes: Tensor  # (n,) int64: differs where experts were recorded and differ, else 0


class RecordedTrace(NamedTuple):
    task: str  # rollouts of one task are a group
    reward: float | None
    branches: list[Branch]


class _Node(NamedTuple):
    parent: int | None
    ids: list[int]
    mask: list[bool]
    logps: list[float]
    advantages: list[float] | None
    kept: tuple[Tensor, Tensor] | None
    routes: int


def load_traces(path: str | Path) -> list[RecordedTrace]:
    """The traces of a file of JSON lines, or of all `.jsonl` files in a folder, in their order.

    Raises DatasetError for no trace, a line that is none, one trace twice with other nodes.
    """
    files = sorted(Path(path).glob("*.jsonl")) if Path(path).is_dir() else [Path(path)]
    rows = [row for file in files for row in read_jsonl(file)]
    need(rows, str(path), "at least one trace", "none")
    return read_traces([record for _, record in rows], [where for where, _ in rows])


def trace_examples(path: str | Path) -> list[Example]:
    """The tasks of a file of traces, in order of their first trace, as examples to go through."""
    traces = load_traces(path)
    texts = {task: blake2b() for task in dict.fromkeys(trace.task for trace in traces)}
    for trace in traces:
        texts[trace.task].update(repr(trace.reward).encode())
        for branch in trace.branches:
            parts = (x for x in branch[:4] if x is not None)
            texts[trace.task].update(b"".join(x.numpy().tobytes() for x in parts))
    return [Example(task, None, None, {"digest": h.hexdigest()}) for task, h in texts.items()]


def read_traces(
    records: Iterable[Mapping[str, Any]], names: Sequence[str] | None = None
) -> list[RecordedTrace]:
    """Traces from their records (`trace.to_record()`, or `trace.model_dump(mode="python")`, which
    has sampling masks and routes, too). A trace that comes twice is read once.

    Raises DatasetError, which names the record (by `names`, else `traces[3]`) and the node.
    """
    by_id: dict[str, tuple[str, list[_Node], RecordedTrace]] = {}
    for number, record in enumerate(records):
        name = names[number] if names is not None else f"traces[{number}]"
        need(isinstance(record, Mapping), name, "a trace", type(record).__name__)
        version = record.get("version", VERSION)
        need(version == VERSION, f"{name}.version", f"{VERSION}, as of verifiers 0.4", version)
        try:
            nodes = [_node(f"{name}.nodes[{i}]", node) for i, node in enumerate(record["nodes"])]
            trace = _trace(name, record, nodes)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            expected = "the fields of a trace of verifiers"
            raise DatasetError(f"{name}: expected {expected}, got {reason(error)}") from error
        key = repr(record.get("id", number))
        if key in by_id:
            first, others, _ = by_id[key]
            same = [(a.ids, a.mask) for a in nodes] == [(b.ids, b.mask) for b in others]
            need(same, name, f"the nodes of {first}, which has the same id {key}", "others")
            continue
        by_id[key] = name, nodes, trace
    return [trace for _, _, trace in by_id.values()]


def _trace(name: str, record: Mapping[str, Any], nodes: list[_Node]) -> RecordedTrace:
    task, rewards = record.get("task") or {}, (record.get("rewards") or {}).values()
    values = [r["score"] * r.get("weight", 1.0) for r in rewards if r is not None]
    reward = math.fsum(values) if values else None
    need(reward is None or math.isfinite(reward), f"{name}.rewards", "finite numbers", reward)
    is_trained = (record.get("agent") or {}).get("trainable", True)
    seen: set[int] = set()
    branches = []
    for path in _paths(name, nodes, record["nodes"]) if is_trained else ():
        branch = _branch([(nodes[i], i not in seen) for i in path])
        first = f"{name}.nodes[{path[0]}]"
        need(not branch.trained[0], first, "no sampled token at position 0", "one")
        seen |= set(path)
        if branch.trained.any():
            branches.append(branch)
    return RecordedTrace(str(task.get("key") or task.get("hash") or name), reward, branches)


def _node(name: str, node: Mapping[str, Any]) -> _Node:
    ids, mask = node.get("token_ids") or [], node.get("mask") or []
    need(ids, f"{name}.token_ids", "the tokens of the message", "none: it cannot be trained on")
    need(len(mask) == len(ids), f"{name}.mask", f"{len(ids)} bools, as token_ids", len(mask))
    sampled = sum(map(bool, mask))
    logps, advantages = node.get("logprobs") or [], node.get("advantages")
    for field, values in (("logprobs", logps), ("advantages", advantages)):
        fits = values is None or len(values) == sampled
        need(fits, f"{name}.{field}", f"{sampled} numbers, one for each sampled token",
             None if values is None else len(values))  # fmt: skip
        is_finite = all(map(math.isfinite, values or []))
        need(is_finite, f"{name}.{field}", "finite numbers", values)
    kept = node.get("sampling_mask")
    if kept is not None:
        kept = _array(kept["ids"]).int(), _array(kept["counts"]).long()
        fits = len(kept[1]) == sampled and int(kept[1].sum()) == len(kept[0])
        need(fits, f"{name}.sampling_mask", f"{sampled} counts of its ids", len(kept[1]))
    routes = node.get("routed_experts")
    if routes is not None:
        data = routes["data"] if isinstance(routes, Mapping) else routes.tobytes()
        # 7 bytes: it becomes a signed int64.
        routes = int.from_bytes(blake2b(data, digest_size=7).digest(), "big")
    return _Node(node.get("parent"), list(ids), list(map(bool, mask)), list(logps),
                 advantages, kept, routes or 0)  # fmt: skip


def _array(value: Any) -> Tensor:
    """An array, or its form on the wire (dtype, shape, bytes)."""
    if isinstance(value, Mapping):
        return torch.frombuffer(bytearray(value["data"]), dtype=DTYPES[value["dtype"]])
    return torch.as_tensor(value)


def _paths(name: str, nodes: list[_Node], raw: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The paths from root to leaf; a leaf that is an abandoned compaction has none."""
    every = []
    for start in range(len(nodes)):
        path, at = dict[int, None](), start
        while at is not None:
            fits = at not in path
            need(fits, f"{name}.nodes[{start}].parent", "a path to a root", f"a cycle over {at}")
            path[at], above = None, nodes[at].parent
            fits = above is None or (type(above) is int and 0 <= above < len(nodes))
            need(fits, f"{name}.nodes[{at}].parent", f"None or one of {len(nodes)} nodes", above)
            at = above  # type: ignore[assignment]
        every.append([*path][::-1])
    links = [(i, link) for i, node in enumerate(raw) for link in node.get("semantic_parents") or ()]
    taken = {link["node"] for _, link in links if link["type"] == "compaction"}
    tried = {i for i, link in links if link["type"] == "compaction_attempt"}
    inner = {node.parent for node in nodes} | (tried - taken)
    return [path for leaf, path in enumerate(every) if leaf not in inner]


def _branch(path: list[tuple[_Node, bool]]) -> Branch:
    """The nodes of a path in one piece; a flag says whether a node is trained in this branch."""
    own = [node for node, is_new in path if is_new]
    scored = any(node.advantages is not None for node, _ in path)
    kept = None
    if any(node.kept is not None for node in own):
        whole = [n.kept or (torch.empty(0).int(), torch.zeros(len(n.logps)).long()) for n in own]
        ids, counts = (torch.cat(parts) for parts in zip(*whole, strict=True))
        kept = ids, counts
    advantages = [n.advantages or [0.0] * len(n.logps) for n in own]
    return Branch(
        torch.tensor([i for node, _ in path for i in node.ids]),
        torch.tensor([m and is_new for node, is_new in path for m in node.mask]),
        torch.tensor([x for node in own for x in node.logps], dtype=torch.float32),
        torch.tensor([x for each in advantages for x in each]) if scored else None,
        kept,
        torch.tensor([node.routes for node, _ in path for _ in node.ids]),
    )

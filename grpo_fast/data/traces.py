"""Recorded rollouts of agents: traces of verifiers (schema version 1, written by verifiers 0.4).

A trace is a graph of messages with their tokens. Each path from a root to a leaf is a branch, and
each branch is a sample. A sampled node that several branches share is trained in one only.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.data.escape import reason
from grpo_fast.data.example import DatasetError, Example, need
from grpo_fast.data.files import read_jsonl
from grpo_fast.errors import FP32_MAX, LEAST_LOGP

VERSION = 1  # of the schema
MOST_IDS = 1 << 31  # token ids are below it
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
        # 1. Read and check the nodes, and the paths through them.
        name = names[number] if names is not None else f"traces[{number}]"
        need(isinstance(record, Mapping), name, "a trace", type(record).__name__)
        version = record.get("version", VERSION)
        need(version == VERSION, f"{name}.version", f"{VERSION}, as of verifiers 0.4", version)
        try:
            nodes = [_node(f"{name}.nodes[{i}]", node) for i, node in enumerate(record["nodes"])]
            trace = _trace(name, record, nodes)
        except DatasetError:
            raise
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            expected = "the fields of a trace of verifiers"
            raise DatasetError(f"{name}: expected {expected}, got {reason(error)}") from error
        # 2. A trace that comes twice is read once.
        key = repr(record.get("id", number))
        if key in by_id:
            first, others, _ = by_id[key]
            same = [(a.ids, a.mask) for a in nodes] == [(b.ids, b.mask) for b in others]
            need(same, name, f"the nodes of {first}, which has the same id {key}", "others")
            continue
        by_id[key] = name, nodes, trace
    return [trace for _, _, trace in by_id.values()]


def check_traces(traces: Iterable[RecordedTrace], name: str, vocab_size: int, most: float) -> None:
    """Raise a DatasetError for a branch that a model of this size cannot take.

    Args:
        name: of the file, for the message.
        vocab_size: rows of the model's embedding.
        most: tokens that the model has positions for.
    """
    for trace in traces:
        for branch in trace.branches:
            largest, count = int(branch.ids.max()), len(branch.ids)
            expected = f"token ids from 0 to {vocab_size - 1}, as the model's embedding"
            need(largest < vocab_size, name, expected, f"{largest} in {trace.task!r}")
            expected = f"at most {most} tokens in a branch (max_position_embeddings of the model)"
            need(count <= most, name, expected, f"{count} in {trace.task!r}")


def _trace(name: str, record: Mapping[str, Any], nodes: list[_Node]) -> RecordedTrace:
    task, rewards = record.get("task") or {}, (record.get("rewards") or {}).values()
    scores = [(r["score"], r.get("weight", 1.0)) for r in rewards if r is not None]
    are_numbers = all(is_number(x) for pair in scores for x in pair)
    need(are_numbers, f"{name}.rewards", "finite numbers", scores)
    reward = math.fsum(score * weight for score, weight in scores) if scores else None
    need(reward is None or is_number(reward), f"{name}.rewards", "a finite sum", reward)
    is_trained = (record.get("agent") or {}).get("trainable", True)
    fits = isinstance(is_trained, bool)
    need(fits, f"{name}.agent.trainable", "true or false", repr(is_trained))
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
    expected = f"integers from 0 to {MOST_IDS - 1}"
    _each(f"{name}.token_ids", ids, expected, lambda x: type(x) is int and 0 <= x < MOST_IDS)
    need(len(mask) == len(ids), f"{name}.mask", f"{len(ids)} bools, as token_ids", len(mask))
    _each(f"{name}.mask", mask, "true or false", lambda x: type(x) is bool)
    sampled = [i for i, is_sampled in zip(ids, mask, strict=True) if is_sampled]
    logps, advantages = node.get("logprobs") or [], node.get("advantages")
    for field, values in (("logprobs", logps), ("advantages", advantages)):
        fits = values is None or len(values) == len(sampled)
        need(fits, f"{name}.{field}", f"{len(sampled)} numbers, one for each sampled token",
             None if values is None else len(values))  # fmt: skip
    expected = f"log-probabilities of sampled tokens, above {LEAST_LOGP:g} and at most 0"
    _each(f"{name}.logprobs", logps, expected, lambda x: is_number(x) and LEAST_LOGP < x <= 0)
    _each(f"{name}.advantages", advantages or (), "numbers that fp32 holds", is_number)
    kept = node.get("sampling_mask")
    if kept is not None:
        kept = _kept(f"{name}.sampling_mask", kept, torch.tensor(sampled, dtype=torch.int64))
    routes = node.get("routed_experts")
    if routes is not None:
        data = routes["data"] if isinstance(routes, Mapping) else routes.tobytes()
        # 7 bytes: it becomes a signed int64.
        routes = int.from_bytes(blake2b(data, digest_size=7).digest(), "big")
    return _Node(node.get("parent"), list(ids), list(mask), list(logps),
                 advantages, kept, routes or 0)  # fmt: skip


def is_number(x: Any) -> bool:
    """Whether x is an int or a float that fp32 holds; a bool is none."""
    return type(x) in (int, float) and abs(x) <= FP32_MAX


def _each(name: str, values: Sequence[Any], expected: str, holds: Callable[[Any], bool]) -> None:
    for x in values:
        if not holds(x):
            raise DatasetError(f"{name}: expected {expected}, got {reprlib.repr(x)}")


def _kept(name: str, value: Mapping[str, Any], sampled: Tensor) -> tuple[Tensor, Tensor]:
    """The ids that each sampled token was drawn from, and their counts; 0: the whole vocabulary."""
    parts = []
    for field in ("ids", "counts"):
        x = _array(value[field])
        is_whole = x.dim() == 1 and not (x.is_floating_point() or x.is_complex())
        fits = not x.numel() or (is_whole and x.dtype != torch.bool)
        x = x.long() if fits else x
        fits = fits and bool(((x >= 0) & (x < MOST_IDS)).all())
        need(fits, f"{name}.{field}", f"integers from 0 to {MOST_IDS - 1}", "others")
        parts.append(x.reshape(-1))
    ids, counts = parts
    fits = len(counts) == len(sampled) and int(counts.sum()) == len(ids)
    need(fits, name, f"{len(sampled)} counts of its ids", len(counts))
    tokens = torch.arange(len(counts)).repeat_interleave(counts)
    hits = torch.bincount(tokens[ids == sampled[tokens]], minlength=len(counts))
    fits = bool(((hits == 1) | (counts == 0)).all())
    need(fits, name, "each sampled token once among its own ids", "others")
    return ids.int(), counts


def _array(value: Any) -> Tensor:
    """An array, or its form on the wire (dtype, shape, bytes)."""
    if isinstance(value, Mapping):
        return torch.frombuffer(bytearray(value["data"]), dtype=DTYPES[value["dtype"]])
    return torch.as_tensor(value)


def _paths(name: str, nodes: list[_Node], raw: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The paths from root to leaf; a leaf that is an abandoned compaction has none."""
    # 1. Every parent is a node, and every way up ends at a root. Each node is passed once.
    for i, node in enumerate(nodes):
        above = node.parent
        fits = above is None or (type(above) is int and 0 <= above < len(nodes))
        need(fits, f"{name}.nodes[{i}].parent", f"None or one of {len(nodes)} nodes", above)
    rooted: set[int] = set()
    for start in range(len(nodes)):
        way = dict[int, None]()
        at: int | None = start
        while at is not None and at not in rooted:
            fits = at not in way
            need(fits, f"{name}.nodes[{start}].parent", "a path to a root", f"a cycle over {at}")
            way[at] = None
            at = nodes[at].parent
        rooted.update(way)
    # 2. The leaves: nodes that are nobody's parent, without attempts that no compaction took up.
    links = [(i, link) for i, node in enumerate(raw) for link in node.get("semantic_parents") or ()]
    taken = {link["node"] for _, link in links if link["type"] == "compaction"}
    tried = {i for i, link in links if link["type"] == "compaction_attempt"}
    inner = {node.parent for node in nodes} | (tried - taken)
    # 3. The path to each leaf.
    paths = []
    for leaf in range(len(nodes)):
        if leaf in inner:
            continue
        path = []
        at = leaf
        while at is not None:
            path.append(at)
            at = nodes[at].parent
        paths.append(path[::-1])
    return paths


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

"""The completions of a step as rows, and as a parquet file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo_fast.data import Example
from grpo_fast.rewards import Scorer
from grpo_fast.rewards.columns import prefill_of
from grpo_fast.rewards.scoring import shown_answer, turns
from grpo_fast.rollout import Samples


def rows_of(
    samples: Samples,
    advantages: Sequence[Tensor],  # of the tokens of each completion
    examples: Sequence[Example],  # of each completion
    sent: Sequence[str],  # the prompt of each completion as the model received it
    tokenizer: Any,
    scorer: Callable[[Example], Scorer],
    *,
    count: int,
    group_size: int,
) -> list[dict[str, Any]]:
    """Return rows of the first samples, at least `count` and whole groups.

    A row has prompt, completion and answers as texts, the sample's numbers, and by token `tokens`,
    `logps` (the sampler's) and `advantages`.
    """
    assert samples.rewards is not None
    shown = min(len(samples), -(-count // group_size) * group_size)
    logps = samples.logps.cpu().split(samples.lengths)
    rows = []
    for i in range(shown):
        of_tokens = advantages[i].float().cpu()
        ids = samples.completion(i).tolist()
        text = samples.texts[i]
        answer = examples[i].answer
        judge = scorer(examples[i])
        turn = turns([text], [prefill_of(examples[i].prompt, sent[i])])[0]
        strict = judge.strict(turn)
        correct = judge.is_right(strict) if answer else None
        rows.append({
            "group": i // group_size, "prompt": sent[i],
            "completion": text, "answer": answer, "extracted": shown_answer(strict),
            "extracted_lenient": shown_answer(judge.lenient(turn)),
            "correct": correct, "reward": float(samples.rewards[i]),
            **{f"rewards/{name}": float(values[i]) for name, values in samples.scores.items()},
            **{f"extra/{name}": values[i] for name, values in samples.extra.items()},
            "advantage": float(of_tokens.mean()), "truncated": bool(samples.truncated[i]),
            "tokens": token_texts(tokenizer, ids), "token_ids": ids,
            "logps": logps[i].tolist(), "advantages": of_tokens.tolist(),
        })  # fmt: skip
    return rows


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; a character of several tokens stands at the last of them."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    try:
        texts = [stream.step(tokenizer.backend_tokenizer, i) or "" for i in ids]
    except Exception:  # a tokenizer of another library, or bytes that the stream cannot follow
        return [tokenizer.decode([i]) for i in ids]
    whole, streamed = tokenizer.decode(ids), "".join(texts)
    if texts and whole.startswith(streamed):  # a last character may lack bytes
        texts[-1] += whole[len(streamed) :]
    return texts


def write_parquet(rows: Sequence[Mapping[str, Any]], step: int, path: str | Path) -> None:
    """The rows as one table with a column `step`, written whole or not at all."""
    import pyarrow
    from pyarrow import parquet

    texts, number = pyarrow.string(), pyarrow.float32()
    kinds = {
        "step": pyarrow.int64(), "group": pyarrow.int64(), "prompt": texts, "completion": texts,
        "answer": texts, "extracted": texts, "extracted_lenient": texts, "reward": number,
        "correct": pyarrow.bool_(), "advantage": number, "truncated": pyarrow.bool_(),
        "tokens": pyarrow.list_(texts), "token_ids": pyarrow.list_(pyarrow.int64()),
        "logps": pyarrow.list_(number), "advantages": pyarrow.list_(number),
    }  # fmt: skip
    table = pyarrow.table({
        name: pyarrow.array(
            [_storable(row[name]) for row in rows],
            kinds.get(name, texts if name.startswith("extra/") else number),
        )
        for name in rows[0]
    })  # fmt: skip
    table = table.add_column(0, "step", pyarrow.array([step] * len(rows), kinds["step"]))
    part = Path(f"{path}.tmp")
    parquet.write_table(table, part)
    os.replace(part, path)


def read_parquet(path: str | Path) -> list[dict[str, Any]]:
    from pyarrow import parquet

    return parquet.read_table(path).drop_columns("step").to_pylist()


def _storable(value: Any) -> Any:
    r"""Half a character, as \ud800, is no UTF-8: written as its number."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    return [_storable(item) for item in value] if isinstance(value, list) else value

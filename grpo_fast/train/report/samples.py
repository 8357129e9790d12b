"""Conversion of the completions of a step to dicts, and parquet tables that store the dicts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from grpo_fast.data import Example
from grpo_fast.rewards import Scorer
from grpo_fast.rewards.columns import prefill_of
from grpo_fast.rewards.scoring import shown_answer, turns
from grpo_fast.rollout import Samples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def rows_of(
    samples: Samples,
    advantages: Sequence[Tensor],  # advantages of each completion's tokens, shape (tokens,)
    examples: Sequence[Example],  # the example that each completion answers
    sent: Sequence[str],  # prompt of each completion, as the model received it
    tokenizer: PreTrainedTokenizerBase,
    scorer: Callable[[Example], Scorer],
    *,
    group_size: int,
) -> list[dict[str, Any]]:
    """Return a dict for each sample, with its texts, rewards and advantages.

    The values of `tokens`, `logps` (from the sampler) and `advantages` are lists with an entry for
    each token. All other values describe the whole completion.
    """
    assert samples.rewards is not None
    logps = samples.logps.cpu().split(samples.lengths)
    rows = []
    for i in range(len(samples)):
        token_advantages = advantages[i].float().cpu()
        ids = samples.completion(i).tolist()
        text = samples.texts[i]
        answer = examples[i].answer
        judge = scorer(examples[i])
        turn = turns([text], [prefill_of(examples[i].prompt, sent[i])])[0]
        strict = judge.strict(turn)
        rows.append({
            "group": i // group_size, "prompt": sent[i],
            "completion": text, "answer": answer, "extracted": shown_answer(strict),
            "extracted_lenient": shown_answer(judge.lenient(turn)),
            "correct": judge.is_right(strict) if answer else None,
            "reward": float(samples.rewards[i]),
            **{f"rewards/{name}": float(values[i]) for name, values in samples.scores.items()},
            **{f"extra/{name}": values[i] for name, values in samples.extra.items()},
            "advantage": float(token_advantages.mean()), "truncated": bool(samples.truncated[i]),
            "tokens": token_texts(tokenizer, ids), "token_ids": ids,
            "logps": logps[i].tolist(), "advantages": token_advantages.tolist(),
        })  # fmt: skip
    return rows


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds to the decoded completion.

    If a character consists of several tokens, it is attributed to the last of them, and the others
    get an empty string.
    """
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    try:
        texts = [stream.step(tokenizer.backend_tokenizer, i) or "" for i in ids]
    except Exception:  # not a fast tokenizer, or invalid bytes
        return [tokenizer.decode([i]) for i in ids]
    whole = tokenizer.decode(ids)
    streamed = "".join(texts)
    if texts and whole.startswith(streamed):  # the stream omits an incomplete end
        texts[-1] += whole[len(streamed) :]
    return texts


def write_parquet(rows: Sequence[Mapping[str, object]], step: int, path: str | Path) -> None:
    """Write rows to a parquet table, with a column `step`. The file is replaced atomically."""
    import pyarrow
    from pyarrow import parquet

    plain = [{"step": step} | {name: _storable(row[name]) for name in row} for row in rows]
    part = Path(f"{path}.tmp")
    parquet.write_table(pyarrow.Table.from_pylist(plain), part)
    os.replace(part, path)


def read_parquet(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a parquet table, without the column `step`."""
    from pyarrow import parquet

    return parquet.read_table(path).drop_columns("step").to_pylist()


def _storable(value: Any) -> Any:
    r"""Replace lone surrogates with escapes such as \ud800, because UTF-8 cannot encode them."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    return [_storable(item) for item in value] if isinstance(value, list) else value

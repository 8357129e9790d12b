"""What a checkpoint's state may hold: every field is checked once, when it is read.

A run's folder may be somebody else's. A counter that is negative, a text in place of a number, a
field more or less, or a nesting without end is refused with the name of the field.
"""

from __future__ import annotations

from types import GenericAlias
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

MOST_OF_STATE = 1 << 30  # of state.json, which holds the completions of a step
LIMIT = 1 << 53  # numbers that JSON's readers agree on

Count = Annotated[int, Field(ge=0, lt=LIMIT)]
Positive = Annotated[int, Field(ge=1, lt=LIMIT)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Metrics = dict[str, int | float | None]
Sum = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# Files of a checkpoint, and no others: no code, no pickle, no path that leads out of it.
FileName = Annotated[
    str,
    Field(
        pattern=r"^(state\.(json|safetensors)|weights/shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors"
        r"|tokenizer/[A-Za-z0-9_-]+\.(json|jinja|txt|model))$"
    ),
]


def _tensor(name: Any, info: Any) -> Any:
    """The tensor that stands in the file beside the JSON under this name, where it is given."""
    if info.context is None:
        return name
    if not isinstance(name, str) or name not in info.context:
        raise ValueError(f"expected the name of a tensor that is there once, got {name!r:.100}")
    return info.context.pop(name)


Stored = Annotated[Any, AfterValidator(_tensor)]


def _part(_name: str, **fields: Any) -> Any:
    """A part of what is read back: these fields, no other, each of its own type."""
    config = ConfigDict(extra="forbid", strict=True, frozen=True)
    given: dict[str, Any] = {
        name: kind if isinstance(kind, tuple) else (kind, ...) for name, kind in fields.items()
    }
    return create_model(_name, __config__=config, **given)


def _many(kind: Any, *of: Any) -> Any:
    """`list[Part]` for a type checker that knows no types made at run time."""
    return GenericAlias(kind, of)


class Format(BaseModel):
    """The part of a manifest that every format has."""

    format: int


# run: by which a run knows its checkpoints; files: bytes and sha256
Manifest = _part(
    "Manifest", format=int, run=Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")], step=Count,
    value=float | None, files=dict[FileName, tuple[Count, Sum]],
)  # fmt: skip
Counters = _part(
    "Counters", steps=Count, skipped=Count,
    skipped_in_a_row=(Count, Field(alias="_skipped_in_a_row")),
)  # fmt: skip
Budget = _part("Budget", tokens=Positive, largest=Count, most_rows=Count)
Trainer = _part("Trainer", num_tokens=Count, peak_memory=Count, beta=Finite, budget=Budget)
Rewards = _part(
    "Rewards", failed_total=dict[str, Count], recent=dict[str, list[tuple[Count, Count]]],
    last_error=dict[str, str],
)  # fmt: skip
Rollout = _part(
    "Rollout", prompts=list[Any], prompt_ids=list[list[Count]], completion_ids=list[list[Count]],
    texts=list[str], truncated=list[bool], weight_versions=list[int],
    sampling_logps=list[Stored], kept=list[tuple[Stored, Stored, Stored | None] | None],
)  # fmt: skip
Ahead = _part("Ahead", rollout=Rollout, seconds=float)
Asked = _part(
    "Asked", step=Count, prompt=Count, reward=float | None, reward_std=float | None,
    use=Literal["kept", "filled", "dropped"],
)  # fmt: skip
Losses = _part(
    "Losses", parts=list[tuple[dict[str, Stored], Count]], optimizer_steps=Count,
    logps=list[tuple[Stored, Stored]],
)  # fmt: skip
Updates = _part(
    "Updates", first=Count, norms=list[float], rates=list[float], losses=_many(list, Losses)
)  # fmt: skip
Batch = _part("Batch", parts=list[list[Count]], budget=Positive, fixed=dict[str, list[Stored]])
Underway = _part(
    "Underway", number=Count, epoch=Count, minibatch=Count, noise=Metrics | None,
    metrics=Metrics | None, update_rows=list[Metrics], rollout=Rollout,
    total=Stored, rewards=dict[str, Stored], advantages=Stored,
    collected_metrics=Metrics, generated=Count, prompts=_many(list, Asked), batch=Batch,
    updates=Updates, seconds=dict[str, float], peaks=dict[str, Count],
)  # fmt: skip
State = _part(
    "State", step=Count, before=Metrics | None, after=Metrics | None, metrics=Metrics,
    training_set=Positive, consumed=Count, rewards=Rewards,
    baseline=_part("Baseline", mean=float | None) | None,
    lengths=tuple[Count, Count],  # bytes of metrics.jsonl and prompts.jsonl
    optimizers=_many(dict, Literal["policy", "critic"], Counters), trainer=Trainer,
    underway=Underway | None, ahead=Ahead | None, fallback=str | None,
    fingerprints=dict[str, str],
    config=dict[str, Any], random=_part("Random", cpu=Stored, cuda=(Stored, None)),
)  # fmt: skip

Part = TypeVar("Part", bound=BaseModel)

"""One table of samples: prompts with their completions, as flat tensors.

The table has three kinds of columns. A column of the B samples has one entry per sample. A column
of the N tokens has one entry per token, sample after sample. A column of the R completion tokens
has one entry per token that is trained, in the same order; the loss reads these.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_fast.errors import require
from grpo_fast.kernels.support import Support

PROMPT, COMPLETION = 0, 1

OF_SAMPLES = ("group", "truncated", "weight_version", "rewards", "advantages")
OF_TOKENS = ("ids", "segment")
OF_COMPLETIONS = (
    "logps", "mass", "token_rewards", "token_advantages", "old_logps", "ref_logps", "ref_hidden",
    "teacher", "values", "returns",
)  # fmt: skip
COLUMNS = ("cu_seqlens", *OF_SAMPLES, *OF_TOKENS, *OF_COMPLETIONS)
REQUIRED = {
    "ids": torch.int64, "segment": torch.uint8, "cu_seqlens": torch.int64, "group": torch.int64,
    "truncated": torch.bool, "weight_version": torch.int64, "logps": torch.float32,
}  # fmt: skip


@dataclass
class Samples:
    """The samples of a step. A column is None until it is computed."""

    ids: Tensor  # (N,) int64
    segment: Tensor  # (N,) uint8: PROMPT, or COMPLETION where the token is trained
    cu_seqlens: Tensor  # (B+1,) int64: sample b is ids[cu_seqlens[b] : cu_seqlens[b + 1]]
    group: Tensor  # (B,) int64: the samples of one prompt have the same number
    truncated: Tensor  # (B,) bool: the completion did not end with an EOS
    weight_version: Tensor  # (B,) int64, see `Engine.update`
    logps: Tensor  # (R,) fp32, of the sampler
    support: Support | None = None  # of the R tokens: the ids that each was drawn from
    mass: Tensor | None = None  # (R,) fp32: probability of the support; NaN: unknown
    texts: list[str] = field(default_factory=list)  # of the B completions, no special tokens
    rewards: Tensor | None = None  # (B,) fp32: the weighted sum; NaN: lost
    scores: dict[str, Tensor] = field(default_factory=dict)  # reward function -> (B,) fp32
    extra: dict[str, list[str]] = field(default_factory=dict)  # logged by reward functions
    advantages: Tensor | None = None  # (B,) fp32; NaN: the sample does not count
    token_rewards: Tensor | None = None  # (R,) fp32
    token_advantages: Tensor | None = None  # (R,) fp32; None: a token has its sample's
    old_logps: Tensor | None = None  # (R,) fp32: of the policy that begins the step
    ref_logps: Tensor | None = None  # (R,) fp32
    ref_hidden: Tensor | None = None  # (R, H) of the reference, for an exact KL
    teacher: Tensor | None = None  # (R, K, 2) fp64: ids and their logps, from a server
    values: Tensor | None = None  # (R,) fp32, of a critic
    returns: Tensor | None = None  # (R,) fp32

    # ---- shape

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    @cached_property
    def rows(self) -> Tensor:
        """(B+1,) int64: sample b has rows[b] to rows[b + 1] of the R completion tokens."""
        return pad(self.segment.long().cumsum(0), (1, 0))[self.cu_seqlens]

    @cached_property
    def lengths(self) -> list[int]:
        """The number of completion tokens of each sample."""
        return self.rows.diff().tolist()

    @cached_property
    def prompt_lengths(self) -> list[int]:
        """The number of tokens of each sample that are not trained."""
        return (self.cu_seqlens - self.rows).diff().tolist()

    def sample(self, i: int) -> tuple[Tensor, Tensor]:
        """Return the token ids of sample i and, for each, whether it is trained (bool)."""
        part = slice(*self.cu_seqlens[i : i + 2].tolist())
        return self.ids[part], self.segment[part].bool()

    def prompt(self, i: int) -> Tensor:
        ids, is_trained = self.sample(i)
        return ids[~is_trained]

    def completion(self, i: int) -> Tensor:
        ids, is_trained = self.sample(i)
        return ids[is_trained]

    @property
    def prompt_ids(self) -> list[list[int]]:
        return [self.prompt(i).tolist() for i in range(len(self))]

    @property
    def completion_ids(self) -> list[list[int]]:
        return [ids.tolist() for ids in self.ids[self.segment.bool()].split(self.lengths)]

    @property
    def sampling_logps(self) -> tuple[Tensor, ...]:
        """The sampler's log-probabilities of each completion's tokens."""
        return self.logps.split(self.lengths)

    # ---- selecting and joining

    def __getitem__(self, chosen: Sequence[int] | Tensor) -> Samples:
        """Return the chosen samples, in the given order."""
        at = torch.as_tensor(chosen, dtype=torch.int64)
        index = dict.fromkeys(OF_SAMPLES, at)
        index |= dict.fromkeys(OF_TOKENS, ranges(self.cu_seqlens, at))
        index |= dict.fromkeys(OF_COMPLETIONS, ranges(self.rows, at))
        columns = {name: getattr(self, name) for name in index}
        taken = {n: x[index[n].to(x.device)] for n, x in columns.items() if x is not None}
        return dataclasses.replace(
            self,
            **taken,
            cu_seqlens=pad(self.cu_seqlens.diff()[at].cumsum(0), (1, 0)),
            support=select_support(self.support, ranges(self.rows, at)),
            texts=[self.texts[i] for i in at.tolist()] if self.texts else [],
            scores={name: values[at] for name, values in self.scores.items()},
            extra={name: [values[i] for i in at.tolist()] for name, values in self.extra.items()},
        )

    @classmethod
    def cat(cls, parts: Iterable[Samples | None]) -> Samples:
        """Join tables, one after another; a None among them is skipped."""
        tables = [part for part in parts if part is not None]
        if len(tables) == 1:
            return tables[0]
        columns = {name: [getattr(part, name) for part in tables] for name in COLUMNS[1:]}
        joined = {n: torch.cat(x) for n, x in columns.items() if all(y is not None for y in x)}
        sets = [part.support and (part.support.ids, part.support.offsets.diff()) for part in tables]
        counts = [len(part.logps) for part in tables]
        support = Support.join(sets, counts, "cpu")
        if support is not None and "mass" not in joined:
            unknown = [torch.full((count,), torch.nan) for count in counts]
            known = zip(columns["mass"], unknown, strict=True)
            joined["mass"] = torch.cat([nan if mass is None else mass for mass, nan in known])
        lengths = torch.cat([part.cu_seqlens.diff() for part in tables])
        return cls(
            **joined,
            cu_seqlens=pad(lengths.cumsum(0), (1, 0)),
            support=support,
            texts=list(itertools.chain.from_iterable(part.texts for part in tables)),
            scores={
                name: torch.cat([part.scores[name] for part in tables]) for name in tables[0].scores
            },  # fmt: skip
            extra={
                name: [x for part in tables for x in part.extra.get(name, [""] * len(part))]
                for name in dict.fromkeys(name for part in tables for name in part.extra)
            },
        )

    def on(self, device: torch.device | str) -> Samples:
        """Return the table with the columns of the R completion tokens on a device.

        Token ids and support stay on the host, where micro-batches are packed.
        """
        columns = {name: getattr(self, name) for name in OF_COMPLETIONS}
        return dataclasses.replace(
            self, **{name: x.to(device) for name, x in columns.items() if x is not None}
        )

    def write(self, name: str, rows: Tensor, values: Tensor) -> None:
        """Write values of some completion tokens into a column, which is created if missing."""
        column = getattr(self, name)
        if column is None:
            column = values.new_zeros(len(self.logps), *values.shape[1:])
            setattr(self, name, column)
        column[rows] = values.detach()

    # ---- files

    def tensors(self) -> dict[str, Tensor]:
        """Return every column by name, for one safetensors file. `texts` follow from `ids`."""
        found = {f"scores.{name}": values for name, values in self.scores.items()}
        if self.support is not None:
            found |= {f"support.{name}": x for name, x in self.support._asdict().items()}
        columns = {name: getattr(self, name) for name in COLUMNS}
        found |= {name: values for name, values in columns.items() if values is not None}
        return {name: tensor.cpu().contiguous() for name, tensor in found.items()}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> Samples:
        """Build the table from `tensors()`; see `check`. Raises ValueError for other names."""
        parts: dict[str, dict[str, Tensor]] = {"": {}, "scores": {}, "support": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.rpartition(".")
            parts.setdefault(part, {})[rest] = tensor
        columns: dict[str, Any] = parts.pop("")
        scores = parts.pop("scores")
        sets = parts.pop("support")
        fits = REQUIRED.keys() <= columns.keys() <= {*COLUMNS} and not parts
        fits = fits and sets.keys() in (set(), {*Support._fields})
        require(fits, "samples", f"the columns {sorted(REQUIRED)}", sorted(tensors))
        return cls(**columns, scores=scores, support=Support(**sets) if sets else None)

    def check(self, vocab_size: int) -> None:
        """Raise a ValueError for columns that do not fit, or an id outside of the vocabulary."""
        for name, dtype in REQUIRED.items():
            came = getattr(self, name).dtype
            require(came == dtype, f"samples: {name}", f"dtype {dtype}", came)
        # 1. Tokens, and the ends of the samples among them.
        ends = self.cu_seqlens
        count = len(self.ids)
        fits = ends.dim() == 1 and len(ends) > 0 and bool((ends.diff() > 0).all())
        fits = fits and ends[[0, -1]].tolist() == [0, count]
        require(fits, "samples: cu_seqlens", f"rising numbers from 0 to {count}", ends.tolist())
        fits = self.segment.shape == (count,) and bool((self.segment <= COMPLETION).all())
        require(fits, "samples: segment", f"{PROMPT} or {COMPLETION} for each id", "others")
        _check_ids("samples: ids", self.ids, vocab_size)
        # 2. One entry per sample, or per completion token.
        lengths = dict.fromkeys(OF_SAMPLES, len(self))
        lengths |= dict.fromkeys(OF_COMPLETIONS, int(self.rows[-1]))
        for name, length in lengths.items():
            column = getattr(self, name)
            shape = (length,) if column is None else tuple(column.shape)
            require(shape[:1] == (length,), f"samples: {name}", f"{length} entries", shape)
        # 3. The support of each completion token.
        if self.support is not None:
            ids, offsets = self.support
            _check_ids("samples: support", ids, vocab_size)
            fits = offsets.shape == (len(self.logps) + 1,) and bool((offsets.diff() >= 0).all())
            fits = fits and offsets[[0, -1]].tolist() == [0, len(ids)]
            require(fits, "samples: support", f"rising offsets from 0 to {len(ids)}", "others")


def _check_ids(name: str, ids: Tensor, vocab_size: int) -> None:
    low, high = ids.aminmax() if len(ids) else (torch.tensor(0), torch.tensor(0))
    fits = ids.dim() == 1 and not ids.is_floating_point() and bool(0 <= low <= high < vocab_size)
    require(fits, name, f"token ids from 0 to {vocab_size - 1}", f"{low} to {high}")


def ranges(offsets: Tensor, chosen: Tensor) -> Tensor:
    """Return the places offsets[i] to offsets[i + 1] of each chosen i, one after another."""
    counts = offsets.diff()[chosen]
    before = counts.cumsum(0) - counts
    starts = offsets[:-1][chosen] - before
    total = int(counts.sum())
    return torch.arange(total) + starts.repeat_interleave(counts, output_size=total)


def select_support(support: Support | None, rows: Tensor) -> Support | None:
    """Return the support of some completion tokens; None if all were drawn from the vocabulary."""
    if support is None:
        return None
    ids = support.ids[ranges(support.offsets, rows)]
    return Support(ids, pad(support.offsets.diff()[rows].cumsum(0), (1, 0))) if len(ids) else None

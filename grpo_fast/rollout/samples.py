"""The table of samples that every part of a training step reads and extends.

A sample is a prompt with one completion. The table holds flat tensors without padding:

- Columns per sample have B entries, one for each sample.
- Columns per token have N entries: the tokens of sample 0, then those of sample 1, and so on.
- Columns per completion token have R entries, one for each trained token, in the order of the
  tokens. The loss reads these columns.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_fast.kernels.support import Support

# Values of the column `segment`.
PROMPT = 0
COMPLETION = 1

PER_SAMPLE = ("group", "truncated", "weight_version", "rewards", "advantages")
PER_TOKEN = ("ids", "segment")
PER_COMPLETION_TOKEN = (
    "logps", "mass", "token_advantages", "old_logps", "ref_logps", "ref_hidden",
    "values", "returns",
)  # fmt: skip
COLUMNS = ("cu_seqlens", *PER_SAMPLE, *PER_TOKEN, *PER_COMPLETION_TOKEN)


@dataclass
class Samples:
    """The B samples of a step, with N tokens, of which R are trained completion tokens.

    Optional columns are None until a step of the training loop computes them.

    Attributes:
        ids: (N,) int64, token ids of each prompt and its completion.
        segment: (N,) uint8, `COMPLETION` for trained tokens and `PROMPT` for all other tokens,
            including tokens that a tool wrote between two turns.
        cu_seqlens: (B+1,) int64. Sample b is `ids[cu_seqlens[b] : cu_seqlens[b + 1]]`.
        group: (B,) int64, index of the sample's prompt. Completions of one prompt form a group.
        truncated: (B,) bool, True if the completion was cut off before an EOS.
        weight_version: (B,) int64, version of the weights that sampled the completion.
        logps: (R,) fp32, log-probabilities that the sampler reported.
        support: for each of the R tokens, the ids that the sampler's truncation kept. None if it
            kept the whole vocabulary.
        mass: (R,) fp32, probability of each token's support before truncation. None if an
            engine does not report it for every completion.
        texts: B texts of the completions, without special tokens.
        rewards: (B,) fp32, weighted sum of the reward functions; NaN if they failed.
        scores: reward function name -> (B,) fp32, its unweighted rewards.
        advantages: (B,) fp32; NaN excludes the sample from the loss.
        token_advantages: (R,) fp32. None gives each token the advantage of its sample.
        old_logps: (R,) fp32, log-probabilities of the policy at the start of the step.
        ref_logps: (R,) fp32, log-probabilities of the reference model.
        ref_hidden: (R, H) hidden states of the reference model, for an exact KL divergence.
        values: (R,) fp32, the critic's values.
        returns: (R,) fp32, targets of the critic.
    """

    ids: Tensor
    segment: Tensor
    cu_seqlens: Tensor
    group: Tensor
    truncated: Tensor
    weight_version: Tensor
    logps: Tensor
    support: Support | None = None
    mass: Tensor | None = None
    texts: list[str] = field(default_factory=list)
    rewards: Tensor | None = None
    scores: dict[str, Tensor] = field(default_factory=dict)
    advantages: Tensor | None = None
    token_advantages: Tensor | None = None
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    ref_hidden: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    @cached_property
    def rows(self) -> Tensor:
        """The offset of each sample in columns with one entry per completion token, (B+1,) int64.

        The completion tokens of sample b have the indices rows[b] to rows[b + 1] - 1.
        """
        return pad(self.segment.long().cumsum(0), (1, 0))[self.cu_seqlens]

    @cached_property
    def lengths(self) -> list[int]:
        """The number of completion tokens of each sample."""
        return self.rows.diff().tolist()

    @cached_property
    def prompt_lengths(self) -> list[int]:
        """The number of untrained tokens of each sample."""
        return (self.cu_seqlens - self.rows).diff().tolist()

    def prompt(self, i: int) -> Tensor:
        """Return the untrained token ids of sample i, (n,) int64."""
        return self._ids_of(i, PROMPT)

    def completion(self, i: int) -> Tensor:
        """Return the trained token ids of sample i, (n,) int64."""
        return self._ids_of(i, COMPLETION)

    def _ids_of(self, i: int, segment: int) -> Tensor:
        part = slice(*self.cu_seqlens[i : i + 2].tolist())
        return self.ids[part][self.segment[part] == segment]

    @property
    def prompt_ids(self) -> list[list[int]]:
        """The untrained token ids of each sample."""
        return [ids.tolist() for ids in self.ids[self.segment == PROMPT].split(self.prompt_lengths)]

    @property
    def completion_ids(self) -> list[list[int]]:
        """The trained token ids of each sample."""
        return [ids.tolist() for ids in self.ids[self.segment == COMPLETION].split(self.lengths)]

    @property
    def sampling_logps(self) -> tuple[Tensor, ...]:
        """The sampler's log-probabilities, one tensor for each sample."""
        return self.logps.split(self.lengths)

    def __getitem__(self, chosen: Sequence[int] | Tensor) -> Samples:
        """Return a table of the chosen samples, in the given order."""
        at = torch.as_tensor(chosen, dtype=torch.int64)
        index = dict.fromkeys(PER_SAMPLE, at)
        index |= dict.fromkeys(PER_TOKEN, ranges(self.cu_seqlens, at))
        index |= dict.fromkeys(PER_COMPLETION_TOKEN, ranges(self.rows, at))
        columns = {name: getattr(self, name) for name in index}
        selected = {n: x[index[n].to(x.device)] for n, x in columns.items() if x is not None}
        return dataclasses.replace(
            self,
            **selected,
            cu_seqlens=pad(self.cu_seqlens.diff()[at].cumsum(0), (1, 0)),
            support=select_support(self.support, ranges(self.rows, at)),
            texts=[self.texts[i] for i in at.tolist()] if self.texts else [],
            scores={name: values[at] for name, values in self.scores.items()},
        )

    @classmethod
    def cat(cls, parts: Iterable[Samples | None]) -> Samples:
        """Concatenate several tables.

        Args:
            parts: at least one table. Entries that are None are skipped. If a table lacks an
                optional column, the result lacks the column, too.
        """
        tables = [part for part in parts if part is not None]
        if len(tables) == 1:
            return tables[0]
        columns = {name: [getattr(part, name) for part in tables] for name in COLUMNS[1:]}
        joined = {n: torch.cat(x) for n, x in columns.items() if all(y is not None for y in x)}
        lengths = torch.cat([part.cu_seqlens.diff() for part in tables])
        return cls(
            **joined,
            cu_seqlens=pad(lengths.cumsum(0), (1, 0)),
            support=join_supports([(part.support, len(part.logps)) for part in tables]),
            texts=list(itertools.chain.from_iterable(part.texts for part in tables)),
            scores={
                name: torch.cat([part.scores[name] for part in tables]) for name in tables[0].scores
            },  # fmt: skip
        )

    def on(self, device: torch.device | str) -> Samples:
        """Return the table with its per-completion-token columns moved to a device.

        Token ids and support stay on the CPU, where micro-batches are packed.
        """
        columns = {name: getattr(self, name) for name in PER_COMPLETION_TOKEN}
        return dataclasses.replace(
            self, **{name: x.to(device) for name, x in columns.items() if x is not None}
        )

    def write(self, name: str, rows: Tensor, values: Tensor) -> None:
        """Write values into a column with one entry per completion token.

        A missing column is created and filled with zeros.

        Args:
            name: the column, such as "old_logps".
            rows: (r,) int64, indices among the R completion tokens.
            values: (r, ...) values for these tokens, detached before they are written.
        """
        column = getattr(self, name)
        if column is None:
            column = values.new_zeros(len(self.logps), *values.shape[1:])
            setattr(self, name, column)
        column[rows] = values.detach()


# ------------------------------------------------------------------------- Segments of flat tensors
def ranges(offsets: Tensor, chosen: Tensor) -> Tensor:
    """Return the integers from offsets[i] to offsets[i + 1] - 1 for each chosen i, concatenated.

    Args:
        offsets: (n + 1,) int64, not decreasing.
        chosen: (k,) int64 indices i in [0, n).

    Returns:
        The integers, (total,) int64.
    """
    counts = offsets.diff()[chosen]
    before = counts.cumsum(0) - counts
    starts = offsets[:-1][chosen] - before
    total = int(counts.sum())
    return torch.arange(total) + starts.repeat_interleave(counts, output_size=total)


def select_support(
    support: Support | None, rows: Tensor, device: torch.device | str = "cpu"
) -> Support | None:
    """Select the support of some completion tokens, and move it to a device.

    Args:
        support: the support of R tokens on the CPU, or None.
        rows: (r,) int64, indices of the tokens to select.
        device: device of the result.

    Returns:
        The support of the r tokens. None if all r tokens were sampled from the full vocabulary.
    """
    if support is None:
        return None
    ids = support.ids[ranges(support.offsets, rows)]
    offsets = pad(support.offsets.diff()[rows].cumsum(0), (1, 0))
    return Support(ids.to(device), offsets.to(device)) if len(ids) else None


def join_supports(parts: Sequence[tuple[Support | None, int]]) -> Support | None:
    """Concatenate the supports of consecutive pieces of a table.

    Args:
        parts: for each piece, its support, or None for the full vocabulary, and its number of
            completion tokens.

    Returns:
        The joined support. None if no piece has a support.
    """
    sets = [support and (support.ids, support.offsets.diff()) for support, _ in parts]
    return Support.join(sets, [count for _, count in parts], "cpu")

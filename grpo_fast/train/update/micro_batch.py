"""A slice of the step's samples in one packed row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast import Support
from grpo_fast.attention import PackedTree, pack_groups, pack_tree
from grpo_fast.rollout import Samples
from grpo_fast.rollout.ranges import ranges, select_support


@dataclass
class MicroBatch:
    """B samples in one row: the trunk sees T tokens, the head the R that predict one."""

    samples: Samples  # of the whole step
    chosen: list[int]  # the samples in this row, in the order of B and R
    rows: Tensor  # (R,) int64: the places of this row's completion tokens in the step's
    packed: PackedTree
    completion_mask: Tensor  # (R,) bool: the token counts
    advantages: Tensor  # (B,) fp32; 0 where a sample does not count
    support: Support | None  # of the R tokens
    prompt_items: Tensor | None = None  # (B,) fp64: the divisors of `aggregation: prompt_mean`
    is_idle: bool = False  # no token counts: another rank has one micro-batch more

    @classmethod
    def pack(
        cls,
        samples: Samples,
        groups: Sequence[Sequence[int]],
        counts: Tensor,
        device: torch.device | str,
        *,
        shared: bool = True,
        trees: bool = False,
    ) -> MicroBatch:
        """Pack samples into one row.

        Args:
            samples: the table of the step.
            groups: the samples of this row; each group has samples of one prompt.
            counts: (all samples of the step,) bool: the sample's tokens count.
            shared: the samples of a group share one copy of their prompt.
            trees: equal prefixes of any samples share rows.
        """
        chosen = [i for group in groups for i in group]
        packed: PackedTree
        if trees:
            packed = pack_tree([samples.sample(i) for i in chosen], device=device)
        else:
            listed = [(samples.prompt(g[0]), [samples.completion(i) for i in g]) for g in groups]
            packed = pack_groups(listed, shared=shared, device=device)
        at = torch.tensor(chosen)
        rows = ranges(samples.rows, at)
        assert samples.advantages is not None
        return cls(
            samples=samples,
            chosen=chosen,
            rows=rows.to(device),
            packed=packed,
            completion_mask=counts[at].repeat_interleave(torch.tensor(packed.lengths)).to(device),
            advantages=samples.advantages[at].float().nan_to_num(nan=0.0).to(device),
            support=_on(select_support(samples.support, rows), device),
        )

    def column(self, name: str) -> Tensor | None:
        """Return a column's values of this row's completion tokens, (R, …); None: no column."""
        values = getattr(self.samples, name)
        return None if values is None else values[self.rows]

    def write(self, name: str, values: Tensor) -> None:
        """Write the values of this row's completion tokens into a column of the step."""
        self.samples.write(name, self.rows, values)

    def idle(self) -> MicroBatch:
        nothing = torch.zeros_like(self.completion_mask)
        return dataclasses.replace(self, completion_mask=nothing, is_idle=True)

    @property
    def active_tokens(self) -> int:
        return int(self.completion_mask.sum())

    @property
    def trunk_tokens(self) -> int:
        return self.packed.layout.total

    def __len__(self) -> int:
        return len(self.chosen)


def _on(support: Support | None, device: torch.device | str) -> Support | None:
    return None if support is None else Support(*(tensor.to(device) for tensor in support))

"""A micro-batch: some samples of a step, packed into one row."""

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
    """A packed row of B samples. It has T tokens, of which R are completion tokens.

    T counts a prompt only once if several samples share it.
    """

    samples: Samples  # all samples of the step
    chosen: list[int]  # indices of the B samples
    rows: Tensor  # (R,) int64, index of each completion token in the columns of the step
    packed: PackedTree
    completion_mask: Tensor  # (R,) bool, True for tokens that contribute to the loss
    advantages: Tensor  # (B,) fp32, 0 for samples without a reward
    support: Support | None  # token ids that the sampler kept, for the R tokens
    prompt_items: Tensor | None = None  # (B,) fp64, divisors of `aggregation: prompt_mean`
    is_idle: bool = False  # True if no token contributes to the loss, see `idle`

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
            samples: all samples of the step.
            groups: indices of the samples to pack. Each group has samples of one prompt.
            counts: bool of shape (samples of the step,), True for samples that contribute to the
                loss.
            device: device of the packed tensors.
            shared: if True, store the prompt of a group only once.
            trees: if True, store equal prefixes of any samples only once.
        """
        chosen = [i for group in groups for i in group]
        packed: PackedTree
        if trees:
            packed = pack_tree([samples.sample(i) for i in chosen], device=device)
        else:
            listed = [(samples.prompt(g[0]), [samples.completion(i) for i in g]) for g in groups]
            packed = pack_groups(listed, shared=shared, device=device)
        # Find the completion tokens of this micro-batch in the flat columns of the step.
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
        """Return the values of a column of `Samples` at the completion tokens of this row.

        Returns:
            Tensor of shape (R, …), or None if the samples do not have the column.
        """
        values = getattr(self.samples, name)
        return None if values is None else values[self.rows]

    def write(self, name: str, values: Tensor) -> None:
        """Write values of shape (R, …) into a column of the step's samples."""
        self.samples.write(name, self.rows, values)

    def idle(self) -> MicroBatch:
        """Return a copy that runs the same passes, but whose tokens do not contribute to the loss.

        A rank with too few micro-batches runs such copies, because FSDP2 requires the same number
        of passes on all ranks.
        """
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

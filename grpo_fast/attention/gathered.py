"""Keys copied behind a shared prompt: every completion gets the last rows of its prompt in front of
its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast.attention.spans import Spans


@dataclass(frozen=True)
class Gathered:
    """One causal span per segment whose keys are copies."""

    spans: Spans
    rows: Tensor  # (Tk,) int64: the row of T behind each key
    own: Tensor  # (T,) int64: where each row's own key stands among the Tk
    copied: Tensor  # (C,) int64: the rows of T that were copied for completions
    # (C, most) int64: where their copies stand among the Tk; Tk where there is none left
    copies: Tensor

    @classmethod
    def of(
        cls, starts: Sequence[int], prompt_of: Sequence[int], tail: int, device: torch.device
    ) -> Gathered:
        """Gather the last `tail` rows of the prompt (or all, if it has fewer) for every completion.

        Args:
            starts: first row of each segment, and T.
            prompt_of: the segment of the prompt of each segment, −1 for none.
        """
        ranges = [(starts[s], starts[s + 1]) for s in range(len(prompt_of))]
        rows, own, keys = [], [], []
        copies: dict[int, list[int]] = {}  # prompt → first place of each copy
        place = 0
        for (start, end), prompt in zip(ranges, prompt_of, strict=True):
            before = 0
            if prompt >= 0:
                low = max(ranges[prompt][0], ranges[prompt][1] - tail)
                before = ranges[prompt][1] - low
                rows.append(torch.arange(low, ranges[prompt][1]))
                copies.setdefault(prompt, []).append(place)
            rows.append(torch.arange(start, end))
            own.append(torch.arange(place + before, place + before + end - start))
            keys.append(before + end - start)
            place += keys[-1]
        copied, places = _places(copies, ranges, tail, place)
        spans = Spans.of([end - start for start, end in ranges], keys, device, causal=True)
        return cls(
            spans, *(x.to(device) for x in (torch.cat(rows), torch.cat(own), copied, places))
        )

    def put_back(self, grad: Tensor) -> Tensor:
        """(Tk, …) gradients of the copies → (T, …), summed in a fixed order (index_add_ on a GPU
        has none).
        """
        out = grad.index_select(0, self.own)
        if self.copied.numel():
            padded = torch.cat([grad, grad.new_zeros(1, *grad.shape[1:])])
            wide = torch.promote_types(grad.dtype, torch.float32)
            summed = padded[self.copies].sum(1, dtype=wide) + out[self.copied]
            out.index_copy_(0, self.copied, summed.to(out.dtype))
        return out


def _places(
    copies: dict[int, list[int]], ranges: Sequence[tuple[int, int]], tail: int, nowhere: int
) -> tuple[Tensor, Tensor]:
    """The rows that were copied, and a table of where their copies stand, else `nowhere`."""
    most = max(map(len, copies.values()), default=0)
    rows, tables = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, most, dtype=torch.int64)]
    for prompt, firsts in copies.items():
        low = max(ranges[prompt][0], ranges[prompt][1] - tail)
        rows.append(torch.arange(low, ranges[prompt][1]))
        tables.append(torch.full((len(rows[-1]), most), nowhere))
        tables[-1][:, : len(firsts)] = torch.tensor(firsts) + torch.arange(len(rows[-1]))[:, None]
    return torch.cat(rows), torch.cat(tables)

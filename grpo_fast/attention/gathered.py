"""Keys copied behind a shared prompt: every completion gets the last rows of its prompt in front of its own rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
    copies: Tensor  # (C, most) int64: where their copies stand among the Tk; Tk where there is none left

    @classmethod
    def of(
        cls, lengths: Sequence[int], sharing: Sequence[int], prefixes: Sequence[int], tail: int, device: torch.device
    ) -> Gathered:
        """Gather the last `tail` rows of the prompt (or all, if it has fewer) for every completion."""
        starts = [0, *accumulate(lengths)]
        prompt_of = [prompt for prompt, count in enumerate(sharing) for _ in range(count)]
        rows, own, keys = [], [], []
        copies: dict[int, list[int]] = {}  # prompt → first places of its copies
        place = 0
        for segment, (length, prefix) in enumerate(zip(lengths, prefixes, strict=True)):
            copied = min(prefix, tail)
            if copied:
                prompt = prompt_of[segment - len(sharing)]
                rows.append(torch.arange(starts[prompt + 1] - copied, starts[prompt + 1]))
                copies.setdefault(prompt, []).append(place)
            rows.append(torch.arange(starts[segment], starts[segment] + length))
            own.append(torch.arange(place + copied, place + copied + length))
            keys.append(copied + length)
            place += copied + length
        most = max(map(len, copies.values()), default=0)
        copied_rows = [torch.empty(0, dtype=torch.int64)]
        places = [torch.empty(0, most, dtype=torch.int64)]
        for prompt, firsts in copies.items():
            copied = min(lengths[prompt], tail)
            copied_rows.append(torch.arange(starts[prompt + 1] - copied, starts[prompt + 1]))
            table = torch.full((copied, most), place)
            table[:, : len(firsts)] = torch.tensor(firsts) + torch.arange(copied)[:, None]
            places.append(table)
        tensors = (torch.cat(x).to(device) for x in (rows, own, copied_rows, places))
        return cls(Spans.of(lengths, keys, device, causal=True), *tensors)

    def put_back(self, grad: Tensor) -> Tensor:
        """(Tk, …) gradients of the copies → (T, …), summed in a fixed order (index_add_ on a GPU has none)."""
        out = grad.index_select(0, self.own)
        if self.copied.numel():
            padded = torch.cat([grad, grad.new_zeros(1, *grad.shape[1:])])
            wide = torch.promote_types(grad.dtype, torch.float32)
            summed = padded[self.copies].sum(1, dtype=wide) + out[self.copied]
            out.index_copy_(0, self.copied, summed.to(out.dtype))
        return out

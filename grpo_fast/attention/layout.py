"""Where each sequence stands in a packed row: computed once per micro-batch on the host, read by
every layer.

A row of T tokens is cut into S segments, each attending causally to itself:

    [P1 .. Pn][c11 .. c1G][c21 .. c2G] ..  [s1][s2] ..
     prompts   their completions            plain segments

The first `len(sharing)` segments are prompts that several completions share; the completions
follow, prompt after prompt, and attend to their prompt as well as to themselves, at positions that
go on where the prompt ends. What remains are plain segments. `sharing=()` is the plain packed
layout. Prompts stand first, so that the prompts' keys and the completions' queries are views of the
row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_fast.attention.gathered import Gathered
from grpo_fast.attention.spans import Spans

Built = TypeVar("Built")


@dataclass(frozen=True)
class PackedLayout:
    """Segments of one packed row of T tokens. Travels to the attention function as `model(...,
    packed_layout=...)`.
    """

    cu_seqlens: Tensor  # (S+1,) int32, contiguous, on the model's device
    lengths: tuple[int, ...]  # the same on the host: no layer has to wait for the device
    sharing: tuple[int, ...] = ()  # how many completions share each of the first segments

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        sharing: Sequence[int] = (),
    ) -> PackedLayout:
        """The layout of segments of these lengths, one after the other; the first len(sharing) are
        shared prompts.

        Raises ValueError for an empty segment (FlashAttention gives it lse = +inf) and for a
        `sharing` that counts no completion for a prompt or more completions than there are
        segments.
        """
        if not lengths or min(lengths) < 1:
            raise ValueError(
                f"lengths: expected at least one segment and none empty, came {list(lengths)[:8]}"
            )
        if sharing and (min(sharing) < 1 or len(sharing) + sum(sharing) > len(lengths)):
            raise ValueError(
                "sharing: expected at least 1 completion for each prompt and prompts + "
                f"completions ≤ {len(lengths)} "
                f"segments, came {list(sharing)[:8]}"
            )
        ends = [0, *accumulate(lengths)]
        return cls(
            torch.tensor(ends, dtype=torch.int32, device=device), tuple(lengths), tuple(sharing)
        )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First row of each segment, and T."""
        return (0, *accumulate(self.lengths))

    @property
    def total(self) -> int:
        """T, the tokens of the packed row."""
        return sum(self.lengths)

    @property
    def max_seqlen(self) -> int:
        """The longest segment."""
        return max(self.lengths)

    @cached_property
    def prefixes(self) -> tuple[int, ...]:
        """Tokens of the shared prompt before each segment: |P| of a completion, else 0."""
        return tuple(0 if prompt < 0 else self.lengths[prompt] for prompt in self.prompt_of)

    @cached_property
    def longest_context(self) -> int:
        """The most keys a query sees: what a sliding window has to reach to be no window."""
        return max(n + before for n, before in zip(self.lengths, self.prefixes, strict=True))

    @cached_property
    def position_ids(self) -> Tensor:
        """(1, T) int64: from 0 in every segment, from |P| in a completion."""
        pairs = zip(self.lengths, self.prefixes, strict=True)
        return torch.cat([torch.arange(before, before + n) for n, before in pairs])[None].to(
            self.cu_seqlens.device
        )

    @cached_property
    def prompt_of(self) -> tuple[int, ...]:
        """For each segment the segment of the shared prompt before it; −1 where there is none."""
        prompts = len(self.sharing)
        of = [prompt for prompt, count in enumerate(self.sharing) for _ in range(count)]
        return (*[-1] * prompts, *of, *[-1] * (len(self.lengths) - prompts - len(of)))

    @cached_property
    def mask_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row its segment, the segment of its shared prompt (or −1) and its position: (T,)
        int64 each.

        A row sees another if the other's segment is its own or its prompt's and the other's
        position is not after its.
        """
        device = self.cu_seqlens.device
        counts = torch.tensor(self.lengths, device=device)
        segment = torch.arange(len(self.lengths), device=device).repeat_interleave(counts)
        return segment, torch.tensor(self.prompt_of, device=device)[segment], self.position_ids[0]

    @cached_property
    def on_itself(self) -> Spans:
        """Every segment on itself."""
        return Spans.of(self.lengths, self.lengths, self.cu_seqlens.device, causal=True)

    @cached_property
    def prompt_rows(self) -> int:
        """n: rows 0…n−1 are the shared prompts."""
        return sum(self.lengths[: len(self.sharing)])

    @cached_property
    def completion_rows(self) -> slice:
        """The rows of the completions that share a prompt."""
        prompts = len(self.sharing)
        tokens = sum(self.lengths[prompts : prompts + sum(self.sharing)])
        return slice(self.prompt_rows, self.prompt_rows + tokens)

    @cached_property
    def on_prompts(self) -> Spans:
        """The completions of each shared prompt, all as one span of queries, on their prompt."""
        prompts = len(self.sharing)
        ends = [prompts, *accumulate(self.sharing, initial=prompts)][1:]
        queries = [sum(self.lengths[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
        return Spans.of(queries, self.lengths[:prompts], self.cu_seqlens.device, causal=False)

    def gathered(self, window: int | None) -> Gathered:
        """Keys with a copy of each completion's prompt, or of the part of it that a sliding window
        reaches.
        """
        tail = max(self.lengths) if window is None else window - 1
        return self.cached(
            ("gathered", tail),
            lambda: Gathered.of(self.starts, self.prompt_of, tail, self.cu_seqlens.device),
        )

    def cached(self, key: Hashable, build: Callable[[], Built]) -> Built:
        """Build a kernel's own table of this layout once, for all layers."""
        if key not in self._cache:
            self._cache[key] = build()
        return self._cache[key]

    @cached_property
    def _cache(self) -> dict[Hashable, Any]:
        return {}

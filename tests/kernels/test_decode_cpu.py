"""Tests of decoding attention in C++ against fp64.

They cover lengths around the sizes of tiles and registers, prompts with different numbers of
completions, windows, NaN and uninitialised memory.
"""

import pytest
import torch

from grpo_fast.kernels.cpu import decode, loader
from tests.kernels.formulas import torch_threads

REASON = loader.unavailable("decode")
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"C++ kernels: {REASON}"),
    pytest.mark.usefixtures("poisoned_memory"),
]


class Rollout:
    """Random queries, keys and values of completions that grow by one token per step.

    `step` computes the attention of one token with the C++ kernel. `expected` computes it in fp64.
    """

    def __init__(self, lengths, counts, heads, repeats, depth, most, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.lengths, self.counts, self.repeats = lengths, counts, repeats
        self.prompts = torch.randn(2, len(lengths), heads, max(lengths), depth, generator=g)
        rows = sum(counts)
        self.new = torch.randn(2, most, heads, rows, depth, generator=g)
        self.q = torch.randn(most, heads * repeats, rows, depth, generator=g)
        self.tiles = decode.tiles_of(*self.prompts)
        self.own = ()

    def step(self, time, scale, window=None, rows=slice(None)):
        """Run `decode_` for token `time` of each completion in `rows`, and return its output.

        The cache of the completions grows by one tile whenever it is full.
        """
        k, v = (x[time][:, rows] for x in self.new)
        if time % decode.TILE == 0:
            self.own = decode.grow_tiles(self.own, self.tiles, v.shape[1], time + 1)
        numbers = torch.tensor(self.lengths), torch.tensor(self.counts)
        q = self.q[time][:, rows]
        return decode.decode_(q, k, v, self.tiles, self.own, *numbers, time, scale, window)

    def expected(self, time, scale, window=None, dtype=torch.float64):
        out = []
        prompt_of = [n for n, count in enumerate(self.counts) for _ in range(count)]
        for row, n in enumerate(prompt_of):
            of_prompt = self.prompts[:, n, :, : self.lengths[n]]
            own = self.new[:, : time + 1, :, row].transpose(1, 2)
            k, v = torch.cat([of_prompt, own], 2).to(dtype).repeat_interleave(self.repeats, 1)
            if window is not None:
                k, v = k[:, -window:], v[:, -window:]
            scores = scale * (k @ self.q[time][:, row, :, None].to(dtype)).squeeze(-1)
            out.append((scores.softmax(-1)[:, None] @ v).squeeze(1))
        return torch.stack(out)


# Each case contains the prompt lengths, the number of completions of each prompt, the number of
# key-value heads, the number of query heads per key-value head, and the head size D.
CASES = [
    ([5], [1], 1, 1, 8), ([16, 3, 17], [4, 1, 6], 2, 2, 32), ([40, 33], [3, 5], 1, 3, 20),
    ([1, 70], [2, 9], 3, 1, 64), ([31, 32], [5, 4], 1, 7, 131),
]  # fmt: skip


@pytest.mark.parametrize("window", [None, 1, 20, 40])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_against_fp64(case, window):
    rollout = Rollout(*case, most=34)
    for time in range(34):
        found = rollout.step(time, 0.3, window)
        if time in (0, 1, 14, 15, 16, 17, 31, 33):
            exact = rollout.expected(time, 0.3, window)
            of_torch = rollout.expected(time, 0.3, window, torch.float32)
            rounding = 4 * 2**-23 * case[4] ** 0.5  # rounding of a dot product of D terms
            allowed = 2 * (of_torch - exact).abs().max() + rounding
            assert (found - exact).abs().max() <= allowed


def test_large_scores_leave_one_token():
    """Check that attention scores in the thousands do not overflow.

    The softmax of such scores gives all the weight to one token.
    """
    rollout = Rollout([20], [2], 1, 2, 32, most=2)
    for time in range(2):
        found = rollout.step(time, 1e4)
    torch.testing.assert_close(found.double(), rollout.expected(1, 1e4), rtol=0, atol=2e-6)


def test_a_row_does_not_depend_on_its_batch_or_on_the_threads():
    whole = Rollout([60, 33], [7, 5], 2, 2, 32, most=3)
    alone = Rollout([60, 33], [7, 5], 2, 2, 32, most=3)
    alone.lengths, alone.counts, keep = [33], [2], [8, 11]
    alone.tiles = decode.tiles_of(*alone.prompts[:, 1:, :, :33])
    for time in range(3):
        with torch_threads(3):
            together = whole.step(time, 0.2)
        assert torch.equal(together[keep], alone.step(time, 0.2, rows=keep))


@pytest.mark.parametrize("which", ["key", "value", "query"])
def test_nan_stays(which):
    """Check that a NaN in a key, value or query appears only in the rows that use it."""
    rollout = Rollout([17], [3], 1, 2, 32, most=2)
    rollout.step(0, 0.2)
    if which == "query":
        rollout.q[1, 1, 1, 3] = torch.nan
    else:
        rollout.new[int(which == "value"), 1, 0, 1, 3] = torch.nan
    found = rollout.step(1, 0.2)
    hit = found.isnan().any(-1)
    assert hit[1].tolist() == ([False, True] if which == "query" else [True, True])
    assert not hit[[0, 2]].any()

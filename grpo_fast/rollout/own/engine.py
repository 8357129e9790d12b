"""The default engine, `transformers`, which samples with the model that is being trained."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from grpo_fast.attention import check_supported, check_tolerance, small_windows
from grpo_fast.attention.agree import draw_groups, in_fp32, starts_of, worst_gap
from grpo_fast.errors import NonFiniteLogits
from grpo_fast.kernels.agree import Pair, exceeds
from grpo_fast.rollout.engine import (
    EOS,
    LENGTH,
    Completion,
    Engine,
    Request,
    Sampler,
    Sampling,
    uniforms,
)
from grpo_fast.rollout.own.decode import Decoded, SupportRecorder, decode

if TYPE_CHECKING:
    from grpo_fast.rollout.own.model import SampledModel

log = logging.getLogger(__name__)

# For each model and each name in RUNS: how the samples differ from the model's logits, or None.
_differences: WeakKeyDictionary[nn.Module, dict[str, str | None]] = WeakKeyDictionary()


class TransformersEngine(Engine):
    """Engine that samples with the policy's own weights.

    It uses the decoding loop of this package. Models that the loop does not compute correctly are
    sampled by transformers' `generate`, which is slower.

    Args:
        policy: a `Policy` or `SampledModel`.
        options: not used. The builders of all engines have this parameter.
    """

    def __init__(self, policy: SampledModel, options: object = None) -> None:
        self.policy = policy
        self.version = 0
        with policy.generation():
            self.fallback = difference_of(policy, LOOP)

    def update(self, policy: SampledModel, version: int) -> None:
        self.policy = policy
        self.version = version

    def sample(self, request: Request) -> list[Completion]:
        prompts, sampling, group_size, seed, places = request
        length = sampling.max_new_tokens
        numbers = uniforms(seed, len(prompts), length, group_size=group_size, places=places)
        rows = [prompt for prompt in prompts for _ in range(group_size)]
        size = sampling.batch_size or max(len(rows), 1)
        completions: list[Completion] = []
        with self.policy.generation():
            run = run_of(self.policy) if rows else decode  # `update` may have replaced the model
            for start in range(0, len(rows), size):
                part = slice(start, start + size)
                # A batch may begin or end within a group, so count the rows of each prompt in it.
                runs = [(prompt, len(list(same))) for prompt, same in groupby(rows[part])]
                chosen, counts = map(list, zip(*runs, strict=True))
                decoded = run(self.policy, chosen, counts, sampling, numbers[part])
                completions += self._cut(decoded)
        return completions

    def _cut(self, decoded: Decoded) -> list[Completion]:
        """Cut each sampled row after its first EOS and return the rows as completions."""
        eos = torch.tensor(sorted(self.policy.eos_ids), device=decoded.tokens.device)
        ends = torch.isin(decoded.tokens, eos).cpu()
        has_end = ends.any(1).tolist()
        lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, ends.shape[1]).tolist()
        logps = decoded.logps.cpu()
        if any(row[:n].isnan().any() for row, n in zip(logps, lengths, strict=True)):
            raise NonFiniteLogits("the policy's logits are NaN or infinite")
        supports = decoded.support.of_completions(lengths)
        rows = zip(decoded.tokens.tolist(), logps, lengths, has_end, supports, strict=True)
        # Copy the rows, because views would be inference tensors and keep the batch in memory.
        return [
            Completion(ids[:n], row[:n].clone(), EOS if ended else LENGTH, self.version, *support)
            for ids, row, n, ended, support in rows
        ]


def by_transformers(
    policy: SampledModel,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    options: Sampling,
    numbers: Tensor,
    *,
    stop_at_eos: bool = True,
    starts: Sequence[int] = (),
    use_cache: bool = True,
) -> Decoded:
    """Sample with transformers' `generate`. The arguments and the result are those of `decode`.

    Every completion has a separate copy of the prompt. Only prompts of equal length are in one
    batch, because some models ignore a padding mask (for example RWKV and xLSTM).

    Args:
        starts: must be empty, because `generate` begins at position 0.
        use_cache: False computes all tokens again for each new token.
    """
    device = policy.device
    lm = policy.lm
    rows = [prompt for prompt, count in zip(prompts, counts, strict=True) for _ in range(count)]
    by_length: dict[int, list[int]] = {}
    for row, prompt in enumerate(rows):
        by_length.setdefault(len(prompt), []).append(row)
    tokens = torch.zeros(numbers.shape, dtype=torch.int64, device=device)
    decoded = Decoded(tokens, torch.zeros(numbers.shape), SupportRecorder(*numbers.shape))
    lm.set_attn_implementation(policy.generation_attn)
    for length, chosen in by_length.items():
        sampler = Sampler(numbers[chosen].to(device), options)
        ids = torch.tensor([rows[row] for row in chosen], device=device)
        output = lm.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids),
            max_new_tokens=options.max_new_tokens, do_sample=False, logits_processor=[sampler],
            eos_token_id=sorted(policy.eos_ids) if stop_at_eos else None,
            pad_token_id=policy.pad_id, use_cache=use_cache,
            synced_gpus=False,  # do not wait for the longest completion of other ranks
        )  # fmt: skip
        tokens[chosen, : output.shape[1] - length] = output[:, length:]
        for t, draw in enumerate(sampler.draws):
            decoded.logps[chosen, t] = draw.logps.cpu()
            decoded.support.add(torch.tensor(chosen), t, draw)
    return decoded


LOOP = "our loop"
# Functions that sample from a model, fastest first. The caches of some models give wrong results.
RUNS: dict[str, Callable[..., Decoded]] = {
    LOOP: decode,
    "transformers' generate": by_transformers,
    "transformers' generate without a cache": functools.partial(by_transformers, use_cache=False),
}


def run_of(policy: SampledModel) -> Callable[..., Decoded]:
    """Return the first function of RUNS whose samples agree with the model's logits.

    Raises:
        ValueError: no function agrees.
    """
    for name, run in RUNS.items():
        if difference_of(policy, name) is None:
            return run
    found = "; ".join(f"{name}: {reason}" for name, reason in _differences[policy.lm].items())
    kind = type(policy.lm).__name__
    raise ValueError(f"{kind}: nothing samples from this model; use another engine. {found}")


def difference_of(policy: SampledModel, name: str) -> str | None:
    """Return how the samples of RUNS[name] differ from the model's logits, or None if they agree.

    The first call for a model compares them. Call this inside `with policy.generation():`.
    """
    known = _differences.setdefault(policy.lm, {})
    if name in known:
        return known[name]
    with in_fp32(policy):
        # Use the tolerance of the coarsest dtype, because a 16-bit trunk may have an fp32 head.
        dtypes = {torch.float32, policy.autocast, *(p.dtype for p in policy.lm.parameters())}
        bar = max(check_tolerance(dtype) for dtype in dtypes if dtype is not None)
        known[name] = exceeds(lambda: gap_of(policy, name), bar, "nats")
    if known[name] is not None:
        kind = type(policy.lm).__name__
        log.warning("rollouts do not use %s, so they are slower: %s: %s", name, kind, known[name])
    return known[name]


def gap_of(policy: SampledModel, name: str) -> float:
    """Return the gap between the logps of the samples of RUNS[name] and the model's own, in nats.

    The comparison samples greedily from random prompts and ignores EOS. For our loop, it covers the
    first positions and the positions around every limit in the configuration. It also replaces fp32
    weights with random weights, because trained weights may hide a difference.
    """
    pair_at = functools.partial(sampled_pair, policy, RUNS[name])
    if name != LOOP:
        gap = pair_at(()).gap()
        # `generate` may give NaN after the end of a completion, which a rollout ignores.
        return 0.0 if math.isnan(gap) else gap
    check_supported(policy.lm)
    starts = starts_of(policy.lm, policy.positions)
    gap = worst_gap(policy.lm, pair_at, starts, uses_random=policy.autocast is None)
    if not math.isnan(gap):
        return gap
    # Accept a NaN that the model itself gives. Sampling then raises NonFiniteLogits.
    pair = pair_at(())
    pair.ours()  # draws the tokens of which `theirs` computes the log-probabilities
    return 0.0 if pair.theirs().isnan().any() else gap


def sampled_pair(
    policy: SampledModel, run: Callable[..., Decoded], starts: Sequence[int] = ()
) -> Pair:
    """Return the log-probabilities of samples, and those of the same tokens in a forward pass.

    Args:
        policy: a `Policy` or `SampledModel`.
        run: a function of RUNS.
        starts: position of each prompt's first token. If empty, short prompts start at position 0.
    """
    vocabulary = policy.lm.get_input_embeddings().weight.shape[0]
    prompts = [prompt for prompt, _ in draw_groups(len(starts) or 2, vocabulary)]
    if not starts:
        prompts[1] = prompts[1][1:]
    length = 3
    counts = [2] + [1] * (len(prompts) - 1)
    options = Sampling(max_new_tokens=length, temperature=0)
    numbers = torch.zeros(sum(counts), length, dtype=torch.float32)
    tokens: list[list[int]] = []  # the samples, whose log-probabilities `theirs` computes

    def ours() -> Tensor:
        with small_windows(policy.lm, positions=not starts):
            found = run(policy, prompts, counts, options, numbers, stop_at_eos=False, starts=starts)
        tokens[:] = found.tokens.tolist()
        return found.logps

    def theirs() -> Tensor:
        pairs = zip([prompts[0], *prompts], tokens, strict=True)
        rows = [[*prompt, *sampled] for prompt, sampled in pairs]
        policy.lm.set_attn_implementation(policy.generation_attn)
        with small_windows(policy.lm, positions=not starts):
            # Run the first prompt's rows alone, because a model's output may depend on the largest
            # position in the batch.
            found = [policy.model_logps(rows[:2], [*starts[:1], *starts[:1]])]
            if len(rows) > 2:
                found.append(policy.model_logps(rows[2:], starts[1:]))
        return torch.cat([logps[:, -length:] for logps in found])

    return Pair(ours, theirs, (), math.inf, in_nats=True)

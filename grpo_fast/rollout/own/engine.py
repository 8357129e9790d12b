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

from grpo_fast.attention import check_supported, check_tolerance, small_windows, trial
from grpo_fast.errors import NonFiniteLogits
from grpo_fast.rollout.engine import EOS, LENGTH, Completion, Engine, Request, uniforms
from grpo_fast.rollout.own.decode import Decoded, SupportRecorder, decode
from grpo_fast.rollout.sampler import Sampler, Sampling

if TYPE_CHECKING:
    from grpo_fast.rollout.own.model import SampledModel

log = logging.getLogger(__name__)

# Model -> reason why it needs transformers' `generate`, or None if the decoding loop computes it
# correctly. The cache avoids repeated trials of a model.
_unsuited: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()
# Model -> whether `generate` may use a cache for it.
_can_use_cache: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


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
            self.fallback = why_unsuited(policy)

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
            # Check again whether the loop supports the model: `update` may have replaced it.
            by_loop = not rows or (self.fallback or why_unsuited(self.policy)) is None
            run = decode if by_loop else by_transformers
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
    use_cache: bool | None = None,
) -> Decoded:
    """Sample with transformers' `generate`. The arguments and the result are those of `decode`.

    Every completion has a separate copy of the prompt. Only prompts of equal length are in one
    batch, because some models ignore a padding mask (for example RWKV and xLSTM).

    Args:
        starts: must be empty, because `generate` begins at position 0.
        use_cache: False computes all tokens again for each new token. None lets a trial decide.
    """
    device = policy.device
    lm = policy.lm
    if use_cache is None:
        use_cache = can_use_cache(policy)
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
        decoded.logps[chosen] = sampler.logps.cpu()
        for t, draw in enumerate(sampler.draws):
            decoded.support.add(torch.tensor(chosen), t, draw)
    return decoded


def can_use_cache(policy: SampledModel) -> bool:
    """Return whether `generate` may use a cache, after comparing its samples with one forward pass.

    The caches of some models give wrong results or raise an error. Without a cache, `generate` is
    slower. The result is stored for each model.

    Raises:
        ValueError: the samples are wrong without a cache, too.
    """
    if policy.lm in _can_use_cache:
        return _can_use_cache[policy.lm]
    found = []
    for use_cache in (True, False):
        run = functools.partial(by_transformers, use_cache=use_cache)
        try:
            gap = largest_gap(policy, (), run)
            found.append(f"its logits differ by {gap:.2g} nats from those of one pass")
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, IndexError) as error:
            gap = math.inf
            found.append((str(error).splitlines() or [type(error).__name__])[0])
        if not gap > tolerance_of(policy):
            _can_use_cache[policy.lm] = use_cache
            if not use_cache:
                log.warning("rollouts run without a cache, because of the cache: %s", found[0])
            return use_cache
    raise ValueError(
        f"{type(policy.lm).__name__}: transformers' generate cannot sample from this model, with a "
        f"cache ({found[0]}) or without one ({found[1]}); use a different engine, such as vLLM"
    )


def why_unsuited(policy: SampledModel) -> str | None:
    """Return why the decoding loop does not support this model, or None if it does.

    The first call for a model compares the loop with one forward pass. Call this inside
    `with policy.generation():`.
    """
    if policy.lm not in _unsuited:
        try:
            with trial.in_fp32(policy):
                _unsuited[policy.lm] = compare(policy)
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            prefix = "" if isinstance(error, ValueError) else "our loop fails on it: "
            _unsuited[policy.lm] = prefix + (str(error).splitlines() or [type(error).__name__])[0]
        if _unsuited[policy.lm] is not None:
            why = f"{type(policy.lm).__name__}: {_unsuited[policy.lm]}"
            log.warning("rollouts run by transformers' generate, more slowly: %s", why)
    return _unsuited[policy.lm]


def compare(policy: SampledModel) -> str | None:
    """Compare the decoding loop's log-probabilities with those of one forward pass.

    The trial samples greedily from random prompts and ignores EOS. It covers the first positions
    and the positions around every limit in the configuration (window, maximum position). A second
    round replaces fp32 weights with random weights, because trained weights may hide a difference.

    Returns:
        A sentence that states the difference, or None if the two agree.

    Raises:
        ValueError: packed attention does not support the model.
    """
    check_supported(policy.lm)
    gap, worst = trial.worst_gap(policy, lambda starts: largest_gap(policy, starts))
    if math.isnan(gap) or worst <= tolerance_of(policy):
        return None
    return f"its logits differ by {worst:.2g} nats between our loop and one pass"


def tolerance_of(policy: SampledModel) -> float:
    """Return the tolerance of the coarsest dtype, because a 16-bit trunk may have an fp32 head."""
    dtypes = {torch.float32, policy.autocast, *(p.dtype for p in policy.lm.parameters())} - {None}
    return max(check_tolerance(dtype) for dtype in dtypes)


def largest_gap(
    policy: SampledModel, starts: Sequence[int], run: Callable[..., Decoded] = decode
) -> float:
    """Return the largest difference between log-probabilities of samples and of a forward pass.

    Args:
        policy: a `Policy` or `SampledModel`.
        starts: position of each trial prompt's first token. If empty, short prompts start at
            position 0.
        run: `decode` or `by_transformers`, the function that samples.

    Returns:
        The difference in nats.
    """
    vocabulary = policy.lm.get_input_embeddings().weight.shape[0]
    prompts = [prompt for prompt, _ in trial.draw_groups(len(starts) or 2, vocabulary)]
    if not starts:
        prompts[1] = prompts[1][1:]
    length = 3
    counts = [2] + [1] * (len(prompts) - 1)
    options = Sampling(max_new_tokens=length, temperature=0)
    numbers = torch.zeros(sum(counts), length, dtype=torch.float32)
    with small_windows(policy.lm, positions=not starts):
        ours = run(policy, prompts, counts, options, numbers, stop_at_eos=False, starts=starts)
        pairs = zip([prompts[0], *prompts], ours.tokens.tolist(), strict=True)
        rows = [[*prompt, *tokens] for prompt, tokens in pairs]
        policy.lm.set_attn_implementation(policy.generation_attn)
        # Run the first prompt's rows alone, because a model's output may depend on the largest
        # position in the batch.
        theirs = [policy.model_logps(rows[:2], [*starts[:1], *starts[:1]])]
        if len(rows) > 2:
            theirs.append(policy.model_logps(rows[2:], starts[1:]))
    return float((torch.cat([logps[:, -length:] for logps in theirs]) - ours.logps).abs().max())

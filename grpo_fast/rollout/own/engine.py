"""The engine `transformers`, which is always there: the trainer's own model."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from grpo_fast.attention import check_supported, check_tolerance, small_windows, trial
from grpo_fast.errors import NonFiniteLogits
from grpo_fast.rollout.engine import EOS, LENGTH, Completion, Engine, Request, uniforms
from grpo_fast.rollout.own.decode import Decoded, KeptIds, decode
from grpo_fast.rollout.sampler import Sampler, Sampling

log = logging.getLogger(__name__)

# Why a model samples by transformers' `generate`; None: by our loop. Looked at once for each.
_unsuited: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()


class TransformersEngine(Engine):
    """Samples with the policy itself, by our loop; a model it cannot compute by `generate`."""

    def __init__(self, policy: Any, options: Any = None) -> None:
        self.policy, self.version = policy, 0
        with policy.generation():
            self.fallback = why_unsuited(policy)

    def update(self, policy: Any, version: int) -> None:
        self.policy, self.version = policy, version

    def sample(self, request: Request) -> list[Completion]:
        prompts, sampling, group_size, seed, places = request
        length = sampling.max_new_tokens
        numbers = uniforms(seed, len(prompts), length, group_size=group_size, places=places)
        rows = [prompt for prompt in prompts for _ in range(group_size)]
        size = sampling.batch_size or max(len(rows), 1)
        completions: list[Completion] = []
        with self.policy.generation():
            # Asked again: `update` may have brought another model than the engine was made with.
            by_loop = not rows or (self.fallback or why_unsuited(self.policy)) is None
            run = decode if by_loop else by_transformers
            for start in range(0, len(rows), size):
                part = slice(start, start + size)
                runs = [(prompt, len(list(same))) for prompt, same in groupby(rows[part])]
                chosen, counts = map(list, zip(*runs, strict=True))
                decoded = run(self.policy, chosen, counts, sampling, numbers[part])
                completions += self._cut(decoded)
        return completions

    def _cut(self, decoded: Decoded) -> list[Completion]:
        eos = torch.tensor(sorted(self.policy.eos_ids), device=decoded.tokens.device)
        ends = torch.isin(decoded.tokens, eos).cpu()
        has_end = ends.any(1).tolist()
        lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, ends.shape[1]).tolist()
        logps = decoded.logps.cpu()
        if any(row[:n].isnan().any() for row, n in zip(logps, lengths, strict=True)):
            raise NonFiniteLogits("the policy's logits are NaN or infinite")
        kept = decoded.kept.by_completion(lengths)
        # Clones: the rows are inference tensors, and views would keep the whole batch alive.
        return [
            Completion(ids[:n], row[:n].clone(), EOS if ended else LENGTH, self.version, own)
            for ids, row, n, ended, own in zip(
                decoded.tokens.tolist(), logps, lengths, has_end, kept, strict=True
            )
        ]


def by_transformers(
    policy: Any,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    options: Sampling,
    numbers: Tensor,
) -> Decoded:
    """`decode` by transformers' `generate`: prompts padded on the left, one for each completion."""
    device, pad = policy.device, policy.pad_id
    rows = [p for p, count in zip(prompts, counts, strict=True) for _ in range(count)]
    longest = max(map(len, rows))
    ids = torch.tensor([[pad] * (longest - len(p)) + [*p] for p in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in rows], device=device)
    policy.lm.set_attn_implementation(policy.generation_attn)
    sampler = Sampler(numbers.to(device), options)
    output = policy.lm.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=options.max_new_tokens,
        do_sample=False, logits_processor=[sampler], eos_token_id=sorted(policy.eos_ids),
        pad_token_id=pad, synced_gpus=False,  # ranks do not wait for each other's longest
    )  # fmt: skip
    tokens = torch.zeros(numbers.shape, dtype=torch.int64, device=device)
    tokens[:, : output.shape[1] - longest] = output[:, longest:]
    kept = KeptIds(*numbers.shape)
    for t, drawn in enumerate(sampler.drawn):
        kept.add(torch.arange(len(rows)), t, drawn)
    return Decoded(tokens, sampler.logps, kept)


def why_unsuited(policy: Any) -> str | None:
    """Why our loop does not sample from this model, or None. Call it in `policy.generation()`."""
    if hasattr(policy.lm, "sampled_by_generate"):  # a model that says why itself
        return policy.lm.sampled_by_generate
    if policy.lm not in _unsuited:
        try:
            _unsuited[policy.lm] = compare(policy)
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            does = "" if isinstance(error, ValueError) else "our loop fails on it: "
            _unsuited[policy.lm] = does + (str(error).splitlines() or [type(error).__name__])[0]
        if _unsuited[policy.lm] is not None:
            why = f"{type(policy.lm).__name__}: {_unsuited[policy.lm]}"
            log.warning("rollouts run by transformers' generate, more slowly: %s", why)
    return _unsuited[policy.lm]


def compare(policy: Any) -> str | None:
    """Return how our loop's logps differ from the model's own in one pass, or None if they agree.

    Greedy completions of random prompts are compared, past any EOS, at the first positions and
    around every limit of the configuration. Weights in fp32 are replaced by random ones in a second
    round, so that the verdict does not depend on weights that hide a difference.
    """
    check_supported(policy.lm)
    # The narrowest dtype decides: logps are fp32, and an fp32 head may follow a 16-bit trunk.
    dtypes = {torch.float32, policy.autocast, *(p.dtype for p in policy.lm.parameters())} - {None}
    tolerance = max(check_tolerance(dtype) for dtype in dtypes)
    own, worst = trial.worst_gap(policy, lambda starts: largest_gap(policy, starts))
    if math.isnan(own) or worst <= tolerance:
        return None
    return f"its logits differ by {worst:.2g} nats between our loop and one pass"


def largest_gap(policy: Any, starts: Sequence[int]) -> float:
    """Return the largest difference of logps in nats; `starts`: see `trial.worst_gap`."""
    vocabulary = policy.lm.get_input_embeddings().weight.shape[0]
    prompts = [prompt for prompt, _ in trial.draw_groups(len(starts) or 2, vocabulary)]
    if not starts:
        prompts[1] = prompts[1][1:]
    length, counts = 3, [2] + [1] * (len(prompts) - 1)
    options = Sampling(max_new_tokens=length, temperature=0)
    numbers = torch.zeros(sum(counts), length)
    with small_windows(policy.lm, positions=not starts):
        ours = decode(policy, prompts, counts, options, numbers, stop_at_eos=False, starts=starts)
        pairs = zip([prompts[0], *prompts], ours.tokens.tolist(), strict=True)
        rows = [[*prompt, *tokens] for prompt, tokens in pairs]
        policy.lm.set_attn_implementation(policy.generation_attn)
        # The first prompt's rows pass alone: a model may look at the largest position of all.
        theirs = [policy.own_logps(rows[:2], [*starts[:1], *starts[:1]])]
        if len(rows) > 2:
            theirs.append(policy.own_logps(rows[2:], starts[1:]))
    return float((torch.cat([logps[:, -length:] for logps in theirs]) - ours.logps).abs().max())

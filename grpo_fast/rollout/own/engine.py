"""The engine `transformers`, which is always there: the trainer's own model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from grpo_fast.attention import check_supported, check_tolerance, small_windows
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
    if policy.lm not in _unsuited:
        try:
            with small_windows(policy.lm):
                _unsuited[policy.lm] = compare(policy)
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            does = "" if isinstance(error, ValueError) else "our loop fails on it: "
            _unsuited[policy.lm] = does + (str(error).splitlines() or [type(error).__name__])[0]
        if _unsuited[policy.lm] is not None:
            why = f"{type(policy.lm).__name__}: {_unsuited[policy.lm]}"
            log.warning("rollouts run by transformers' generate, more slowly: %s", why)
    return _unsuited[policy.lm]


def compare(policy: Any) -> str | None:
    """How our loop's logps differ from the model's own in one pass, or None where they agree.

    Three greedy completions of two prompts are compared, past any EOS.
    """
    check_supported(policy.lm)
    rows = policy.lm.get_input_embeddings().weight.shape[0]
    prompts = [
        [(7 * i + 11 * n + 3) % rows for i in range(length)] for n, length in enumerate((4, 3))
    ]
    options = Sampling(max_new_tokens=3, temperature=0)
    decoded = decode(policy, prompts, [2, 1], options, torch.zeros(3, 3), stop_at_eos=False)
    policy.lm.set_attn_implementation(policy.generation_attn)
    worst = 0.0
    for prompt, tokens, logps in zip(
        [prompts[0], *prompts], decoded.tokens, decoded.logps, strict=True
    ):
        own = policy.own_logps(prompt, tokens.tolist())
        if own.isnan().any():
            return None
        worst = max(worst, float((own - logps).abs().max()))
    # The narrowest decides: logps are fp32, and an fp32 head may stand on a 16-bit trunk.
    dtypes = {torch.float32, policy.autocast, *(p.dtype for p in policy.lm.parameters())} - {None}
    if worst <= max(check_tolerance(dtype) for dtype in dtypes):
        return None
    return f"its logits differ by {worst:.2g} nats between our loop and one pass"

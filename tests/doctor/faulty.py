"""Rollout engine with planted faults, for tests of `grpo-fast doctor`.

The engine shares no code with the doctor. An error in shared code would change both sides of the
doctor's comparison, and no test could find it. The engine runs one forward pass for each token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from grpo_fast import Support
from grpo_fast.data.tokenizer import build_bpe_tokenizer
from grpo_fast.doctor import Diagnosis, diagnose
from grpo_fast.rollout import Completion, Engine, Sampling
from grpo_fast.train.policy import Policy
from tests.tiny import TEXTS, tiny_model

BOS = "<|bos|>"
CHAT = (
    BOS + "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
PROMPTS = ["What is 12 + 30?", "4 more", "The answer is what she buys, 7"]
MESSAGES = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
SAMPLING = Sampling(max_new_tokens=10, temperature=0.7)


def found_by(
    policy: Policy, engine: Engine, sampling: Any = SAMPLING, prompts: Any = MESSAGES,
    **options: Any,
) -> tuple[Diagnosis, list[str]]:  # fmt: skip
    """Run the doctor on an engine. Return the diagnosis and the names of the found causes."""
    found = diagnose(policy, engine, prompts, sampling, **options)
    return found, [cause.name for cause in found.causes]


@dataclass
class FaultyEngine(Engine):
    """Engine that samples correctly by default. Setting a field plants one fault."""

    temperature: float | None = None  # replaces the requested temperature
    top_k: int = 0  # replaces the requested top_k
    penalty: float = 1.0  # applies this repetition penalty, although none was requested
    raw: bool = False  # reports log-probabilities from before temperature and truncation
    names_kept: bool = False  # also reports the tokens that truncation kept (not a fault)
    read: Callable[[list[int]], list[int]] = list  # changes the ids of a prompt
    keeps: Policy | None = None  # samples with this policy, and ignores weight updates
    model_dtype: torch.dtype | None = None  # computes in this dtype instead of the policy's
    answers: int | None = None  # reports this weight version instead of the current one
    stops: int | None = None  # cuts completions off at this length
    report_as: Callable[[torch.Tensor], torch.Tensor] = torch.clone  # changes reported logps

    def update(self, policy: Policy, version: int) -> None:
        self.policy = self.keeps or policy
        if self.model_dtype is not None:
            self.policy = self.policy.frozen_copy()
            self.policy.lm.to(self.model_dtype)
        self.version = version if self.answers is None else self.answers

    def sample(self, request):
        self.generator = torch.Generator().manual_seed(7)
        with self.policy.generation():
            return [
                self.complete(self.read(list(prompt)), request)
                for prompt in request.prompts
                for _ in range(request.group_size)
            ]

    def complete(self, prompt: list[int], request: Any) -> Completion:
        ids: list[int] = []
        logps: list[float] = []
        kept: list[torch.Tensor] = []
        longest = self.stops or request.sampling.max_new_tokens
        while len(ids) < longest and not (ids and ids[-1] in self.policy.eos_ids):
            tokens = torch.tensor([prompt + ids])
            z = self.policy.lm(input_ids=tokens, use_cache=False).logits[0, -1].float()
            p = self.distribution(z, tokens[0], request.sampling)
            token = int(torch.multinomial(p, 1, generator=self.generator))
            ids.append(token)
            logps.append(float((z.log_softmax(-1) if self.raw else p.log())[token]))
            kept.append(p.nonzero()[:, 0].int())
        reported = self.report_as(torch.tensor(logps))
        support = Support(torch.cat(kept), torch.tensor([0, *map(len, kept)]).cumsum(0))
        why = "eos" if ids[-1] in self.policy.eos_ids else "length"
        return Completion(ids, reported, why, self.version, support if self.names_kept else None)

    def distribution(self, z: torch.Tensor, seen: torch.Tensor, sampling: Any) -> torch.Tensor:
        z = z.clone()
        seen = seen.unique()
        z[seen] = torch.where(z[seen] > 0, z[seen] / self.penalty, z[seen] * self.penalty)
        p = (z / (self.temperature or sampling.temperature)).softmax(-1)
        top_k = self.top_k or sampling.top_k or len(p)
        p = torch.where(p >= p.topk(top_k).values[-1], p, 0.0)
        order = p.argsort(descending=True)
        before = (p / p.sum())[order].cumsum(0).roll(1)
        before[0] = 0
        p[order[before >= sampling.top_p]] = 0.0
        return p / p.sum()


def tokenizer_with_bos() -> Any:
    """Return a BPE tokenizer that adds a BOS token to every text.

    Its chat template adds BOS, too. An engine that tokenizes the rendered template as plain text
    would therefore add BOS twice.
    """
    from tokenizers.processors import TemplateProcessing

    tokenizer = build_bpe_tokenizer(TEXTS, 280)
    tokenizer.add_special_tokens({"bos_token": BOS})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def policy_of(family: str = "llama", **fields: Any) -> Policy:
    tokenizer = tokenizer_with_bos()
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return Policy(tiny_model(family, vocab_size=len(tokenizer), **special, **fields), tokenizer)

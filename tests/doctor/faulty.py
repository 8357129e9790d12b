"""An engine with faults, apart from the doctor's code: a whole forward pass for each token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from grpo_fast.data.tokenizer import build_bpe_tokenizer
from grpo_fast.doctor import Diagnosis, diagnose
from grpo_fast.rollout import Completion, Engine, Kept, Sampling
from grpo_fast.train.models.policy import Policy
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
    policy: Policy, engine: Engine, sampling: Any = SAMPLING, prompts: Any = PROMPTS, **options: Any
) -> tuple[Diagnosis, list[str]]:
    """The diagnosis, and the names of its causes."""
    found = diagnose(policy, engine, prompts, sampling, **options)
    return found, [cause.name for cause in found.causes]


@dataclass
class FaultyEngine(Engine):
    """Samples correctly, apart from what it is told to do otherwise."""

    temperature: float | None = None  # in place of the one asked for
    top_k: int | None = None
    top_p: float | None = None
    raw: bool = False  # reports log-probabilities from before temperature and truncation
    report: float | None = None  # reports those of this temperature
    names_kept: bool = False
    head: torch.dtype | None = None
    model_dtype: torch.dtype | None = None
    read: Callable[[list[int]], list[int]] | None = None  # what it makes of a prompt
    pad: str | None = None  # side of padding that it does not mask
    keeps: Policy | None = None  # weights that no update changes
    answers: int | None = None  # the version it says, in place of the one given
    shift: float = 0.0  # nats that its log-probabilities are too low
    min_p: float = 0.0
    edit: Callable[[torch.Tensor, list[int], list[int]], torch.Tensor] | None = None  # of logits
    report_as: Callable[[torch.Tensor], torch.Tensor] | None = None  # of a completion's logps
    deal: Callable[[list[Completion]], list[Completion]] | None = None  # in which order
    late: bool = False  # it samples with the weights before the last update

    def update(self, policy: Policy, version: int) -> None:
        before, self.last = getattr(self, "last", None), policy.frozen_copy()
        self.policy = self.keeps or (self.late and before) or policy
        if self.model_dtype is not None:
            self.policy = self.policy.frozen_copy()
            self.policy.lm.to(self.model_dtype)
        self.version = version if self.answers is None else self.answers

    def sample(self, request):
        _, sampling, group_size, _, _ = request
        read = [self.read(list(p)) if self.read else list(p) for p in request.prompts]
        longest = max(map(len, read))
        pads = [[self.policy.pad_id] * (longest - len(p)) for p in read]
        if self.pad == "left":
            read = [gap + p for gap, p in zip(pads, read, strict=True)]
        if self.pad == "right":
            read = [p + gap for gap, p in zip(pads, read, strict=True)]
        generator = torch.Generator().manual_seed(7)
        with self.policy.generation():
            found = [
                self.complete(prompt, sampling, generator)
                for prompt in read
                for _ in range(group_size)
            ]
        return self.deal(found) if self.deal else found

    def complete(self, prompt: list[int], sampling: Any, generator: Any) -> Completion:
        ids: list[int] = []
        logps: list[float] = []
        kept: list[list[int]] = []
        while len(ids) < sampling.max_new_tokens and not (ids and ids[-1] in self.policy.eos_ids):
            z = self.logits(prompt + ids)
            z = self.edit(z, prompt, ids) if self.edit else z
            p = self.distribution(z, sampling)
            token = int(torch.multinomial(p, 1, generator=generator))
            told = p.log()
            if self.raw:
                told = z.log_softmax(-1)
            if self.report is not None:
                told = (z / self.report).log_softmax(-1)
            ids.append(token)
            logps.append(float(told[token]))
            kept.append(p.nonzero()[:, 0].tolist())
        told = torch.tensor(logps)
        told = told - self.shift
        told = self.report_as(told) if self.report_as else told
        names = None
        if self.names_kept:
            sizes = torch.tensor([0, *map(len, kept)]).cumsum(0)
            names = Kept(torch.tensor([t for row in kept for t in row], dtype=torch.int32), sizes)
        why = "eos" if ids[-1] in self.policy.eos_ids else "length"
        return Completion(ids, told, why, self.version, names)

    def logits(self, ids: list[int]) -> torch.Tensor:
        lm = self.policy.lm
        if self.head is None:
            return lm(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()
        state = lm.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state
        return (state[0, -1:].to(self.head) @ lm.lm_head.weight.to(self.head).T)[0].float()

    def distribution(self, z: torch.Tensor, sampling: Any) -> torch.Tensor:
        temperature = sampling.temperature if self.temperature is None else self.temperature
        top_k = sampling.top_k if self.top_k is None else self.top_k
        top_p = sampling.top_p if self.top_p is None else self.top_p
        p = (z / temperature).softmax(-1)
        p = torch.where(p >= self.min_p * p.max(), p, 0.0)
        if top_k:
            p = torch.where(p >= p.topk(top_k).values[-1], p, 0.0)
            p = p / p.sum()
        if top_p < 1:
            order = p.argsort(descending=True)
            before = torch.cat([torch.zeros(1), p[order].cumsum(0)[:-1]])
            p = p.clone()
            p[order[before >= top_p]] = 0.0
        return p / p.sum()


def tokenizer_with_bos() -> Any:
    """A BPE tokenizer that puts a BOS in front of a text, with a chat template that writes it."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = build_bpe_tokenizer(TEXTS, 280)
    tokenizer.add_special_tokens({"bos_token": BOS})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def as_chat(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    made = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(made, add_special_tokens=False)["input_ids"]


def bos_twice(policy: Policy) -> Callable[[list[int]], list[int]]:
    return lambda tokens: [policy.tokenizer.bos_token_id, *tokens]


def policy_with_bos(seed: int = 0) -> Policy:
    tokenizer = tokenizer_with_bos()
    return Policy(tiny_model("llama", vocab_size=len(tokenizer), seed=seed), tokenizer)

"""Providers of the same GRPO step: shared prompts, packed, padded (transformers), and TRL's loss.

Each provider has a copy of the model. Its method `logps` computes the old logps of all completion
tokens. Its method `gradients` returns the metrics of the loss, which include its value, and leaves
the gradients in the `grad` fields of the parameters. `step_of` calls both methods, and then updates
the weights with AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast import LossConfig, logits_grpo_loss
from grpo_fast.rollout import Completion, Samples
from grpo_fast.rollout.engine import LENGTH
from grpo_fast.rollout.samples import table_of
from grpo_fast.train.batch import StepBatch
from grpo_fast.train.config import ModelConfig
from grpo_fast.train.policy import Policy, apply_options, with_lora
from grpo_fast.train.update import accumulate

LEARNING_RATE = 1e-9  # The weights hardly change, so every round does the same work.
# Old logps minus current logps. These differences are the negative logs of the ratios. The first
# ratio is above the upper clip bound, and the last one is below the lower bound. The logs of all
# ratios are at least 0.13 from the logs of the clip bounds 0.8 and 1.2. bf16 changes a logp by
# about 0.01. If this moved a ratio across a bound, the whole gradient of a token would differ.
NOISE = (-0.5, -0.05, 0.0, 0.08, 0.5)
Logps = list[Tensor]  # one fp32 tensor of shape (length,) for each completion


class StepProblem(NamedTuple):
    """Batch of prompts and completions that all providers process.

    Attributes:
        samples: prompts, completions and advantages.
        group_size: number of completions for each prompt.
        loss: configuration of the loss.
        noise: numbers that are added to the old logps before the results of the providers are
            compared, so that the importance ratios differ from 1.
    """

    samples: Samples
    group_size: int
    loss: LossConfig
    noise: Logps


def make_problem(
    prompts: list[list[int]], group_size: int, longest: int, vocab: int
) -> StepProblem:
    """Build a problem with random completions and normally distributed advantages.

    The completions have `longest` / 2 to `longest` tokens. The noise is drawn from NOISE.
    """
    generator = torch.Generator().manual_seed(0)
    count = len(prompts) * group_size

    def integers(low: int, high: int, size: int) -> Tensor:
        return torch.randint(low, high, (size,), generator=generator)

    lengths = integers(max(longest // 2, 1), longest + 1, count).tolist()
    lengths[0] = longest
    completions = [integers(2, vocab, n).tolist() for n in lengths]
    noise = [torch.tensor(NOISE)[integers(0, len(NOISE), n)] for n in lengths]
    drawn = [Completion(c, torch.zeros(len(c)), LENGTH, 0) for c in completions]
    samples = table_of(prompts, drawn)
    samples.advantages = torch.randn(count, generator=generator)
    config = LossConfig(loss_type="dapo", compute_entropy=True)
    return StepProblem(samples, group_size, config, noise)


class Ours:
    """Our trainer on packed rows of at most `budget` tokens.

    If `shared` is True, the prompt of a group is stored once.
    """

    def __init__(
        self, model: Any, problem: StepProblem, options: Any, shared: bool, budget: int = 1 << 40
    ) -> None:
        apply_options(model, options.model)
        tokenizer = SimpleNamespace(eos_token_id=1, pad_token_id=0)
        self.policy, self.problem = Policy(_adapted(model, options.model), tokenizer), problem
        self.model = self.policy.model.train()
        self.optimizer = adam(self.model)
        self.batch = StepBatch(
            problem.samples, shared=shared, budget=budget, device=self.policy.device,
        )  # fmt: skip

    def logps(self) -> Logps:
        samples = self.batch.samples
        found = torch.zeros_like(samples.logps)
        with torch.no_grad():
            for micro in self.batch.micro_batches:
                found[micro.rows] = self.policy.logps(micro.packed)
        return list(found.split(samples.lengths))

    def gradients(self, old_logps: Logps) -> dict[str, float]:
        self.batch.samples.old_logps = torch.cat(old_logps)
        minibatch, loss = self.batch.minibatches[0], self.problem.loss
        seen = accumulate(self.policy, minibatch, loss, correct_sampling=False, validate="auto")
        return seen.result()

    @property
    def tokens(self) -> int:
        """Return the number of tokens that the trunk processes for all samples."""
        return self.batch.trunk_tokens


def padded(rows: list[list[int]], side: str, ones: bool) -> Tensor:
    """Pad lists of token ids with zeros, (B, L). If `ones` is True, replace each id by 1."""
    tensors = [
        torch.ones(len(row), dtype=torch.int64) if ones else torch.tensor(row) for row in rows
    ]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_side=side)


class Padded:
    """A transformers model on padded rows (B, L), with our loss on the model's logits."""

    def __init__(self, model: Any, problem: StepProblem, options: Any) -> None:
        apply_options(model, options.model)
        self.prepare(model)
        self.model, self.problem = _adapted(model, options.model).train(), problem
        self.optimizer = adam(self.model)
        device = next(self.model.parameters()).device
        prompts, completions = problem.samples.prompt_ids, problem.samples.completion_ids
        self.prompt, self.length = max(map(len, prompts)), max(map(len, completions))
        self.ids, self.mask = (
            torch.cat([padded(prompts, "left", ones), padded(completions, "right", ones)], 1)
            for ones in (False, True)
        )
        self.ids, self.mask = self.ids.to(device), self.mask.to(device)
        self.items = sum(map(len, completions))

    def prepare(self, model: Any) -> None:
        """Prepare the model for this provider. Subclasses override this method."""

    def all_logps(self) -> Tensor:
        """Return the logps of the completion tokens, (B, C)."""
        logps = self.forward().float().log_softmax(-1)
        return logps.gather(-1, self.ids[:, self.prompt :, None])[..., 0]

    def forward(self) -> Tensor:  # (B, C, V)
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        return self.model(
            input_ids=self.ids, attention_mask=self.mask, position_ids=positions, use_cache=False,
            logits_to_keep=self.length + 1,
        ).logits[:, :-1]  # fmt: skip

    def logps(self) -> Logps:
        with torch.no_grad():
            table = self.all_logps()
        lengths = self.problem.samples.lengths
        return [row[:length] for row, length in zip(table, lengths, strict=True)]

    def gradients(self, old_logps: Logps) -> dict[str, float]:
        old = torch.nn.utils.rnn.pad_sequence(old_logps, batch_first=True)
        metrics = self.metrics(old, self.mask[:, self.prompt :].bool())
        metrics["loss"].backward()
        return {name: float(value) for name, value in metrics.items()}

    def metrics(self, old: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return the loss and its metrics. `old` and `mask` are (B, C)."""
        output = logits_grpo_loss(
            self.forward(), self.ids[:, self.prompt :],
            self.problem.samples.advantages.to(old.device), self.problem.loss,
            completion_mask=mask, old_logps=old, num_items_in_batch=self.items,
        )  # fmt: skip
        return {"loss": output.loss, **output.metrics}

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all samples, including padding."""
        return self.ids.numel()


class Trl(Padded):
    """A model with the fused head of TRL 1.16, and the loss of `GRPOTrainer` in plain torch."""

    def prepare(self, model: Any) -> None:
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model, outputs=("log_probs", "entropy"))

    def all_logps(self) -> Tensor:
        labels = self.ids.masked_fill(self.mask == 0, -100)
        labels[:, : self.prompt] = -100
        output = self.model(
            input_ids=self.ids, attention_mask=self.mask, labels=labels, fused_lm_head=True
        )
        return output.log_probs[:, -self.length :]

    def metrics(self, old: Tensor, mask: Tensor) -> dict[str, Tensor]:
        config = self.problem.loss
        low, high = 1 - config.epsilon_low, 1 + (config.epsilon_high or config.epsilon_low)
        ratio = torch.exp(self.all_logps() - old)
        advantages = self.problem.samples.advantages[:, None].to(old.device)
        per_token = -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
        return {"loss": (per_token * mask).sum() / self.items}


def step_of(provider: Any) -> Callable[[], None]:
    """Return a step that computes the old logps and the gradients, and updates the weights."""

    def step() -> None:
        provider.gradients(provider.logps())
        provider.optimizer.step()
        provider.optimizer.zero_grad(set_to_none=True)

    return step


def _adapted(model: Any, config: ModelConfig) -> Any:
    torch.manual_seed(0)  # every provider must get the same random adapter
    return model if config.lora is None else with_lora(model, config.lora)


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

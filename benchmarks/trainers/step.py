r"""Time and memory of a GRPO step without rollout: shared prompts, packed, padded, and in TRL.

    python -m benchmarks.trainers.step
    python -m benchmarks.trainers.step --device cuda --model-config qwen2.5-1.5b \
        --prompt 8192 --completion 512 --group 16

The model has random weights, and the prompt is random. Without options, the model is tiny and on a
CPU. A step computes the old logps, runs the forward and backward passes, and updates the weights
with AdamW. The provider "TRL" is TRL's fused head with the loss of `GRPOTrainer` in plain torch.

Each provider has a copy of the model. Its method `logps` computes the old logps of all completion
tokens. Its method `gradients` returns the metrics of the loss, which include its value, and leaves
the gradients in the `grad` fields of the parameters.

The loss, gradients and metrics of every provider are first compared with the results of the padded
provider, or of the last one if `padded` is not selected. In fp32, the tolerance is 1e-5 up to 4096
prompt tokens. It increases for longer prompts, because rounding errors accumulate. In bf16, the
tolerance starts at 5e-2, because the gradients of `shared` and of TRL differ by 2.6% and 2.7% from
the gradients in fp32 (24 layers of Qwen2.5-0.5B on a CPU). Every ratio is far from the clip bounds,
because a rounding error near a bound would change the whole gradient of a token. The results of a
single provider are not compared with anything. Such a run shows whether a long prompt fits into
memory.

All providers are timed in one process in interleaved rounds, on a CPU in fp32, and on a GPU in bf16
with gradient checkpointing. The reported memory is the peak during one step minus the memory in use
before the step. On a CPU, it is computed from the allocation events of torch.profiler, and on a GPU
from the statistics of torch's allocator. The command prints a table, and `--json` writes all
results to a file.
"""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from benchmarks import measure
from benchmarks.options import parsed, positive, save, timing_parser
from benchmarks.report.tables import text_table
from grpo_fast import LossConfig, logits_grpo_loss
from grpo_fast.rollout import Completion, Samples
from grpo_fast.rollout.engine import LENGTH
from grpo_fast.rollout.samples import table_of
from grpo_fast.train.batch import StepBatch
from grpo_fast.train.config import LoraConfig, ModelConfig
from grpo_fast.train.plan import KNOWN_MODELS
from grpo_fast.train.policy import Policy, apply_options, with_lora
from grpo_fast.train.update import accumulate

# ---- the problem and the providers ----
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
        loss: configuration of the loss.
        noise: numbers that are added to the old logps before the results of the providers are
            compared, so that the importance ratios differ from 1.
    """

    samples: Samples
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
    return StepProblem(samples, config, noise)


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

    def __init__(self, model: Any, problem: StepProblem, options: Any) -> None:
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        super().__init__(model, problem, options)

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


# ---- the command ----
TINY = {
    "model_type": "llama", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 1024,
    "tie_word_embeddings": True, "max_position_embeddings": 65536, "initializer_range": 0.05,
}  # fmt: skip
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2}
# Default numbers of prompt tokens and of completion tokens.
SIZES = {"cpu": (2048, 64), "cuda": (4096, 256)}
BUDGET, ROUNDS = (120.0, 5.0), (5, 5)  # without --quick, with --quick
PROVIDERS: dict[str, Callable[[Any, StepProblem, Any], Any]] = {
    "shared": functools.partial(Ours, shared=True),
    "packed": functools.partial(Ours, shared=False),
    "padded": Padded,
    "TRL": Trl,
}


def main() -> None:
    print(table(run(parse_arguments())))


def parse_arguments() -> argparse.Namespace:
    parser = timing_parser(__doc__)
    words = "default: tiny; on a GPU qwen2.5-0.5b"
    parser.add_argument("--model-config", choices=("tiny", *KNOWN_MODELS), help=words)
    count = positive(int)
    parser.add_argument("--layers", type=count, help="instead of the model's number of layers")
    words = "tokens (2048; on a GPU 4096; --quick: 512)"
    parser.add_argument("--prompt", type=count, help=words)
    words = "tokens, at most (64; on a GPU 256)"
    parser.add_argument("--completion", type=count, help=words)
    parser.add_argument("--group", type=count, default=8, help="completions")
    parser.add_argument(
        "--providers", nargs="+", default=["shared", "packed", "padded"], choices=tuple(PROVIDERS)
    )
    parser.add_argument("--lora", type=count, metavar="R", help="rank of LoRA adapters")
    options = parsed(parser, BUDGET, ROUNDS)
    gpu = options.device == "cuda"
    large = gpu and not options.quick
    options.model_config = options.model_config or ("qwen2.5-0.5b" if large else "tiny")
    prompt, completion = SIZES[options.device]
    options.prompt = options.prompt or (512 if options.quick else prompt)
    options.completion = options.completion or completion
    options.dtype = "bfloat16" if gpu else "float32"
    options.model = ModelConfig(
        path=options.model_config, dtype=options.dtype, device=options.device,
        gradient_checkpointing=gpu,
        lora=None if options.lora is None else LoraConfig(r=options.lora),
    )  # fmt: skip
    return options


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Verify and time all providers, measure their peak memory, and save and return the report."""
    model = build_model(options)
    vocab = model.config.vocab_size
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, vocab, (1, options.prompt), generator=generator).tolist()
    problem = make_problem(prompts, options.group, options.completion, vocab)
    providers = {n: PROVIDERS[n](copy.deepcopy(model), problem, options) for n in options.providers}
    del model
    tolerance = TOLERANCE[options.dtype] * max(1.0, options.prompt / 4096)
    errors = verify(providers, problem, tolerance)
    steps = {name: step_of(provider) for name, provider in providers.items()}
    times = measure.interleaved(steps, options.device, options.budget, options.rounds)
    rows = {}
    for name, step in steps.items():
        # Measure the memory last, because the first step also allocates Adam's moments.
        peak = peak_bytes(step, options.device) / measure.MIB
        row = {"tokens": providers[name].tokens, "peak_mib": peak}
        rows[name] = {**row, **times[name], **errors[name]}
    settings = {k: v for k, v in vars(options).items() if k not in ("model", "out")}
    return save(
        options, "GRPO step without rollout", settings, prompt_tokens=[options.prompt],
        completion_tokens=problem.samples.lengths, providers=rows,
    )  # fmt: skip


def build_model(options: argparse.Namespace) -> Any:
    """Build a model with random weights on the chosen device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = getattr(torch, options.dtype)
    fields = dict(TINY if options.model_config == "tiny" else KNOWN_MODELS[options.model_config])
    fields["num_hidden_layers"] = options.layers or fields["num_hidden_layers"]
    config = AutoConfig.for_model(**fields, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    torch.manual_seed(0)
    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def verify(
    providers: dict[str, Any], problem: StepProblem, tolerance: float
) -> dict[str, dict[str, float]]:
    """Compare the loss, gradients and metrics of every provider with those of a reference provider.

    The reference is "padded", or the last provider if "padded" was not selected. The error of the
    loss is divided by the mean absolute advantage. The error of the gradient is its relative L2
    error.

    Returns:
        The errors of the loss, the gradients and the metrics, for each provider.

    Raises:
        SystemExit: an error is larger than `tolerance`.
    """
    reference = "padded" if "padded" in providers else next(reversed(providers))
    old = [
        a + b.to(a.device) for a, b in zip(providers[reference].logps(), problem.noise, strict=True)
    ]
    outcomes, gradients = {}, {}
    for name, provider in providers.items():
        outcomes[name] = provider.gradients(old)
        found = {
            n: p.grad.float().flatten().cpu()
            for n, p in provider.model.named_parameters()
            if p.grad is not None
        }
        gradients[name] = torch.cat([found[n] for n in sorted(found)])
        provider.optimizer.zero_grad(set_to_none=True)
    scale = float(problem.samples.advantages.abs().mean())
    errors = {}
    metrics = outcomes[reference]
    exact, norm = gradients[reference], functools.partial(vector_norm, dtype=torch.float64)
    for name, outcome in outcomes.items():
        common = {k: v for k, v in outcome.items() if k in metrics and k != "skipped_rows"}
        off = [abs(value - metrics[k]) / max(1.0, abs(value)) for k, value in common.items()]
        errors[name] = {
            "error_loss": abs(outcome["loss"] - metrics["loss"]) / scale,
            "error_gradient": float(norm(gradients[name] - exact) / norm(exact)),
            "error_metrics": max(off, default=0.0),
        }
        if not all(error <= tolerance for error in errors[name].values()):  # also refuses NaN
            where = f"{name} differs from {reference}"
            raise SystemExit(f"{where} by {errors[name]} (tolerance {tolerance})")
    return errors


def peak_bytes(step: Any, device: str) -> int:
    """Return the peak memory during a warm step minus the memory before the step, in bytes."""
    if device == "cuda":
        return int(measure.peak_memory(step, device) * measure.MIB)
    return measure.allocated_peak(step)


def table(report: dict[str, Any]) -> str:
    """Return the results as text, with time and memory relative to the first provider."""
    rows, settings = report["providers"], report["settings"]
    first = next(iter(rows))
    lines = []
    for name, row in rows.items():
        numbers = [f"{row[key]:.0f}" for key in ("tokens", "median_ms", "spread_ms", "peak_mib")]
        ratios = [f"{row[key] / rows[first][key]:.2f}×" for key in ("median_ms", "peak_mib")]
        errors = [f"{row[f'error_{what}']:.1e}" for what in ("loss", "gradient", "metrics")]
        lines.append([name, *numbers, *ratios, " ".join(errors)])
    title = (
        f"GRPO step without rollout · prompts {report['prompt_tokens']} tokens · completions up to "
        f"{max(report['completion_tokens'])} · G = {settings['group']} · {settings['dtype']}"
    )
    columns = "", "tokens", "ms", "±", "peak MiB", f"time ÷ {first}", f"memory ÷ {first}"
    return text_table(title, [*columns, "errors: loss, gradient, metrics"], lines)


if __name__ == "__main__":
    main()

"""Bugs planted in the training loop and around a model: what a run repeats, counts or forgets."""

from __future__ import annotations

from tests.mutation.mutants import Mutant

OPTIMIZER = "grpo_fast/train/update/optimizer.py"
CALLING, CAUSAL_LM = "grpo_fast/rewards/calling.py", "grpo_fast/integrations/causal_lm.py"
METRICS, EVALUATE, BATCH, REFERENCE, PROMPTS = (
    f"grpo_fast/{x}.py"
    for x in (
        "train/metrics/losses",
        "train/evaluation/evaluate",
        "train/update/batch",
        "train/models/reference",
        "train/collect/groups",
    )
)
PACKING, GENERATED = "grpo_fast/attention/packing.py", "grpo_fast/data/generated.py"
MICRO_BATCH = "grpo_fast/train/update/micro_batch.py"

MUTANTS = [
    Mutant("train-rollout-seed", "grpo_fast/train/collect/collector.py",
           "(self.seed, step), clock, ahead)", "(self.seed, 0), clock, ahead)",
           "every step draws the first one's random numbers", "train"),
    Mutant("train-skips-forgotten", OPTIMIZER,
           "self.adam.step()\n            self.skipped_in_a_row = 0\n", "self.adam.step()\n",
           "three bad gradients in a whole run end it", "train"),
    Mutant("schedule-warmup-late", OPTIMIZER,
           "return (step + 1) / warmup", "return step / warmup",
           "the first step of a warm-up moves nothing", "optimizer"),
    Mutant("schedule-ends-early", OPTIMIZER,
           "(step - warmup) / (total - warmup)", "step / (total - warmup)",
           "after a warm-up the rate is 0 before the end", "optimizer"),
    Mutant("schedule-skip-stands-still", OPTIMIZER,
           "        self.steps += 1  # skipped or not: the schedule follows the updates\n", "",
           "the rate never changes", "optimizer"),
    Mutant("optimizer-bad-gradient-applied", OPTIMIZER,
           "if math.isfinite(norm):", "if True:",
           "a NaN reaches the weights", "optimizer"),
    Mutant("optimizer-gradients-stay", OPTIMIZER,
           "        self.zero_grad()\n        return norm", "        return norm",
           "each step adds to the last one's gradients", "training"),
    Mutant("packing-last-row", PACKING,
           "positions = trained - 1", "positions = (trained - 2).clamp(min=0)",
           "first tokens are predicted one row too early", "policy"),
    Mutant("batch-mask-forgotten", MICRO_BATCH,
           "mask_truncated and rollout.truncated[i]", "False",
           "completions that were cut off teach, too", "policy"),
    Mutant("evaluate-pass-at-k", EVALUATE,
           "range(n - correct + 1, n + 1)", "range(n - correct, n + 1)",
           "pass@k is too high", "evaluate"),
    Mutant("evaluate-error-biased", EVALUATE,
           "/ (n - 1) / n)", "/ n / n)",
           "the standard error is too small", "evaluate"),
    Mutant("evaluate-majority-of-nothing", EVALUATE,
           "Counter(answer for answer in answers if answer is not None)", "Counter(answers)",
           "no answer has a vote", "evaluate"),
    Mutant("metrics-norms-add", "grpo_fast/train/metrics/losses.py",
           "return (values.square().sum() / steps).sqrt()",
           "return values.sum() / steps",
           "norms of the pieces of a vector are added", "training"),
    Mutant("metrics-unweighted", METRICS,
           "return (values * weights).sum() / weights.sum().clamp(min=1)", "return values.mean()",
           "a micro-batch of one token counts like one of a thousand", "training"),
    Mutant("metrics-minimum-of-nothing", "grpo_fast/train/metrics/losses.py",
           "torch.stack(filled) if filled else values", "values",
           "a micro-batch without tokens makes ratio/min 0", "training"),
    Mutant("metrics-spread-of-the-batch", "grpo_fast/train/metrics/samples.py",
           "scores.total.double().view(-1, group_size)", "scores.total.double().view(1, -1)",
           "reward_std is that of the whole step", "training"),
    Mutant("prompts-repeat", PROMPTS,
           "        self.consumed += count\n", "",
           "every step asks the first prompts", "training"),
    Mutant("reference-stands", REFERENCE,
           "step % self.config.sync_every", "True",
           "a synced reference is never synced", "training"),
    Mutant("generated-trains-on-tests", GENERATED,
           "        while content in self._not_trained:\n            content = self.draw(rng)\n", "",
           "test prompts are trained on", "data"),
    Mutant("reward-count-after-call", CALLING,
           "_values(result, count)", '_values(result, len(arguments["completions"]))',
           "a function that shortens its list gives everybody the same reward", "rewards"),
    Mutant("causal-lm-pre-hooks", CAUSAL_LM,
           "if layer._forward_pre_hooks or layer._forward_hooks", "if layer._forward_hooks",
           "a hook that changes the head's input is not seen", "causal_lm"),
]  # fmt: skip

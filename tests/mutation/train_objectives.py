"""Bugs planted in what the trainer's objectives add: summed ratios, the exact KL, the reference of
another path, the running baseline, the lecture's model.
"""

from __future__ import annotations

from tests.mutation.mutants import Mutant

RATIOS, ADVANTAGES = (f"grpo_fast/objective/{x}.py" for x in ("ratios", "advantages"))
TERM, ACCUMULATE, BATCH, REFERENCE, BASELINE, LECTURE = (
    f"grpo_fast/{x}.py"
    for x in (
        "train/update/gradients",
        "train/update/gradients",
        "train/update/batch",
        "train/models/reference",
        "objective/baseline",
        "train/models/lecture",
    )
)

MUTANTS = [
    Mutant("objectives-sum-is-mean", RATIOS,
           '"sequence_sum": Tokens.completion_sum', '"sequence_sum": Tokens.completion_mean',
           "the probability ratio of a completion is taken per token", "levels"),
    Mutant("objectives-baseline-equal-groups", ADVANTAGES,
           'WITHOUT_GROUPS = ("rewards", "baseline")', 'WITHOUT_GROUPS = ("rewards",)',
           "equal rewards get no advantage over a constant", "advantages"),
    Mutant("policy-callers-autocast", "grpo_fast/rollout/own/model.py",
           "enabled=on)", "enabled=on or torch.is_autocast_enabled(self.device.type))",
           "a caller's autocast reaches the policy and its self-check", "policy"),
    Mutant("exact-kl-term-temperature", TERM,
           "float(config.temperature)", "1.0",
           "the KL is of another distribution than the one sampled from", "exact_kl_training"),
    Mutant("exact-kl-term-reference-rule", TERM,
           "(config.temperature), ref_head.softcap", "(config.temperature), None",
           "another model's softcap is forgotten", "exact_kl_training"),
    Mutant("exact-kl-term-masked-reference", TERM,
           "TeacherHead(batch.ref_hidden,", "TeacherHead(batch.ref_hidden.flip(0),",
           "rows of the reference beside other tokens", "exact_kl_training"),
    Mutant("distill-coef", TERM,
           "distill.kind, distill.coef", "distill.kind, 1.0",
           "the teacher's weight is 1", "distill"),
    Mutant("distill-task", "grpo_fast/train/update/trainer.py",
           "task * collected.advantages", "collected.advantages",
           "rewards have their whole weight beside a teacher", "distill"),
    Mutant("distill-advantage-sign", "grpo_fast/train/update/precompute.py",
           "coef * (ref - old)", "coef * (old - ref)",
           "the student is driven away from its teacher", "distill"),
    Mutant("exact-kl-term-beta", TERM,
           "EXACT[config.kl_estimator], config.beta", "EXACT[config.kl_estimator], 1.0",
           "β is 1", "exact_kl_training"),
    Mutant("exact-kl-packed-again", BATCH,
           '"ref_logps", "ref_hidden", "teacher"', '"ref_logps", "teacher"',
           "after a smaller budget the reference's rows are gone", "exact_kl_training"),
    Mutant("reference-adapter-stays-on", REFERENCE,
           "nullcontext() if self.copy is not None else self.policy.without_adapter()",
           "nullcontext()", "LoRA's reference is the policy itself", "exact_kl_training"),
    Mutant("reference-path-ignored", REFERENCE,
           "if another is None and config.kind", "if config.kind",
           "the policy's own start in place of the model asked for", "exact_kl_training"),
    Mutant("reference-vocabulary-by-size", REFERENCE,
           "require(ours == theirs,", "require(len(ours) == len(theirs),",
           "tokens of the same number with other ids", "exact_kl_training"),
    Mutant("baseline-sees-its-own-step", "grpo_fast/train/collect/collector.py",
           "        advantages = self.advantages.of(chosen.scores, chosen.rollout.lengths)\n        self.advantages.observe(drawn.scores.total)\n", "        self.advantages.observe(drawn.scores.total)\n        advantages = self.advantages.of(chosen.scores, chosen.rollout.lengths)\n", "the rewards of a step are part of their own baseline", "baseline"),
    Mutant("baseline-decay-side", BASELINE,
           "self.decay * self.mean + (1 - self.decay) * mean", "(1 - self.decay) * self.mean + self.decay * mean",
           "the past weighs what the present should", "baseline"),
    Mutant("baseline-missing-verdict", BASELINE,
           "rewards.double().nanmean()", "rewards.double().nan_to_num().mean()",
           "a completion without a verdict counts as 0", "baseline"),
    Mutant("lecture-autoregressive", LECTURE,
           "x = x * of_prompt", "x = x * 1",
           "the response's tokens are read as if they were the prompt's last", "lecture"),
    Mutant("lecture-place-off-by-one", LECTURE,
           "place = (position_ids + 1 - prompt)", "place = (position_ids - prompt)",
           "the second token is decoded by the first one's matrix", "lecture"),
    Mutant("lecture-padding-moves-positions", LECTURE,
           "position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)",
           "position_ids = position_ids",
           "padding on the left counts as prompt", "lecture"),
    Mutant("lecture-says-padding", LECTURE,
           "NEVER = -100.0", "NEVER = 0.0",
           "padding and end are two more symbols", "lecture"),
]  # fmt: skip

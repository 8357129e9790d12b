"""Bugs planted where the sampler's kept tokens travel into the losses, and where a step's
completions are sampled ahead of it.
"""

from __future__ import annotations

from tests.mutation.mutants import Mutant

FIXED, ACCUMULATE, BATCH, REFERENCE, EXACT, METRICS = (
    f"grpo_fast/{x}.py"
    for x in (
        "train/update/precompute",
        "train/update/gradients",
        "train/update/batch",
        "train/models/reference",
        "train/update/gradients",
        "train/metrics/losses",
    )
)
DATA, SUPPORT = "grpo_fast/train/config/data.py", "grpo_fast/kernels/support.py"
COLLECTOR, TRAINER, STEPS, RUN, PLOT = (
    f"grpo_fast/{x}.py"
    for x in (
        "train/collect/collector",
        "train/update/trainer",
        "train/runs/run",
        "train/config/run",
        "train/experiments/compare_plot",
    )
)
SAMPLER, KEPT = "grpo_fast/rollout/sampler.py", "grpo_fast/rollout/own/decode.py"
MICRO_BATCH = "grpo_fast/train/update/micro_batch.py"

MUTANTS = [
    Mutant("replay-loss-over-all", ACCUMULATE,
           '"support": batch.support,', '"support": None,',
           "the loss is over the whole vocabulary", "replay"),
    Mutant("replay-old-over-all", FIXED,
           "policy.logps(micro.packed, temperature, hidden, micro.support)",
           "policy.logps(micro.packed, temperature, hidden)",
           "old logps are over the whole vocabulary", "replay"),
    Mutant("replay-reference-over-all", REFERENCE,
           "temperature, support=support)", "temperature)",
           "the reference's logps are over the whole vocabulary", "replay"),
    Mutant("replay-order", MICRO_BATCH,
           "kept = [rollout.kept[i] for i in chosen]",
           "kept = [rollout.kept[i] for i in sorted(chosen)]",
           "sets stand beside another completion's tokens", "replay"),
    Mutant("replay-mixed-batch", SUPPORT,
           "if not drawn:", "if len(drawn) < len(sets):",
           "one completion that was not truncated, and none has its sets", "replay"),
    Mutant("replay-unbounded", DATA,
           'if self.wants_kept and "top_k" not in self.model_fields_set:', "if False:",
           "top_p alone keeps nearly the whole vocabulary", "replay"),
    Mutant("replay-off-bounds", DATA,
           'return self.replay_support == "auto" and self.truncates', "return self.truncates",
           "off keeps the sets", "replay"),
    Mutant("replay-forgotten-in-a-checkpoint", STEPS,
           "            step.collected.rollout.check(vocab_size)\n",
           "            step.collected.rollout.kept = [None] * len(step.collected.rollout.texts)\n",
           "a step that is resumed goes on over the whole vocabulary", "checkpoint_kept"),
    Mutant("replay-mass", "grpo_fast/train/metrics/samples.py",
           '"sampling/support_size/max": float(sizes.max())',
           '"sampling/support_size/max": float(sizes.mean())',
           "the largest set is reported as an average one", "replay"),
    Mutant("replay-mass-of-all", SAMPLER,
           "mass = (values.logsumexp(-1) - z.logsumexp(-1)).exp()",
           "mass = (z.logsumexp(-1) - values.logsumexp(-1)).exp()",
           "the kept mass is its inverse", "replay"),
    Mutant("replay-evaluation-keeps", SAMPLER,
           "if not options.wants_kept:", "if not options.truncates:",
           "an evaluation keeps the sets of all its tokens", "replay"),
    Mutant("replay-panel-of-ones", PLOT,
           "abs(value - neutral) > TELLING", "abs(value - neutral) >= 0",
           "every comparison shows a ratio that is 1", "compare"),
    Mutant("ahead-later-weights", "grpo_fast/train/loop.py",
           "    collector.begin_ahead(step.number, step.clock)\n    if step.metrics is not None:\n        return\n    for minibatch in trainer.remaining(step):  # of all passes over the batch\n        trainer.update(step, minibatch)  # hidden → fused loss → clip → optimizer\n        rest(step)\n",
           "    if step.metrics is not None:\n        return\n    for minibatch in trainer.remaining(step):  # of all passes over the batch\n        trainer.update(step, minibatch)  # hidden → fused loss → clip → optimizer\n        rest(step)\n    collector.begin_ahead(step.number, step.clock)\n",
           "what is sampled ahead comes from the weights after the updates", "ahead"),
    Mutant("ahead-same-numbers", COLLECTOR,
           "prompts, (self.seed, step + 1))", "prompts, (self.seed, step))",
           "a step's random numbers are those of the step before", "ahead_bits"),
    Mutant("ahead-not-saved", STEPS,
           "        collector.sampled = state.ahead\n", "",
           "what was sampled ahead is sampled again with newer weights", "ahead"),
    Mutant("ahead-dropped-early", COLLECTOR,
           "        is_idle = ahead is not None",
           "        self.sampled = None\n        is_idle = ahead is not None",
           "a step that is left while it refills has lost what it began with", "ahead"),
    Mutant("ahead-consumes", COLLECTOR,
           "self.queue.next(self.config.prompts_per_step)",
           "self.queue.take(self.config.prompts_per_step)",
           "every other batch of prompts is skipped", "ahead"),
    Mutant("ahead-never-waits", COLLECTOR,
           "        coming, self.coming = self.coming, None\n", "        coming = None\n",
           "what a thread samples is forgotten", "ahead"),
    Mutant("ahead-beyond-the-end", COLLECTOR,
           "step < self.steps", "True",
           "the last step samples for one that never comes", "ahead"),
    Mutant("ahead-any-age", COLLECTOR,
           "if max(ages, default=0) > most:", "if max(ages, default=0) > most + 1:",
           "weights of two steps ago are taken", "ahead"),
    Mutant("ahead-own-share-alone", COLLECTOR,
           "Sampled(join_ranks(own.rollout, self.config.group_size), own.seconds)",
           "Sampled(own.rollout, own.seconds)",
           "a rank trains on what it sampled itself", "ahead_ranks"),
    Mutant("ahead-uncorrected", RUN,
           "yield corrects or not self.rollout.ahead,", "yield True,",
           "older samples are taken for the policy's own", "words"),
]  # fmt: skip

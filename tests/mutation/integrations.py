"""Bugs planted inside other people's trainers, where ranks share a step."""

from __future__ import annotations

from tests.mutation.mutants import Mutant

LIGHTNING, CAUSAL_LM, OPTIONS, ROLLOUTS, REPLAY = (
    f"grpo_fast/integrations/{x}.py"
    for x in ("lightning", "causal_lm", "trl/options", "trl/rollouts", "trl/replay")
)

MUTANTS = [
    Mutant("ranks-tokens-of-all", LIGHTNING,
           '"num_items_in_batch": tokens / ranks', '"num_items_in_batch": tokens',
           "each rank divides by the world's tokens, and DDP by the ranks once more", "ranks"),
    Mutant("ranks-completions-of-one", LIGHTNING,
           "lengths.shape[0] / ranks", 'batch["labels"].shape[0]',
           "each rank divides by its own completions", "ranks"),
    Mutant("ranks-advantages-of-another", LIGHTNING,
           "start = sum(counts[: self.trainer.global_rank])", "start = 0",
           "every rank trains on the advantages of the first one's completions", "ranks"),
    Mutant("ranks-padding-counts", LIGHTNING,
           "[part[:count] for", "[part[:] for", "a rank with fewer completions counts padding", "ranks"),
    Mutant("ranks-metrics-of-one", LIGHTNING,
           "            metrics = metrics_of_ranks(metrics, self.all_gather)", "            pass",
           "what is logged is that of one rank", "ranks"),
    Mutant("ranks-counts-averaged", CAUSAL_LM,
           "        return values.sum()", "        return values.mean()",
           "a count is averaged over ranks", "ranks"),
    Mutant("ranks-means-of-means", CAUSAL_LM,
           "(values * tokens).sum() / tokens.sum().clamp(min=1)", "values.mean()",
           "a rank with few tokens weighs as much as one with many", "ranks"),
    Mutant("ranks-nothing-is-least", CAUSAL_LM,
           "values.masked_fill(nothing & ~nothing.all(), torch.inf)", "values",
           "the minimum is that of a rank without tokens", "ranks"),
    Mutant("trl-tokens-of-all", OPTIONS,
           "share = accumulation / trainer.args.steps_per_generation / trainer.accelerator.num_processes",
           "share = accumulation / trainer.args.steps_per_generation",
           "each rank divides by the world's tokens: TRL's objective takes over", "two_processes"),
    Mutant("trl-turn-forgotten", ROLLOUTS,
           "turn = turn + 1 if known == when else 0", "turn = 0",
           "two generations of a step draw the same tokens", "trl_rollouts"),
    Mutant("trl-process-forgotten", ROLLOUTS,
           "turn, self.accelerator.process_index)", "turn, 0)",
           "all processes draw the same tokens for the same prompts", "trl_rollouts"),
    Mutant("trl-setting-dropped", ROLLOUTS,
           "if not (is_usual or name in READ or name.startswith(\"_\")):", "if False:",
           "a setting that our sampler does not read is dropped", "trl_rollouts"),
    Mutant("trl-generate-passed-by", ROLLOUTS,
           'if any("generate" in vars(x) for x in (model, lm)) or (', "if (",
           "somebody's own generate is not called", "trl_rollouts"),
    Mutant("trl-min-p-forgotten", ROLLOUTS,
           "min_p=config.min_p or 0)", "min_p=0)", "min_p is dropped", "trl_rollouts"),
    Mutant("trl-support-of-another-turn", REPLAY,
           "first = at - (len(tokens) - len(columns))", "first = 0",
           "a later turn's kept sets stand at the first one's tokens", "trl_rollouts"),
    Mutant("trl-evaluation-forgets", ROLLOUTS,
           "self._replay[self._mode] = Replay()",
           'self._replay = {mode: Replay() for mode in ("train", "eval")}',
           "an evaluation forgets what training was drawn from", "trl_rollouts"),
    Mutant("trl-samples-with-dropout", "grpo_fast/rollout/own/model.py",
           "        lm.eval()\n", "", "dropout is on while completions are drawn", "trl_rollouts"),
]  # fmt: skip

"""Bugs planted inside other people's trainers, where ranks share a step."""

from __future__ import annotations

from tests.mutation.mutants import Mutant

LIGHTNING, CAUSAL_LM, OPTIONS = (
    f"grpo_fast/integrations/{x}.py" for x in ("lightning", "causal_lm", "trl/options")
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
]  # fmt: skip

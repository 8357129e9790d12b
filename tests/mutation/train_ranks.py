"""Bugs planted in runs on several processes: what a rank counts alone, keeps to itself, or waits
for.
"""

from __future__ import annotations

from tests.mutation.mutants import Mutant

DISTRIBUTED, SHARES, SHARDING, BATCH, ACCUMULATE, FIXED, METRICS, BUDGET, POLICY, WEIGHTS, LOOP = (
    f"grpo_fast/{x}.py"
    for x in ("train/ranks/distributed", "train/ranks/rollouts", "train/ranks/sharding", "train/update/batch", "train/update/gradients", "train/update/precompute", "train/metrics/losses",
              "train/update/budget", "train/models/policy", "train/update/weights", "train/loop")
)  # fmt: skip
VARIANCE = "grpo_fast/train/update/variance.py"

MUTANTS = [
    Mutant("ranks-gradients-stay", DISTRIBUTED,
           "    plain = [grad for grad in grads if not hasattr(grad, \"full_tensor\")]\n",
           "    plain = []\n",
           "every rank trains by its own gradients", "ranks_mu"),
    Mutant("ranks-gradients-averaged", DISTRIBUTED,
           "dist.all_reduce(grad, async_op=True)",
           "dist.all_reduce(grad.div_(size()), async_op=True)",
           "gradients that are sums are averaged", "ranks_mu"),
    Mutant("ranks-shards-averaged", SHARDING,
           "        sharded.set_gradient_divide_factor(1.0)\n", "",
           "gradients of shards are averaged", "ranks_mu"),
    Mutant("ranks-own-totals", ACCUMULATE,
           "= totals or Totals.of(minibatch)", "= Totals.of(minibatch)",
           "a rank divides its loss by its own tokens", "ranks_mu"),
    Mutant("ranks-local-share", BATCH,
           "len(part), sum(map(len, plans)), trunk", "len(part), len(micro_batches), trunk",
           "token_mean_local averages over a rank's own micro-batches", "ranks_local"),
    Mutant("ranks-idle-counts", BATCH,
           "        nothing = torch.zeros_like(self.completion_mask)\n",
           "        nothing = self.completion_mask\n",
           "an idle micro-batch trains on another rank's completion", "ranks_few"),
    Mutant("ranks-not-in-step", BATCH,
           "        missing = max(map(len, plans)) - len(micro_batches)\n", "        missing = 0\n",
           "ranks make different numbers of micro-batches: with shards they wait for each other",
           "ranks_few"),
    Mutant("ranks-same-numbers", SHARES,
           "engine=engine, places=places,", "engine=engine,",
           "every rank samples with the random numbers of the first prompts", "ranks_mu"),
    Mutant("ranks-order-of-prompts", SHARES,
           "    for theirs, data in said:\n", "    for theirs, data in [*said][::-1]:\n",
           "completions are scored as answers to another rank's prompts", "ranks_mu"),
    Mutant("ranks-values-of-its-own", BATCH,
           "        if self.ranks > 1:\n            like", "        if self.ranks > 9:\n            like",
           "a rank whitens, and deals anew, what it has computed itself", "ranks_ppo"),
    Mutant("ranks-following-values", FIXED,
           "None if following is None else sum_(following)", "following",
           "the values behind cut completions of other ranks are 0", "ranks_ppo"),
    Mutant("ranks-own-metrics", METRICS,
           "        if distributed.size() == 1:\n            return self\n",
           "        return self\n",
           "metrics, and what is led by them, are a rank's own", "ranks_mu"),
    Mutant("ranks-variance", VARIANCE,
           "    for group in range(rank(), count, size())", "    for group in range(rank(), count)",
           "groups of the gradient's variance are counted by several ranks", "ranks_exact"),
    Mutant("ranks-signal-alone", DISTRIBUTED,
           "        mine = error\n", "        raise\n",
           "a rank that gets a signal leaves, and the others wait for it", "ranks_left"),
    Mutant("ranks-left-unsharded", SHARDING,
           "        model.set_reshard_after_forward(True)  # first", "        #",
           "a rollout that is left keeps whole weights on its rank", "ranks_left"),
    Mutant("ranks-moments-of-shards", WEIGHTS,
           "found = whole(value.detach())", "found = getattr(value, '_local_tensor', value).detach()",
           "a checkpoint holds rank 0's part of the moments", "ranks_left"),
    Mutant("ranks-memory-alone", BUDGET,
           "largest = max(tokens for _, tokens in found)", "largest = batch.largest",
           "out of memory leaves the ranks with different micro-batches", "ranks_memory"),
    Mutant("ranks-nobody-named", DISTRIBUTED,
           "        missing = _missing()\n", "        missing = []\n",
           "a rank that is gone is not named", "ranks_ended"),
    Mutant("ranks-replicas-unchecked", DISTRIBUTED,
           "if replicas is not None and count % replicas:", "if replicas is not None and False:",
           "replicas that do not divide the processes", "ranks_refused"),
    Mutant("ranks-not-asked-for", DISTRIBUTED,
           "    if kind is None and count > 1:\n", "    if kind is None and count > 9:\n",
           "torchrun without distributed trains the same model several times", "ranks_refused"),
]  # fmt: skip

"""Rules on what fits together in a `RunConfig`: distillation, the KL term, sharded weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grpo_fast.errors import conflict, wrong
from grpo_fast.objective.kl import EXACT
from grpo_fast.objective.losses import OBJECTIVES

Errors = Iterator[Exception]  # of settings that do not fit; the first one is raised
GAE = "gae"  # advantages of every token, by a critic; the other modes are of a group's rewards


def distill_rules(run: Any) -> Errors:
    if (distill := run.distill) is None:
        return
    loss, reference = run.loss, run.reference
    chosen = f"reference={{kind: {reference.kind}, path: {reference.path}}}"
    own = ("none", None) if distill.asked else ("frozen", distill.teacher)
    if distill.teacher is not None and (reference.kind, reference.path) != own:
        yield conflict(
            chosen, f"distill.teacher={distill.teacher}",
            "the teacher takes the reference's place; leave reference out",
        )  # fmt: skip
    if reference.kind == "none" and not distill.asked:
        yield wrong("distill.teacher", "a teacher, or reference.kind: frozen or synced", "none")
    if distill.asked:
        server = "a teacher's server"
        temperature = float(run.loss_config().temperature)
        if temperature != 1:
            why = "the server's log-probabilities are those at temperature 1"
            yield conflict(f"rollout.temperature={temperature:g}", server, why)
        if run.rollout.wants_kept:
            why = "with top_p or top_k, the server knows nothing of the kept tokens; use off"
            yield conflict("rollout.replay_support=auto", server, why)
        if run.data.task == "traces":
            why = "the server completes prompts; recorded traces have none"
            yield conflict("data.task=traces", server, why)
    if loss.beta:
        why = "distill weighs the divergence by distill.coef; set loss.beta=0"
        yield conflict(f"loss.beta={loss.beta:g}", "distill", why)
    if loss.kl_estimator in EXACT:
        why = "distill computes an exact divergence already; choose an estimator"
        yield conflict(f"loss.kl_estimator={loss.kl_estimator}", "distill", why)
    if run.advantages == GAE:
        why = "distillation adds to the advantages of a group; choose one of those"
        yield conflict(f"advantages={GAE}", "distill", why)


def kl_rules(run: Any) -> Errors:
    loss, kl, has_reference = run.loss, run.kl, run.reference.kind != "none"
    uses = run.loss_config().uses_reference  # raises with the argument's name
    into = "kl.into=reward"
    if kl.into == "reward":
        if run.advantages != GAE:
            why = f"only advantages={GAE} spreads a token's reward; use kl.into=loss"
            yield conflict(into, f"advantages={run.advantages}", why)
        if loss.kl_estimator in EXACT:
            why = "the reward is that of the sampled token; choose an estimator"
            yield conflict(f"loss.kl_estimator={loss.kl_estimator}", into, why)
        for is_own, own in (
            (loss.kl_times_ratio, "loss.kl_times_ratio=true"),
            (not OBJECTIVES[loss.loss_type].reference, f"loss.loss_type={loss.loss_type}"),
        ):
            if is_own:
                yield conflict(into, own, "it has a KL of its own; use kl.into=loss")
        uses = loss.beta != 0
    if (kl.into == "reward" or kl.target is not None) and not (uses and loss.beta > 0):
        setting = into if kl.into == "reward" else f"kl.target={kl.target:g}"
        why = "the KL needs a weight; set loss.beta above 0"
        yield conflict(f"loss.beta={loss.beta:g}", setting, why)
    for is_used, user in (
        (uses, f"loss.beta={loss.beta:g}"),
        (run.max_ref_kl is not None, f"max_ref_kl={run.max_ref_kl}"),
    ):
        if is_used and not has_reference:
            why = "a KL needs a reference; set reference.kind to frozen or synced"
            yield conflict("reference.kind=none", user, why)


def sharding_rules(run: Any) -> Errors:
    if (run.distributed == "hsdp") != (run.distributed_replicas is not None):
        why = "hsdp needs this number, and nothing else reads it"
        came = f"distributed_replicas={run.distributed_replicas}"
        yield conflict(came, f"distributed={run.distributed}", why)
    states = run.optim.states
    for fits, came, why in (
        (not run.log.grad_variance, "log.grad_variance=true", "a rank has a part of each sum"),
        (states == "full", f"optim.states={states}", "they belong to unsharded weights"),
    ):  # fmt: skip
        if run.is_sharded and not fits:
            yield conflict(came, f"distributed={run.distributed}", why)

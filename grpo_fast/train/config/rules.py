"""Rules on what fits together in a `RunConfig`: distillation, the KL term, sharded weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grpo_fast.objective.kl import EXACT
from grpo_fast.objective.losses import OBJECTIVES

Rules = Iterator[tuple[Any, str, str, Any]]  # fits, the setting, what is expected, what came
GAE = "gae"  # advantages of every token, by a critic; the other modes are of a group's rewards


def distill_rules(run: Any) -> Rules:
    if (distill := run.distill) is None:
        return
    came, loss = (run.reference.kind, run.reference.path), run.loss
    own = ("none", None) if distill.asked else ("frozen", distill.teacher)
    fits = distill.teacher is None or came == own
    yield fits, "reference", "none beside distill.teacher", came
    expected = "a teacher, or reference.kind: frozen or synced"
    yield came[0] != "none" or distill.asked, "distill.teacher", expected, "none"
    if distill.asked:
        temperature = float(run.loss_config().temperature)
        expected = "1 beside a teacher's server, whose log-probabilities are those of 1"
        yield temperature == 1, "rollout.temperature", expected, temperature
        expected = "off beside a teacher's server and top_p or top_k"
        yield not run.rollout.wants_kept, "rollout.replay_support", expected, "auto"
        task = run.data.task
        yield task != "traces", "data.task", "prompts beside a teacher's server", task
    expected = "0 beside distill, which weighs the divergence"
    yield not loss.beta, "loss.beta", expected, loss.beta
    fits, expected = loss.kl_estimator not in EXACT, "an estimator beside distill"
    yield fits, "loss.kl_estimator", expected, loss.kl_estimator
    yield run.advantages != GAE, "advantages", "those of a group beside distill", GAE


def kl_rules(run: Any) -> Rules:
    loss, kl, has_reference = run.loss, run.kl, run.reference.kind != "none"
    uses = run.loss_config().uses_reference  # raises with the argument's name
    if kl.into == "reward":
        came = f"reward, {run.advantages}"
        yield run.advantages == GAE, "kl.into", "loss unless advantages: gae", came
        expected = "an estimator, of the sampled tokens, beside kl.into: reward"
        came = loss.kl_estimator
        yield came not in EXACT, "loss.kl_estimator", expected, came
        fits = not loss.kl_times_ratio and OBJECTIVES[loss.loss_type].reference
        expected = "loss for a loss_type or kl_times_ratio with a KL of its own"
        yield fits, "kl.into", expected, "reward"
        uses = loss.beta != 0
    if kl.into == "reward" or kl.target is not None:
        expected = "a weight > 0 of the KL, beside kl.into: reward or a kl.target"
        yield uses and loss.beta > 0, "loss.beta", expected, loss.beta
    expected = "frozen or synced, loss.beta is not 0"
    yield has_reference or not uses, "reference.kind", expected, "none"
    fits = has_reference or run.max_ref_kl is None
    yield fits, "reference.kind", "frozen or synced beside max_ref_kl", "none"


def sharding_rules(run: Any) -> Rules:
    fits = (run.distributed == "hsdp") == (run.distributed_replicas is not None)
    expected = "a number beside distributed: hsdp, and there alone"
    yield fits, "distributed_replicas", expected, run.distributed_replicas
    engine, states = run.rollout.engine, run.optim.states
    for fits, name, expected, came in (
        (not run.log.grad_variance, "log.grad_variance", "false", "true"),
        (engine != "continuous", "rollout.engine", "transformers, or an engine of its own,",
         engine),
        (states == "full", "optim.states", "full", states),
    ):  # fmt: skip
        fits = fits or not run.is_sharded
        yield fits, name, f"{expected} beside sharded weights", came

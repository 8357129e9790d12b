"""The rules of `RunConfig`: which of its settings exclude each other, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from grpo_fast.errors import conflict, wrong
from grpo_fast.objective.advantages import check_group_size, check_options
from grpo_fast.objective.baseline import split_options
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.kl import EXACT
from grpo_fast.objective.losses import OBJECTIVES
from grpo_fast.train.config.base import named_in
from grpo_fast.train.config.loss import LossSettings

Errors = Iterator[Exception]  # of settings that do not fit; the first one is raised
GAE = "gae"  # advantages of every token, by a critic; the other modes are of a group's rewards
NOT_SAMPLED = "recorded rollouts are not sampled"
MOST_COMPLETIONS = 1 << 20


def distill_rules(config: Any) -> Errors:
    if (distill := config.distill) is None:
        return
    loss, reference = config.loss, config.reference
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
        temperature = float(config.loss_config().temperature)
        if temperature != 1:
            why = "the server's log-probabilities are those at temperature 1"
            yield conflict(f"rollout.temperature={temperature:g}", server, why)
        if config.rollout.needs_support:
            why = "with top_p or top_k, the server knows nothing of the kept tokens; use off"
            yield conflict("rollout.replay_support=auto", server, why)
        if config.data.task == "traces":
            why = "the server completes prompts; recorded traces have none"
            yield conflict("data.task=traces", server, why)
    if loss.beta:
        why = "distill weighs the divergence by distill.coef; set loss.beta=0"
        yield conflict(f"loss.beta={loss.beta:g}", "distill", why)
    if loss.kl_estimator in EXACT:
        why = "distill computes an exact divergence already; choose an estimator"
        yield conflict(f"loss.kl_estimator={loss.kl_estimator}", "distill", why)
    if config.advantages == GAE:
        why = "distillation adds to the advantages of a group; choose one of those"
        yield conflict(f"advantages={GAE}", "distill", why)


def advantage_rules(config: Any) -> Errors:
    options = config.advantage_options
    if config.advantages == GAE:
        if options:
            why = "gae has its options in the section critic"
            yield conflict(f"advantage_options={options}", f"advantages={GAE}", why)
        if config.critic is None:
            why = "gae needs a critic; add the section critic={}"
            yield conflict(f"advantages={GAE}", "critic=none", why)
        if config.log.grad_variance:
            why = "a critic's advantages belong to no group"
            yield conflict("log.grad_variance=true", "critic", why)
        return
    if config.critic is not None:
        why = f"only advantages={GAE} reads a critic"
        yield conflict(f"advantages={config.advantages}", "critic", why)
    with named_in("advantage_options"):
        check_options(config.advantages, split_options(config.advantages, options)[0])
    check_group_size(config.advantages, config.rollout.group_size)


def loss_rules(config: Any) -> Errors:
    """Refuse another head rule, corrections without the sampler's logps, logps without any."""
    loss, corrects = config.loss, config.rollout.correct_sampling
    for name in ("softcap", "logit_scale"):
        own = getattr(loss, name)
        if own != getattr(LossConfig, name):
            yield wrong(f"loss.{name}", "none, the model's own is used", own)
    if config.rollout.ahead and not corrects:
        why = "older weights sampled the completions; set rollout.correct_sampling=true"
        yield conflict("rollout.correct_sampling=false", "rollout.ahead=1", why)
    # A saved configuration holds every default: this one beside correct_sampling: false.
    is_default = loss.corrections == LossSettings().corrections
    saved = is_default and "correct_sampling" in config.rollout.model_fields_set
    of_sampler = [x for x in loss.corrections if x.ratio != "current/behaviour"]
    is_read = corrects or saved or "corrections" not in loss.model_fields_set
    if of_sampler and not is_read:
        why = "they read the sampler's logps; set rollout.correct_sampling=true"
        yield conflict("loss.corrections", "rollout.correct_sampling=false", why)
    if corrects and not loss.corrections:
        why = "without corrections the sampler's logps have no use"
        yield conflict("rollout.correct_sampling=true", "loss.corrections=[]", why)


def reward_rules(config: Any) -> Errors:
    """Ask for a weighed reward; with recorded rollouts refuse all that would sample."""
    if config.data.task != "traces":
        if not any(reward.weight for reward in config.rewards):
            none = "0 for all" if config.rewards else "no reward"
            yield wrong("rewards", "a weight that is not 0", none)
        return
    rollout = config.rollout
    for fits, came, why in (
        (not config.rewards, "rewards", "traces have their own rewards"),
        (config.advantages != "gdpo", "advantages=gdpo", "traces have one reward"),
        (config.loss.aggregation != "prompt_mean", "loss.aggregation=prompt_mean",
         "the branches of a task differ in number"),
        (not rollout.ahead, f"rollout.ahead={rollout.ahead}", NOT_SAMPLED),
        (rollout.dynamic is None, "rollout.dynamic", NOT_SAMPLED),
        (config.critic is None, "critic", "a critic reads whole completions"),
        (config.warm_start is None, "warm_start", "traces have no gold solutions"),
        (not config.log.grad_variance, "log.grad_variance=true",
         "the branches of a task differ in number"),
        (config.minibatches == 1, f"minibatches={config.minibatches}",
         "the branches of a step differ in number"),
        (config.shuffle == "off", f"shuffle={config.shuffle}", "there is one minibatch"),
    ):  # fmt: skip
        if not fits:
            yield conflict(came, "data.task=traces", why)


def sampling_rules(config: Any) -> Errors:
    dynamic, size, samples = config.rollout.dynamic, config.rollout.group_size, config.eval.samples
    if dynamic is not None:
        labels = [reward.label or reward.name.rpartition(":")[2] for reward in config.rewards]
        judge = dynamic.judged_by
        if judge not in (None, *labels):
            expected = f"one of the rewards {', '.join(labels)}"
            yield wrong("rollout.dynamic.judged_by", expected, repr(judge))
        if size < 2:
            why = "a group of one has no spread of rewards; use at least 2"
            yield conflict(f"rollout.group_size={size}", "rollout.dynamic", why)
    if max(config.eval.k, default=1) > samples:
        yield wrong("eval.k", f"values up to eval.samples = {samples}", config.eval.k)


def kl_rules(config: Any) -> Errors:
    loss, kl, has_reference = config.loss, config.kl, config.reference.kind != "none"
    uses = config.loss_config().uses_reference  # raises with the argument's name
    into = "kl.into=reward"
    if kl.into == "reward":
        if config.advantages != GAE:
            why = f"only advantages={GAE} spreads a token's reward; use kl.into=loss"
            yield conflict(into, f"advantages={config.advantages}", why)
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
        (config.max_ref_kl is not None, f"max_ref_kl={config.max_ref_kl}"),
    ):
        if is_used and not has_reference:
            why = "a KL needs a reference; set reference.kind to frozen or synced"
            yield conflict("reference.kind=none", user, why)


def sharding_rules(config: Any) -> Errors:
    if (config.distributed == "hsdp") != (config.distributed_replicas is not None):
        why = "hsdp needs this number, and nothing else reads it"
        came = f"distributed_replicas={config.distributed_replicas}"
        yield conflict(came, f"distributed={config.distributed}", why)
    states = config.optim.states
    for fits, came, why in (
        (not config.log.grad_variance, "log.grad_variance=true", "a rank has a part of each sum"),
        (states == "full", f"optim.states={states}", "they belong to unsharded weights"),
    ):  # fmt: skip
        if config.is_sharded and not fits:
            yield conflict(came, f"distributed={config.distributed}", why)


def step_rules(config: Any) -> Errors:
    completions = config.rollout.prompts_per_step * config.rollout.group_size
    states = config.optim.states
    if config.checkpoint.every and states != "full":
        why = "a checkpoint cannot hold these states; use full"
        yield conflict(f"optim.states={states}", "checkpoint.every", why)
    if config.reference.kind == "synced" and config.model.lora is not None:
        why = "the reference is the model without its adapter; use frozen"
        yield conflict("reference.kind=synced", "model.lora", why)
    if completions % config.minibatches:
        expected = f"a number that divides the {completions} completions of a step"
        yield wrong("minibatches", expected, config.minibatches)
    if completions > MOST_COMPLETIONS:
        expected = f"at most {MOST_COMPLETIONS} completions in a step, prompts times group size"
        yield wrong("rollout.group_size", expected, completions)


RULES: tuple[Callable[[Any], Errors], ...] = (
    distill_rules, advantage_rules, loss_rules, reward_rules,
    sampling_rules, kl_rules, sharding_rules, step_rules,
)  # fmt: skip

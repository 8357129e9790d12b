"""Rules of `RunConfig` that reject incompatible settings.

Each function yields pairs of a condition and a message. `RunConfig` raises a ValueError with the
first message whose condition is true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from grpo_fast.objective.advantages import check_group_size, check_options
from grpo_fast.objective.baseline import split_options
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.kl import EXACT
from grpo_fast.objective.losses import OBJECTIVES
from grpo_fast.train.config.base import named_in

Rules = Iterator[tuple[object, str]]
GAE = "gae"  # the mode in which a critic provides advantages per token
MOST_COMPLETIONS = 1 << 20  # largest number of completions in one step


def distill_rules(config: Any) -> Rules:
    if config.distill is None:
        return
    distill, loss, reference = config.distill, config.loss, config.reference
    chosen = (reference.kind, reference.path)
    expected = ("none", None) if distill.server else ("frozen", distill.teacher)
    yield (
        distill.teacher is not None and chosen != expected,
        f"reference={{kind: {chosen[0]}, path: {chosen[1]}}} conflicts with "
        f"distill.teacher={distill.teacher}: the teacher replaces it; leave reference out",
    )
    yield (
        reference.kind == "none" and not distill.server,
        "distill.teacher: expected a teacher, or reference.kind: frozen or synced, got none",
    )
    if distill.server:
        server = "conflicts with a teacher's server: the server"
        temperature = float(config.loss_config().temperature)
        yield (
            temperature != 1,
            f"rollout.temperature={temperature:g} {server} computes at temperature 1",
        )
        yield (
            config.rollout.needs_support,
            f"rollout.replay_support=auto {server} computes over all tokens; use off",
        )
        yield (
            config.data.task == "traces",
            f"data.task=traces {server} completes prompts, which traces do not have",
        )
    yield (
        loss.beta,
        f"loss.beta={loss.beta:g} conflicts with distill: "
        "distill.coef is the weight of the divergence; set loss.beta=0",
    )
    yield (
        loss.kl_estimator in EXACT,
        f"loss.kl_estimator={loss.kl_estimator} conflicts with "
        "distill: it computes an exact divergence already; choose an estimator",
    )
    yield (
        config.advantages == GAE,
        f"advantages={GAE} conflicts with distill: "
        "it adds to the advantages of a group; choose one of those",
    )


def advantage_rules(config: Any) -> Rules:
    mode, options = config.advantages, config.advantage_options
    if mode == GAE:
        yield (
            options,
            f"advantage_options={options} conflicts with advantages={GAE}: "
            "the options of gae are in the section critic",
        )
        yield (
            config.critic is None,
            f"advantages={GAE} conflicts with critic=none: "
            "gae needs a critic; add the section critic={}",
        )
        yield (
            config.log.grad_variance,
            "log.grad_variance=true conflicts with critic: "
            "a critic's advantages belong to no group",
        )
        return
    yield (
        config.critic is not None,
        f"advantages={mode} conflicts with critic: only advantages={GAE} reads a critic",
    )
    with named_in("advantage_options"):
        check_options(mode, split_options(mode, options)[0])
    check_group_size(mode, config.rollout.group_size)


def correction_rules(config: Any) -> Rules:
    corrects = config.rollout.correct_sampling
    corrections = config.loss_config().corrections
    yield (
        config.rollout.ahead and not corrects,
        "rollout.correct_sampling=false conflicts with rollout.ahead=1: older weights sampled "
        "the completions; set rollout.correct_sampling=true",
    )
    # A saved configuration contains every default, including corrections that the user did not
    # choose. Do not treat the default corrections as a choice.
    is_default = corrections == LossConfig.corrections
    saved = is_default and "correct_sampling" in config.rollout.model_fields_set
    is_read = corrects or saved or "corrections" not in config.loss.model_fields_set
    of_sampler = any(each.ratio != "current/behaviour" for each in corrections)
    yield (
        of_sampler and not is_read,
        "loss.corrections conflicts with rollout.correct_sampling=false: they read the "
        "sampler's log-probabilities; set rollout.correct_sampling=true",
    )
    yield (
        corrects and not corrections,
        "rollout.correct_sampling=true conflicts with loss.corrections=[]: "
        "without corrections the sampler's log-probabilities have no use",
    )


def reward_rules(config: Any) -> Rules:
    """Require a reward with a nonzero weight. For recorded rollouts, reject sampling settings."""
    rollout, minibatches, shuffle = config.rollout, config.minibatches, config.shuffle
    if config.data.task != "traces":
        none = "0 for all" if config.rewards else "no reward"
        yield (
            not any(reward.weight for reward in config.rewards),
            f"rewards: expected a weight that is not 0, got {none}",
        )
        return
    number = "the branches of a task differ in number"
    for excluded, setting, why in (
        (config.rewards, "rewards", "traces have their own rewards"),
        (config.advantages == "gdpo", "advantages=gdpo", "traces have one reward"),
        (config.loss.aggregation == "prompt_mean", "loss.aggregation=prompt_mean", number),
        (rollout.ahead, f"rollout.ahead={rollout.ahead}", "recorded rollouts are not sampled"),
        (rollout.dynamic is not None, "rollout.dynamic", "recorded rollouts are not sampled"),
        (config.critic is not None, "critic", "a critic reads complete completions"),
        (config.warm_start is not None, "warm_start", "traces have no gold solutions"),
        (config.log.grad_variance, "log.grad_variance=true", number),
        (minibatches != 1, f"minibatches={minibatches}", number),
        (shuffle != "off", f"shuffle={shuffle}", "a step has one minibatch"),
    ):
        yield excluded, f"{setting} conflicts with data.task=traces: {why}"


def sampling_rules(config: Any) -> Rules:
    dynamic, size, samples = config.rollout.dynamic, config.rollout.group_size, config.eval.samples
    if dynamic is not None:
        labels = [reward.label or reward.name.rpartition(":")[2] for reward in config.rewards]
        yield (
            dynamic.judged_by not in (None, *labels),
            "rollout.dynamic.judged_by: expected one "
            f"of the rewards {', '.join(labels)}, got {dynamic.judged_by!r}",
        )
        yield (
            size < 2,
            f"rollout.group_size={size} conflicts with rollout.dynamic: "
            "a group of one has no spread of rewards; use at least 2",
        )
    yield (
        max(config.eval.k, default=1) > samples,
        f"eval.k: expected values up to eval.samples = {samples}, got {config.eval.k}",
    )


def kl_rules(config: Any) -> Rules:
    loss, target = config.loss, config.kl.target
    in_reward = config.kl.into == "reward"
    uses = loss.beta != 0 if in_reward else config.loss_config().uses_reference
    if in_reward:
        yield (
            config.advantages != GAE,
            f"kl.into=reward conflicts with advantages="
            f"{config.advantages}: only {GAE} spreads a token's reward; use kl.into=loss",
        )
        yield (
            loss.kl_estimator in EXACT,
            f"loss.kl_estimator={loss.kl_estimator} conflicts with "
            "kl.into=reward: the reward belongs to the sampled token; choose an estimator",
        )
        for excluded, setting in (
            (loss.options.get("kl_times_ratio"), "loss.kl_times_ratio=true"),
            (not OBJECTIVES[loss.loss_type].reference, f"loss.loss_type={loss.loss_type}"),
        ):
            yield (
                excluded,
                f"kl.into=reward conflicts with {setting}: it has a different KL; use kl.into=loss",
            )
    setting = "kl.into=reward" if in_reward or target is None else f"kl.target={target:g}"
    yield (
        (in_reward or target is not None) and not (uses and loss.beta > 0),
        f"loss.beta={loss.beta:g} conflicts with {setting}: "
        "the KL needs a weight; set loss.beta above 0",
    )
    yield (
        uses and config.reference.kind == "none",
        f"reference.kind=none conflicts with loss.beta={loss.beta:g}: "
        "a KL needs a reference; set reference.kind to frozen or synced",
    )


def sharding_rules(config: Any) -> Rules:
    replicas, states = config.distributed_replicas, config.optim.states
    distributed = f"distributed={config.distributed}"
    yield (
        (config.distributed == "hsdp") != (replicas is not None),
        f"distributed_replicas={replicas} conflicts with {distributed}: "
        "hsdp needs this number, and nothing else reads it",
    )
    yield (
        config.is_sharded and config.log.grad_variance,
        f"log.grad_variance=true conflicts with {distributed}: a rank has a part of each sum",
    )
    yield (
        config.is_sharded and states != "full",
        f"optim.states={states} conflicts with {distributed}: they need unsharded weights",
    )


def step_rules(config: Any) -> Rules:
    completions = config.rollout.prompts_per_step * config.rollout.group_size
    minibatches, states = config.minibatches, config.optim.states
    yield (
        config.checkpoint.every and states != "full",
        f"optim.states={states} conflicts with "
        "checkpoint.every: a checkpoint cannot hold these states; use full",
    )
    yield (
        config.reference.kind == "synced" and config.model.lora is not None,
        "reference.kind=synced conflicts with model.lora: "
        "the reference is the model without its adapter; use frozen",
    )
    yield (
        completions % minibatches,
        "minibatches: expected a number that divides "
        f"the {completions} completions of a step, got {minibatches}",
    )
    yield (
        completions > MOST_COMPLETIONS,
        f"rollout.group_size: expected at most "
        f"{MOST_COMPLETIONS} completions in a step, prompts times group size, got {completions}",
    )


RULES: tuple[Callable[[Any], Rules], ...] = (
    distill_rules, advantage_rules, correction_rules, reward_rules,
    sampling_rules, kl_rules, sharding_rules, step_rules,
)  # fmt: skip

"""Rules of `RunConfig` that reject incompatible settings.

Each function yields pairs of a condition and an error. `RunConfig` raises the first error whose
condition is true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from grpo_fast.errors import argument_error, conflict
from grpo_fast.objective.advantages import check_group_size, check_options
from grpo_fast.objective.baseline import split_options
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.kl import EXACT
from grpo_fast.objective.losses import OBJECTIVES
from grpo_fast.train.config.base import named_in

Rules = Iterator[tuple[object, Exception]]
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
        conflict(
            f"reference={{kind: {chosen[0]}, path: {chosen[1]}}}",
            f"distill.teacher={distill.teacher}",
            "the teacher replaces it; leave reference out",
        ),
    )
    yield (
        reference.kind == "none" and not distill.server,
        argument_error("distill.teacher", "a teacher, or reference.kind: frozen or synced", "none"),
    )
    if distill.server:
        temperature = float(config.loss_config().temperature)
        for excluded, setting, why in (
            (temperature != 1, f"rollout.temperature={temperature:g}",
             "the server computes at temperature 1"),
            (config.rollout.needs_support, "rollout.replay_support=auto",
             "the server computes over all tokens; use off"),
            (config.data.task == "traces", "data.task=traces",
             "the server completes prompts, which traces do not have"),
        ):  # fmt: skip
            yield excluded, conflict(setting, "a teacher's server", why)
    for excluded, setting, why in (
        (loss.beta, f"loss.beta={loss.beta:g}",
         "distill.coef is the weight of the divergence; set loss.beta=0"),
        (loss.kl_estimator in EXACT, f"loss.kl_estimator={loss.kl_estimator}",
         "it computes an exact divergence already; choose an estimator"),
        (config.advantages == GAE, f"advantages={GAE}",
         "it adds to the advantages of a group; choose one of those"),
    ):  # fmt: skip
        yield excluded, conflict(setting, "distill", why)


def advantage_rules(config: Any) -> Rules:
    mode, options = config.advantages, config.advantage_options
    if mode == GAE:
        yield (
            options,
            conflict(
                f"advantage_options={options}",
                f"advantages={GAE}",
                "the options of gae are in the section critic",
            ),
        )
        yield (
            config.critic is None,
            conflict(
                f"advantages={GAE}", "critic=none", "gae needs a critic; add the section critic={}"
            ),
        )
        yield (
            config.log.grad_variance,
            conflict(
                "log.grad_variance=true", "critic", "a critic's advantages belong to no group"
            ),
        )
        return
    yield (
        config.critic is not None,
        conflict(f"advantages={mode}", "critic", f"only advantages={GAE} reads a critic"),
    )
    with named_in("advantage_options"):
        check_options(mode, split_options(mode, options)[0])
    check_group_size(mode, config.rollout.group_size)


def correction_rules(config: Any) -> Rules:
    corrects = config.rollout.correct_sampling
    corrections = config.loss_config().corrections
    yield (
        config.rollout.ahead and not corrects,
        conflict(
            "rollout.correct_sampling=false",
            "rollout.ahead=1",
            "older weights sampled the completions; set rollout.correct_sampling=true",
        ),
    )
    # A saved configuration contains every default, including corrections that the user did not
    # choose. Do not treat the default corrections as a choice.
    is_default = corrections == LossConfig.corrections
    saved = is_default and "correct_sampling" in config.rollout.model_fields_set
    is_read = corrects or saved or "corrections" not in config.loss.model_fields_set
    of_sampler = any(each.ratio != "current/behaviour" for each in corrections)
    yield (
        of_sampler and not is_read,
        conflict(
            "loss.corrections",
            "rollout.correct_sampling=false",
            "they read the sampler's log-probabilities; set rollout.correct_sampling=true",
        ),
    )
    yield (
        corrects and not corrections,
        conflict(
            "rollout.correct_sampling=true",
            "loss.corrections=[]",
            "without corrections the sampler's log-probabilities have no use",
        ),
    )


def reward_rules(config: Any) -> Rules:
    """Require a reward with a nonzero weight. For recorded rollouts, reject sampling settings."""
    rollout, minibatches, shuffle = config.rollout, config.minibatches, config.shuffle
    if config.data.task != "traces":
        none = "0 for all" if config.rewards else "no reward"
        yield (
            not any(reward.weight for reward in config.rewards),
            argument_error("rewards", "a weight that is not 0", none),
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
        yield excluded, conflict(setting, "data.task=traces", why)


def sampling_rules(config: Any) -> Rules:
    dynamic, size, samples = config.rollout.dynamic, config.rollout.group_size, config.eval.samples
    if dynamic is not None:
        labels = [reward.label or reward.name.rpartition(":")[2] for reward in config.rewards]
        yield (
            dynamic.judged_by not in (None, *labels),
            argument_error(
                "rollout.dynamic.judged_by",
                f"one of the rewards {', '.join(labels)}",
                repr(dynamic.judged_by),
            ),
        )
        yield (
            size < 2,
            conflict(
                f"rollout.group_size={size}",
                "rollout.dynamic",
                "a group of one has no spread of rewards; use at least 2",
            ),
        )
    yield (
        max(config.eval.k, default=1) > samples,
        argument_error("eval.k", f"values up to eval.samples = {samples}", config.eval.k),
    )


def kl_rules(config: Any) -> Rules:
    loss, target = config.loss, config.kl.target
    in_reward = config.kl.into == "reward"
    uses = loss.beta != 0 if in_reward else config.loss_config().uses_reference
    if in_reward:
        yield (
            config.advantages != GAE,
            conflict(
                "kl.into=reward",
                f"advantages={config.advantages}",
                f"only {GAE} spreads a token's reward; use kl.into=loss",
            ),
        )
        yield (
            loss.kl_estimator in EXACT,
            conflict(
                f"loss.kl_estimator={loss.kl_estimator}",
                "kl.into=reward",
                "the reward belongs to the sampled token; choose an estimator",
            ),
        )
        for excluded, setting in (
            (loss.options.get("kl_times_ratio"), "loss.kl_times_ratio=true"),
            (not OBJECTIVES[loss.loss_type].reference, f"loss.loss_type={loss.loss_type}"),
        ):
            yield (
                excluded,
                conflict("kl.into=reward", setting, "it has a different KL; use kl.into=loss"),
            )
    setting = "kl.into=reward" if in_reward or target is None else f"kl.target={target:g}"
    yield (
        (in_reward or target is not None) and not (uses and loss.beta > 0),
        conflict(
            f"loss.beta={loss.beta:g}", setting, "the KL needs a weight; set loss.beta above 0"
        ),
    )
    yield (
        uses and config.reference.kind == "none",
        conflict(
            "reference.kind=none",
            f"loss.beta={loss.beta:g}",
            "a KL needs a reference; set reference.kind to frozen or synced",
        ),
    )


def sharding_rules(config: Any) -> Rules:
    replicas, states = config.distributed_replicas, config.optim.states
    distributed = f"distributed={config.distributed}"
    yield (
        (config.distributed == "hsdp") != (replicas is not None),
        conflict(
            f"distributed_replicas={replicas}",
            f"{distributed}",
            "hsdp needs this number, and nothing else reads it",
        ),
    )
    yield (
        config.is_sharded and config.log.grad_variance,
        conflict("log.grad_variance=true", f"{distributed}", "a rank has a part of each sum"),
    )
    yield (
        config.is_sharded and states != "full",
        conflict(f"optim.states={states}", f"{distributed}", "they need unsharded weights"),
    )


def step_rules(config: Any) -> Rules:
    completions = config.rollout.prompts_per_step * config.rollout.group_size
    minibatches, states = config.minibatches, config.optim.states
    yield (
        config.checkpoint.every and states != "full",
        conflict(
            f"optim.states={states}",
            "checkpoint.every",
            "a checkpoint cannot hold these states; use full",
        ),
    )
    yield (
        config.reference.kind == "synced" and config.model.lora is not None,
        conflict(
            "reference.kind=synced",
            "model.lora",
            "the reference is the model without its adapter; use frozen",
        ),
    )
    yield (
        completions % minibatches,
        argument_error(
            "minibatches",
            f"a number that divides the {completions} completions of a step",
            f"{minibatches}",
        ),
    )
    yield (
        completions > MOST_COMPLETIONS,
        argument_error(
            "rollout.group_size",
            f"at most {MOST_COMPLETIONS} completions in a step, prompts times group size",
            f"{completions}",
        ),
    )


RULES: tuple[Callable[[Any], Rules], ...] = (
    distill_rules, advantage_rules, correction_rules, reward_rules,
    sampling_rules, kl_rules, sharding_rules, step_rules,
)  # fmt: skip

"""Checks that reject contradictory settings of a run, and settings that would fail late."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from pydantic import BaseModel

from grpo_fast.errors import conflict, require
from grpo_fast.objective.advantages import check_group_size, check_options
from grpo_fast.objective.baseline import split_options
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.losses import OBJECTIVES
from grpo_fast.train.config.base import named_in

GAE = "gae"  # value of `advantages` for which a critic provides an advantage for each token
MOST_COMPLETIONS = 1 << 20  # maximum number of completions in one step
# Conditions that select the losses in which beta does not weight a KL to the reference.
NO_KL = [f"loss.loss_type={name}" for name, loss in OBJECTIVES.items() if not loss.reference]
# Each row has two conditions that must not both be true, and the reason why. The conditions
# `key=pattern` and `key!=pattern` compare the value of a key with a pattern such as exact*. The
# condition `key` is true if the value is not null, false, 0 or empty.
CONFLICTS = (
    ("model.path=null", "model.config=null", "name a model: model=PATH"),
    ("model.path", "model.config", "keep one; model=PATH replaces a recipe's config"),
    ("model.config", "model.tokenizer=null", "a new model needs a tokenizer: bpe or symbols"),
    ("advantages=gae", "critic=null", "gae needs a critic; add the section critic={}"),
    ("advantages=gae", "advantage_options", "the options of gae are in the section critic"),
    ("advantages!=gae", "critic", "only advantages=gae reads a critic"),
    ("critic.kind=shared", "critic.path", "only kind: model loads a separate model"),
    ("critic", "log.grad_variance", "a critic's advantages belong to no group"),
    ("kl.into=reward", "advantages!=gae", "only gae spreads a token's reward; use kl.into=loss"),
    ("kl.into=reward", "loss.beta=0", "the KL needs a weight; set loss.beta above 0"),
    ("kl.into=reward", "loss.kl_estimator=exact*", "the reward is of the sampled token"),
    ("kl.into=reward", "loss.kl_times_ratio", "the reward has no ratio; use kl.into=loss"),
    *(("kl.into=reward", loss, "this loss has a different KL; use kl.into=loss") for loss in NO_KL),
    *(("kl.target", loss, "beta is no weight of a KL in this loss") for loss in NO_KL),
    ("kl.target", "loss.beta=0", "the KL needs a weight; set loss.beta above 0"),
    ("reference.path", "reference.kind!=frozen", "only kind: frozen loads a model from a path"),
    ("reference.kind=synced", "model.lora", "the reference is the model without its adapter"),
    ("rollout.dynamic", "rollout.group_size=1", "a group of one has no spread of rewards"),
    ("rollout.ahead", "rollout.correct_sampling=false", "older weights sampled the completions"),
    ("rollout.correct_sampling", "loss.corrections=null", "without corrections it has no use"),
    ("rollout.engine=vllm-server", "rollout.vllm.urls=null", "name at least one server"),
    ("rollout.engine!=vllm-server", "rollout.vllm.urls", "only engine vllm-server reads them"),
    ("distributed=hsdp", "distributed_replicas=null", "hsdp needs this number"),
    ("distributed!=hsdp", "distributed_replicas", "only hsdp reads it"),
    ("distributed=*sdp*", "log.grad_variance", "a rank has a part of each sum"),
)


def check_conflicts(config: Any) -> None:
    """Raise a ValueError for the first row of CONFLICTS whose two conditions are both true.

    Args:
        config: the `RunConfig`.
    """
    for first, second, why in CONFLICTS:
        left = _setting_if_true(config, first)
        right = _setting_if_true(config, second)
        if left and right:
            raise conflict(left, right, why)


def _setting_if_true(config: Any, condition: str) -> str:
    """Return the setting that a condition names as `key=value`, or "" if the condition is false.

    If the value is a section, a list or a mapping, only the key is returned.
    """
    left, equals, pattern = condition.partition("=")
    key = left.rstrip("!")
    value = config
    for part in key.split("."):
        value = getattr(value, part, None)  # None if a section is null
    text = f"{value:g}" if isinstance(value, float) else str(value).lower()
    if value is None or value in ([], {}):
        text = "null"
    is_true = text not in ("null", "false", "0")
    if equals:
        is_true = fnmatchcase(text, pattern) != left.endswith("!")
    shown = key if isinstance(value, (BaseModel, list, dict)) else f"{key}={text}"
    return shown if is_true else ""


def check_numbers(config: Any) -> None:
    """Raise a ValueError for invalid combinations of settings that CONFLICTS cannot express.

    Args:
        config: the `RunConfig`.
    """
    mode = config.advantages
    rollout = config.rollout
    if mode != GAE:
        with named_in("advantage_options"):
            check_options(mode, split_options(mode, config.advantage_options)[0])
        check_group_size(mode, rollout.group_size)
    came = "0 for all" if config.rewards else "no reward"
    fits = any(reward.weight for reward in config.rewards)
    require(fits, "rewards", "a weight that is not 0", came)
    loss = config.loss_config()
    reference = config.reference
    if reference.kind == "none":
        why = "set reference.kind to frozen or synced"
        if loss.uses_reference or config.kl.into == "reward":
            raise conflict("reference.kind=none", f"loss.beta={config.loss.beta:g}", why)
    of_sampler = any(each.ratio != "current/behaviour" for each in loss.corrections)
    if of_sampler and loss.corrections != LossConfig.corrections and not rollout.correct_sampling:
        why = "they read the sampler's log-probabilities; set rollout.correct_sampling=true"
        raise conflict("loss.corrections", "rollout.correct_sampling=false", why)
    if rollout.dynamic is not None:
        labels = [reward.label or reward.name.rpartition(":")[2] for reward in config.rewards]
        judge = rollout.dynamic.judged_by
        expected = f"one of the rewards {', '.join(labels)}"
        require(judge in (None, *labels), "rollout.dynamic.judged_by", expected, repr(judge))
    most = config.eval.samples
    fits = max(config.eval.k, default=1) <= most
    require(fits, "eval.k", f"values up to eval.samples = {most}", config.eval.k)
    count = rollout.prompts_per_step * rollout.group_size
    expected = f"a number that divides the {count} completions of a step"
    require(count % config.minibatches == 0, "minibatches", expected, config.minibatches)
    expected = f"at most {MOST_COMPLETIONS} completions in a step, prompts times group size"
    require(count <= MOST_COMPLETIONS, "rollout.group_size", expected, count)

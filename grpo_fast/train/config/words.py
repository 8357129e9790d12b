"""Words `key=value`: set in plain settings, validated, and refused in a sentence that names the
nearest key or value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from grpo_fast.data import is_local
from grpo_fast.train.config.base import members, require, reward_sections
from grpo_fast.train.config.plain import read_yaml

QUOTED = 200  # characters of a value in a message
DEEPEST_KEY = 16  # parts of a dotted key

Config = TypeVar("Config", bound=BaseModel)

# Our keys, and the keys of TRL, verl, OpenRLHF and transformers for the same setting.
_THEIRS = {
    "advantages": "scale_rewards", "checkpoint.every": "save_steps",
    "checkpoint.keep": "save_total_limit", "data.name": "dataset_name", "data.path": "dataset",
    "data.template_kwargs": "chat_template_kwargs",
    "eval.every": "eval_every eval_steps eval_strategy",
    "inner_iterations": "num_iterations ppo_epochs", "log.completions_every": "logging_steps",
    "log.trackers": "report_to", "log.trackers=[tensorboard]": "tensorboard",
    "log.trackers=[trackio]": "trackio", "log.trackers=[wandb]": "wandb",
    "loss.beta": "init_kl_coef kl_coef", "loss.epsilon_low": "epsilon",
    "minibatches": "mini_batch_size ppo_mini_batch_size steps_per_generation",
    "model.autocast=bfloat16": "bf16", "model.autocast=float16": "fp16", "model.lora": "use_peft",
    "model.lora.alpha": "lora_alpha", "model.lora.r": "lora_r lora_rank",
    "model.path": "model_name_or_path", "optim.lr": "learning_rate",
    "optim.schedule": "lr_scheduler_type", "optim.warmup": "warmup_steps",
    "output_dir": "logging_dir", "reference.kind": "sync_ref_model",
    "reference.mixing": "ref_model_mixup_alpha", "reference.sync_every": "ref_model_sync_steps",
    "rewards": "reward_funcs reward_function", "rewards.0.weight": "reward_weights",
    "rollout": "actor_rollout_ref", "rollout.engine=vllm": "use_vllm",
    "rollout.group_size": "n_samples_per_prompt num_generations",
    "rollout.mask_truncated": "mask_truncated_completions",
    "rollout.max_new_tokens": "max_completion_length max_response_length max_tokens",
    "rollout.prompts_per_step":
        "gradient_accumulation_steps per_device_train_batch_size train_batch_size",
    "steps": "max_steps num_train_epochs",
    "tokens_per_microbatch": "micro_train_batch_size ppo_micro_batch_size_per_gpu",
}  # fmt: skip
ELSEWHERE = {theirs: ours for ours, names in _THEIRS.items() for theirs in names.split()}


# ----------------------------------------------------------------------------------------- words
def read_words(
    kind: type[Config],
    words: Iterable[str],
    settings: dict[str, Any] | None = None,
    also: Iterable[str] = (),
) -> Config:
    """Settings of a kind: plain ones, changed in place by words ``key=value``.

    Keys are dotted (``optim.lr=1e-4``, ``rewards.0.weight=2``); values are read as YAML; the last
    of two words with one key counts. `also` are keys that the command has beside those of `kind`.

    Raises ValueError for a word of another form, an unknown key, or a value that does not fit.
    """
    settings = {} if settings is None else settings
    for word in words:
        apply_word(settings, word)
    return validated(kind, settings, also=also)


def own_words(kind: type[Config], words: Sequence[str]) -> tuple[Config, list[str]]:
    """Split words into the settings of a command itself, and the words about other things."""
    own = [word for word in words if split_word(word)[0] in kind.model_fields]
    return read_words(kind, own), [word for word in words if word not in own]


def split_word(word: str) -> tuple[str, str]:
    """`key=text` → key, text. Raises ValueError, quoting the word, for anything else."""
    key, equals, text = word.partition("=")
    parts = key.split(".")
    fits = equals and all(parts) and len(parts) <= DEEPEST_KEY and key.isprintable()
    require(fits, "settings", "key=value", quoted(word))
    return key, text


def grid_values(word: str) -> tuple[str, list[str]]:
    """`key=a,b` → key, [a, b]. Brackets, braces and quotes keep their commas."""
    key, text = split_word(word)
    try:
        listed = yaml.compose(f"[{text}]", yaml.SafeLoader)
        items = listed.value if listed.end_mark.index == len(text) + 2 else []
    except (yaml.YAMLError, RecursionError):
        items = []  # one value, which is refused where it is read
    fits = not (items and text.rstrip().endswith(","))
    require(fits, "grid", "a value between the commas", quoted(word))
    slices = [text[item.start_mark.index - 1 : item.end_mark.index - 1] for item in items]
    return key, slices if len(slices) > 1 else [text]


def apply_word(settings: dict[str, Any], word: str) -> None:
    """Set in nested plain settings what a word says.

    `rewards=NAME` is a list of one section. `data=X` is data.path for a file or folder, and
    data.name for a hub id. `model=X` is model.path in place of a model that the recipe makes.
    """
    key, text = split_word(word)
    value, section = read_yaml(text, quoted(key, str)), settings.get(key)
    if key == "rewards":
        set_key(settings, key, reward_sections(value))
    elif key not in ("data", "model") or not (isinstance(value, str) and isinstance(section, dict)):
        set_key(settings, key, value)
    elif key == "model":
        section.update(path=value, config=None, tokenizer=None)
    else:
        path, name = (value, None) if is_local(value) else (None, value)
        section.update(path=path, name=name)


def set_key(settings: dict[str, Any], key: str, value: Any) -> None:
    node: Any = settings
    *above, last = key.split(".")
    for part in above:
        index = _index(node, part, key)
        if isinstance(node, dict) and node.get(index) is None:
            node[index] = {}
        node = node[index]
    node[_index(node, last, key)] = value


def _index(node: Any, part: str, key: str) -> Any:
    if isinstance(node, dict):
        return part
    length = len(node) if isinstance(node, list) else None
    if length is None or part not in map(str, range(length)):
        below = "below a value, no section" if length is None else f"no index of a list of {length}"
        raise ValueError(f"{quoted(key, str)}: {quoted(part)} is {below}")
    return int(part)


# -------------------------------------------------------------------------------------- refusals
def validated(
    kind: type[Config], settings: Any, *, at: str = "", also: Iterable[str] = ()
) -> Config:
    """Plain settings as a `kind`. Raises ValueError with a line for each that does not fit.

    at: the dotted key of the section, where it is a part of a configuration.
    """
    try:
        _refuse_truths(settings, kind, at)
        return kind.model_validate(settings)
    except ValidationError as error:
        lines = [_explain(each, kind, at, also) for each in error.errors(include_url=False)]
        raise ValueError("\n  ".join(dict.fromkeys(lines))) from None


def _refuse_truths(value: Any, annotation: Any, where: str) -> None:
    """Refuse true and false where a number is expected: pydantic takes them for 1 and 0."""
    section, types = section_of(annotation), list(members(annotation))
    if isinstance(value, bool) and (int in types or float in types) and bool not in types:
        raise ValueError(f"{where}: expected a number, got {str(value).lower()}")
    for index, item in enumerate(value if isinstance(value, list) else ()):
        _refuse_truths(item, annotation, f"{where}.{index}")
    if isinstance(value, dict) and section is not None:
        for name, field in section.model_fields.items():
            _refuse_truths(value.get(name), field.annotation, f"{where}.{name}".lstrip("."))


def _explain(error: Any, kind: type[BaseModel], at: str, also: Iterable[str]) -> str:
    """One of a ValidationError's errors: the dotted key, what was expected, what came."""
    path: list[str] = []
    section, annotation = None, kind
    for part in error["loc"]:
        section = section_of(annotation)
        if isinstance(part, int):
            path.append(str(part))
        elif section is not None:  # else it is pydantic's name for a member of a union
            path.append(part)
            field = section.model_fields.get(part)
            annotation = field and field.annotation
    where = quoted(".".join([at, *path] if at else path), str)
    if error["type"] == "extra_forbidden":
        beside = [*section.model_fields, *(also if len(path) == 1 else ())]
        return f"{where}: unknown key" + nearest(path[-1], beside, list(dotted_keys(kind)))
    if error["type"] == "missing":
        return f"{where}: is missing"
    message, came = error["msg"].removeprefix("Value error, "), error["input"]
    if error["type"] == "value_error" and section_of(annotation) is not None:
        return f"{where}.{message}" if where else message  # a section's check names its field
    if error["type"] == "model_type":
        message = "expected a section of keys"
    if isinstance(came, (dict, BaseModel)):
        return f"{where}: {message}"
    choices = _choices(annotation) if error["type"] in ("literal_error", "bool_parsing") else []
    if choices:
        message = f"expected one of {', '.join(choices)}"
    close = close_to(str(came), choices)
    return f"{where}: {message}, got {quoted(came)}" + (f"; nearest: {close}" if close else "")


def dotted_keys(kind: type[BaseModel], above: str = "") -> Iterator[str]:
    for name, field in kind.model_fields.items():
        yield above + name
        section = section_of(field.annotation)
        if section is not None:
            first = "0." if get_origin(field.annotation) is list else ""
            yield from dotted_keys(section, f"{above}{name}.{first}")


def section_of(annotation: Any) -> Any:
    """The section in an annotation such as `Section | None` or `list[Section]`, or None."""
    types = (x for x in members(annotation) if isinstance(x, type) and not get_args(x))
    return next((x for x in types if issubclass(x, BaseModel)), None)


def _choices(annotation: Any) -> list[str]:
    """The words that a field takes, where they are few: those of a Literal, true, false, null."""
    types = list(members(annotation))
    more = ["true", "false"] * (bool in types) + ["null"] * (type(None) in types or None in types)
    return [word for word in types if isinstance(word, str)] + more


def nearest(key: str, known: Sequence[str], dotted: Sequence[str] = ()) -> str:
    """Return the end of a refusal: our key for another library's, the nearest keys, or all keys.

    Args:
        known: the keys beside the unknown one.
        dotted: all keys of the configuration.
    """
    ours = ELSEWHERE.get(key.casefold(), "")
    if ours.partition("=")[0] in dotted:
        return f"; here it is {ours}"
    for name in (ours.rpartition(".")[2], key):
        here = [name] if name in known else [d for d in dotted if d.rpartition(".")[2] == name]
        if here:
            return f"; nearest: {', '.join(here)}"
    close = close_to(key, known, cutoff=0.7) or close_to(key, dotted, cutoff=0.85)
    return f"; nearest: {close}" if close else f"; known: {', '.join(known)}"


def close_to(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most like a word, ignoring case; None if none is similar."""
    letters = word[:QUOTED].casefold()

    def likeness(name: str) -> tuple[bool, float]:
        last = name.casefold().rpartition(".")[2]
        # gpro is as like gspo as grpo, but two letters change places more often than one is wrong.
        return sorted(last) == sorted(letters), SequenceMatcher(None, last, letters).ratio()

    best = max(known, key=likeness, default=None)
    return best if best is not None and max(likeness(best)) >= cutoff else None


def quoted(value: Any, show: Any = repr) -> str:
    """A value as a message shows it, however long it is."""
    text = show(value)
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}… ({len(text)} characters)"

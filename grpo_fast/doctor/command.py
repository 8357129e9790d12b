"""Implementation of `grpo-fast doctor`.

The command tests this machine, or compares an engine with the trainer.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any

from grpo_fast.doctor.diagnosis import Diagnosis, DoctorSettings, examine_engine
from grpo_fast.doctor.selftest import self_checks
from grpo_fast.errors import escape_control, require
from grpo_fast.train.config import read_recipe
from grpo_fast.train.config.words import read_words, recipe_in
from grpo_fast.train.evaluate import find_model

PATIENCE = 10  # seconds to wait for a server that does not answer
# Default settings without a recipe. The temperature differs from 1, because an engine that ignores
# the temperature would otherwise pass the comparison.
DEFAULTS: dict[str, Any] = {
    "data": {"task": "open"}, "rewards": [{"name": "exact_match"}], "rollout": {"temperature": 0.8}
}  # fmt: skip


def run(words: Sequence[str]) -> bool:
    """Compare an engine with the trainer, or run the self-tests, and print a report.

    Args:
        words: Words of the command line. Without a model or a recipe, the self-tests run.

    Returns:
        True if every self-test passed, or if the engine agrees with the trainer.

    Raises:
        ValueError: A word, a model, data or an engine cannot be used.
        RuntimeError: The engine does not return completions.
    """
    model, config = read(words)
    if config is None:
        ok, lines = self_checks()
    else:
        found = examine_engine(config)
        ok = found.ok
        title = f"{config.rollout.engine}: {model or config.recipe}"
        lines = [f"Engine against trainer, {title}, in nats per token", *lines_of(found)]
    print(escape_control("\n".join(lines)))
    return ok


def lines_of(found: Diagnosis) -> Iterator[str]:
    """Yield the lines of the text report for a diagnosis."""
    verdict = "ok" if found.mean <= found.threshold else "TOO MUCH"
    which = f"mean of {found.tokens} tokens (largest {found.largest:.2e})"
    yield f"{found.mean:.2e}  {which}: {verdict}, allowed {found.threshold:.1e}"
    yield f"{found.own:.2e}  the trainer against the model's own forward pass"
    for cause in found.tried:
        yield f"{cause.left:.2e}  remains with {cause.name}: {cause.what}"
    for cause in found.causes:
        yield f"Cause: {cause.name}. What happens: {cause.advice}"
    if found.mean > found.noise and not found.causes:
        yield "Cause: not found among the causes that were tried."


def read(words: Sequence[str]) -> tuple[str | None, DoctorSettings | None]:
    """Parse the command-line arguments.

    Args:
        words: A model, URLs of vLLM servers, and settings of the form `key=value`, in any order.

    Returns:
        The model or None, and the settings. The settings are None if there is neither a model nor a
        recipe.

    Raises:
        ValueError: There are two models, or a setting is invalid.
    """
    # 1. Split the words into URLs, settings and models.
    urls = [word for word in words if word.startswith(("http://", "https://"))]
    settings = [word for word in words if "=" in word and word not in urls]
    models = [word for word in words if word not in urls + settings]
    require(len(models) <= 1, "model", "one at most", ", ".join(models))
    recipe = recipe_in(settings)
    if not models and recipe is None:
        expected = "a folder, a hub id or recipe=NAME together with the other arguments"
        require(not words, "model", expected, " ".join(words))
        return None, None
    # 2. Read prompts and sampling settings from the recipe. Without a recipe, read them from the
    # run if the model is the folder of a run. Otherwise use the defaults.
    fields = copy.deepcopy(DEFAULTS) if recipe is None else read_recipe(recipe)
    if models:
        path, of_model = find_model(models[0])
        loading = {}
        if of_model is not None:
            # Exclude trust_remote_code, because the doctor must not run code from a model's folder.
            loading = of_model.model.model_dump(include={"dtype", "autocast"})
            if recipe is None:
                fields = of_model.model_dump(mode="json", exclude_unset=True)
        fields["model"] = {"path": path, **loading}
    # 3. Use the servers on the command line instead of the engine in the recipe or run.
    if urls:
        server = {"engine": "vllm-server", "vllm.urls": json.dumps(urls), "vllm.patience": PATIENCE}
        settings = [f"rollout.{key}={value}" for key, value in server.items()] + settings
    return next(iter(models), None), read_words(DoctorSettings, settings, fields)

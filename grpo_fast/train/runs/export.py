"""Models in one piece: of a checkpoint (`grpo-fast export`), and of a run with shards."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from grpo_fast.train.config import ModelConfig, RunConfig, require
from grpo_fast.train.files import written
from grpo_fast.train.models.loading import load_policy, load_tokenizer
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.ranks import distributed
from grpo_fast.train.runs.checkpoint import (
    FOLDER,
    TOKENIZER,
    WEIGHTS,
    newest,
    problem_of,
    read_tensors,
)
from grpo_fast.train.runs.fingerprints import FILES
from grpo_fast.train.runs.folder import check_folder, locked
from grpo_fast.train.runs.state import read_state, refused
from grpo_fast.train.update.critic import Critic, load_critic

log = logging.getLogger(__name__)


def export(source: str | Path, out: str | Path) -> Path:
    """Write the policy of a checkpoint as a new folder that transformers loads (LoRA: merged).

    Args:
        source: a checkpoint, or a run, whose newest complete checkpoint is taken.

    Raises ValueError for a checkpoint that is damaged, of another version or with weights that are
    not finite, and for a folder that is occupied or in a checkpoint.
    """
    path = Path(source)
    checkpoint = newest(path, log.warning) if (path / FOLDER).is_dir() else path
    expected = "a run with a complete checkpoint, or a complete checkpoint"
    problem = "there is none" if checkpoint is None or not path.is_dir() else problem_of(checkpoint)
    require(problem is None, "export", expected, f"{path}: {problem}")
    with locked(out) as target:
        check_folder(target)
        with refused("export", checkpoint):
            settings = read_state(checkpoint).settings
            settings.pop(FILES)
            config = RunConfig.model_validate(settings).model
            # The folder of a run is data: it must not ask for code, nor for the hub's attention.
            plain = {"device": "cpu", "attn": "auto", "trust_remote_code": False}
            tokenizer = load_tokenizer(ModelConfig(path=str(checkpoint / TOKENIZER)))
            policy = load_policy(config.model_copy(update=plain), tokenizer)
            weights = {f"policy.{name}": tensor for name, tensor in policy.weights().items()}
            read_tensors(checkpoint / WEIGHTS, weights, prefix="policy.")
        broken = [name for name, weight in weights.items() if not weight.isfinite().all()]
        came = f"NaN or infinity in {', '.join(broken[:3])} of {checkpoint}"
        require(not broken, "export", "finite weights (take an earlier checkpoint)", came)
        policy.save(target)
    return target


@torch.no_grad()
def save_models(policy: Policy, critic: Critic | None, model: ModelConfig, folder: Path) -> None:
    """Save the trained models, after the summary: a full disk then costs no more than them.

    Collective: shards are put together in a model that rank 0 loads anew, as `model` says.
    """
    trained: dict[str, Any] = {"model": policy} | ({} if critic is None else {"critic": critic})
    models = dict(trained)
    if policy.is_sharded:
        with distributed.together():
            if distributed.is_main():
                own = model.model_copy(update={"device": "cpu"})
                models["model"] = load_policy(own, policy.tokenizer)
                if critic is not None:
                    models["critic"] = load_critic(critic.config, model, models["model"])
        for kind, sharded in trained.items():
            room = models[kind].weights()
            for name, tensor in sharded.weights().items():
                full = distributed.whole(tensor.detach())
                if distributed.is_main():
                    room[name].detach().copy_(full)
    with distributed.together(), written(folder / "model"):
        if distributed.is_main():
            for kind, whole in models.items():
                whole.save(folder / kind)

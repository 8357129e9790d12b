"""Models in one piece: of a checkpoint (`grpo-fast export`), and of a run with shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from grpo_fast.train.config import ModelConfig, RunConfig, require
from grpo_fast.train.files import written
from grpo_fast.train.models.loading import load_policy, load_tokenizer
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.ranks import distributed
from grpo_fast.train.runs.checkpoint import TOKENIZER, WEIGHTS, problem_of, read_tensors
from grpo_fast.train.runs.folder import check_folder, locked
from grpo_fast.train.runs.state import read_state
from grpo_fast.train.update.critic import Critic, load_critic


def export(checkpoint: str | Path, out: str | Path) -> Path:
    """Write the policy of a checkpoint as a new folder that transformers loads (LoRA: merged).

    Raises ValueError for a checkpoint that is damaged or another version's, or an occupied folder.
    """
    source = Path(checkpoint)
    problem = problem_of(source) if source.is_dir() else "there is no such folder"
    require(problem is None, "export", "a whole checkpoint", f"{source}: {problem}")
    with locked(out) as target:
        check_folder(target)
        config = RunConfig.model_validate(read_state(source).config).model
        # A run's folder is data: it may ask for no code, not for that of an attention either.
        plain = {"device": "cpu", "attn": "auto", "trust_remote_code": False}
        tokenizer = load_tokenizer(ModelConfig(path=str(source / TOKENIZER)))
        policy = load_policy(config.model_copy(update=plain), tokenizer)
        weights = {f"policy.{name}": tensor for name, tensor in policy.weights().items()}
        read_tensors(source / WEIGHTS, weights, prefix="policy.")
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

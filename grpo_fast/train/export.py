"""Saving of trained models: the command `grpo-fast export`, and the models at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from grpo_fast.errors import require
from grpo_fast.train import ranks
from grpo_fast.train.checkpoint import TOKENIZER, WEIGHTS, read_state, read_tensors, refused
from grpo_fast.train.config import ModelConfig, RunConfig
from grpo_fast.train.critic import Critic, load_critic
from grpo_fast.train.folder import FILES, FOLDER, is_occupied, locked, newest, problem_of, written
from grpo_fast.train.models.loading import load_policy, load_tokenizer
from grpo_fast.train.models.policy import Policy


def export(source: str | Path, out: str | Path) -> Path:
    """Export the policy of a checkpoint to a folder that transformers can load.

    A LoRA adapter is merged into the weights.

    Args:
        source: folder of a checkpoint or of a run. For a run, the newest complete checkpoint is
            used.
        out: a new or empty folder.

    Returns:
        The folder `out`.

    Raises:
        ValueError: the checkpoint is damaged, has non-finite weights, or was written by another
            version of the package. Also raised if the folder `out` is not empty.
    """
    # 1. Find a complete checkpoint.
    path = Path(source)
    checkpoint = newest(path) if (path / FOLDER).is_dir() else path
    problem = "there is none"
    if checkpoint is not None and path.is_dir():
        problem = problem_of(checkpoint)
    expected = "a run with a complete checkpoint, or a complete checkpoint"
    trained = f"; its trained model is {path / 'model'}" if (path / "model").is_dir() else ""
    require(problem is None, "export", expected, f"{path}: {problem}{trained}")
    with locked(out) as target:
        require(not is_occupied(target), "OUT", "a new or empty folder", target)
        # 2. Build the model and load its weights.
        with refused("export", checkpoint):
            settings = read_state(checkpoint).settings
            settings.pop(FILES)
            config = RunConfig.model_validate(settings).model
            # The checkpoint may come from an untrusted source, so loading must not run custom code.
            plain = {"device": "cpu", "trust_remote_code": False}
            tokenizer = load_tokenizer(ModelConfig(path=str(checkpoint / TOKENIZER)))
            policy = load_policy(config.model_copy(update=plain), tokenizer)
            weights = {f"policy.{name}": tensor for name, tensor in policy.weights().items()}
            read_tensors(checkpoint / WEIGHTS, weights, "policy.")
        # 3. Reject non-finite weights, then write the model.
        broken = [name for name, weight in weights.items() if not weight.isfinite().all()]
        came = f"NaN or infinity in {', '.join(broken[:3])} of {checkpoint}"
        require(not broken, "export", "finite weights (take an earlier checkpoint)", came)
        with written(target):
            policy.save(target)
    return target


@torch.no_grad()
def save_models(policy: Policy, critic: Critic | None, model: ModelConfig, folder: Path) -> None:
    """Save the trained policy and critic to the subfolders `model` and `critic`.

    If the weights are sharded, rank 0 loads an unsharded copy of the initial model, and copies the
    gathered weights into it.

    Args:
        policy: the trained policy.
        critic: the trained critic, or None.
        model: the section `model` of the configuration.
        folder: folder of the run.
    """
    trained: dict[str, Any] = {"model": policy}
    if critic is not None:
        trained["critic"] = critic
    models = dict(trained)
    if policy.is_sharded:
        if ranks.is_main():
            own = model.model_copy(update={"device": "cpu"})
            models["model"] = load_policy(own, policy.tokenizer)
            if critic is not None:
                models["critic"] = load_critic(critic.config, model, models["model"])
        for kind, sharded in trained.items():
            targets = models[kind].weights()
            for name, tensor in sharded.weights().items():
                full = ranks.full_tensor(tensor.detach())
                if ranks.is_main():
                    targets[name].detach().copy_(full)

    def save() -> None:
        for kind, unsharded in models.items():
            with written(folder / kind):
                unsharded.save(folder / kind)

    ranks.from_main(save)

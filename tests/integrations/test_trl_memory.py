"""Tests of the memory that `checkpoint_offload` and `tiled_mlp` of `FastGRPOTrainer` save."""

import importlib
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.trainers.step import peak_bytes
from grpo_fast.train.planning.memory_model import Shape
from grpo_fast.train.planning.plan import plan
from tests.command_line import invoke
from tests.train.test_memory_model import predicted

pytest.importorskip("trl", minversion="1.16")
cases = importlib.import_module("tests.integrations.trl_cases")
fast = importlib.import_module("grpo_fast.integrations.trl.trainer")
steps = importlib.import_module("tests.integrations.test_trl_trainer")

SIZES = {"num_hidden_layers": 16, "hidden_size": 128, "intermediate_size": 512,
         "max_position_embeddings": 1024}  # fmt: skip
LENGTH = 252  # tokens per completion
OFFLOAD = {"checkpoint_offload": True}
TILED = {"tiled_mlp": 128}


def keep_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store offloaded tensors as numpy arrays.

    The arrays replace host memory next to a GPU. On a CPU, offloaded tensors would stay in the
    memory that torch's allocator counts. It does not count numpy arrays, so the measured peak
    excludes offloaded tensors, as the peak of a GPU does.
    """

    def pack(tensor: torch.Tensor) -> Any:
        return tensor.detach().numpy().copy()

    def unpack(array: Any) -> torch.Tensor:
        return torch.from_numpy(array).clone()

    def save_on_cpu(pin_memory: bool) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", save_on_cpu)


def micro_batch() -> dict[str, Any]:
    """Return a micro-batch of four prompts with one completion each. The prompts share no token."""
    prompts = torch.arange(2, 18).view(4, 4)
    random = torch.Generator().manual_seed(5)
    ids = torch.randint(2, 200, (4, LENGTH), generator=random)
    batch = {"prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts)}
    batch |= {"completion_ids": ids, "completion_mask": torch.ones_like(ids)}
    advantages = torch.tensor([1.0, -0.5, -1.2, 0.3])
    return batch | {"advantages": advantages, "num_items_in_batch": torch.tensor(ids.numel())}


def measured(folder: Path, **more: Any) -> tuple[int, int, dict[str, torch.Tensor]]:
    """Measure the memory of one forward and backward pass in TRL.

    Args:
        folder: The folder for the model and the trainer's output.
        **more: Options of `FastGRPOTrainer`.

    Returns:
        The measured peak and the predicted peak, in bytes, and the gradients.
    """
    path = cases.folder(folder / "model", "llama", **SIZES)
    with pytest.MonkeyPatch.context() as patch:  # use the layers of a GPU, which save more tensors
        patch.setattr(fast, "fast_layers", lambda model: None)
        options = {"gradient_checkpointing": True, "max_steps": 1, "learning_rate": 0.0}
        trainer = steps.build(path, folder, more=more, **options)
    trainer.train()  # enables gradient checkpointing
    trainer.model.train()
    batch = micro_batch()
    _, gradients = steps.gradients(trainer, batch)  # caches tensors that are not part of the peak
    peak = peak_bytes(lambda: trainer._compute_loss(trainer.model, batch).backward(), "cpu")
    assert trainer.fast_path["forward"] == "packed"
    shape = Shape.of(trainer.model)
    kept = "offload" if more.get("checkpoint_offload") else True
    tiled = more.get("tiled_mlp")
    model = {"dtype": "float32", "gradient_checkpointing": kept, "tiled_mlp": tiled}
    memory = predicted(shape, "cuda", model=model)
    tokens = 4 * (4 + LENGTH - 1)  # the model does not read a completion's last token
    return peak, memory.working + memory.per_token * tokens, gradients


def test_the_documented_plan_counts_the_options():
    """Check that the `grpo-fast plan` command in the README runs.

    Each of the two settings in the command must lower the predicted memory per token.
    """
    text = Path(fast.__file__).parents[1].joinpath("README.md").read_text()
    command = text.partition("grpo-fast plan ")[2].partition("```")[0].replace("\\\n", " ")
    words = shlex.split(command)
    done = invoke("plan", *words)
    assert done.exit_code == 0 and f"{words[0]} fits" in " ".join(done.output.split())
    assert "model.gradient_checkpointing=offload" in words and "model.tiled_mlp=2048" in words
    per_token = []
    for dropped in ("nothing", "model.gradient_checkpointing=offload", "model.tiled_mlp=2048"):
        found = plan(words[0], [word for word in words[1:] if word != dropped])
        per_token.append(found.memory["as configured"].per_token)
    assert per_token[0] < 0.8 * min(per_token[1:])


def test_the_options_save_what_the_plan_counts(tmp_path, monkeypatch):
    """Check that the peak memory of a step is within 12% of the prediction of `grpo-fast plan`.

    Each option must lower the peak and must not change the gradients.
    """
    plain = measured(tmp_path)
    on_a_cpu = measured(tmp_path, **OFFLOAD)
    keep_apart(monkeypatch)
    found = {
        "checkpointing": plain,
        "offload": measured(tmp_path, **OFFLOAD),
        "tiled": measured(tmp_path, **TILED),
        "both": measured(tmp_path, **OFFLOAD, **TILED),
    }
    peaks = {name: row[0] for name, row in found.items()}
    print({**peaks, "offload on a CPU": on_a_cpu[0]}, {n: row[1] for n, row in found.items()})
    for name, (peak, expected, gradients) in found.items():
        assert peak == pytest.approx(expected, rel=0.12), name
        assert gradients.keys() == plain[2].keys()
        for key, gradient in plain[2].items():
            torch.testing.assert_close(gradients[key], gradient, rtol=1e-5, atol=1e-7)
    assert max(peaks["offload"], peaks["tiled"]) < 0.8 * peaks["checkpointing"]
    assert peaks["both"] < 0.6 * min(peaks["offload"], peaks["tiled"])
    # Without numpy arrays, offloading on a CPU must not save memory, because the tensors stay where
    # they are.
    assert on_a_cpu[0] == pytest.approx(plain[0], rel=0.01)

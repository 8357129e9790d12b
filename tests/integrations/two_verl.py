"""Cases that train with verl's FSDP2 engine on two ranks.

Each case runs once with the losses and the head of verl, and once with ours. verl does not support
CPUs, so the cases register a CPU platform with verl. Nothing else in verl is changed.
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from tests.integrations import packages, trl_cases
from tests.integrations.two_trl import Result, outcome

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
PROMPTS = (2, 3, 1, 2)  # tokens of each prompt
RESPONSES = ((4, 6, 3, 5), (2, 6, 2, 3))  # tokens of each response on rank 0 and on rank 1
# For each case, the option use_fused_kernels of verl's run and of our run. In the case "logits",
# the LM head is untied, and verl's engine shards it in a separate group. verl's fused kernel fails
# for such a head.
FUSED = {"logits": (False, True), "fused": (True, True)}


def on_a_cpu() -> None:
    """Register a CPU platform with verl, which otherwise needs an accelerator.

    Call this function before importing verl's engine.
    """
    cuda = packages.load_verl("verl.plugin.platform.platform_cuda").PlatformCUDA

    class Cpu(cuda):
        device_name, device_module = "cpu", torch.cpu

        def is_available(self) -> bool:
            return True

        def current_device(self) -> torch.device:
            return torch.device("cpu")

    packages.load_verl("verl.plugin.platform.platform_manager").set_platform(Cpu())
    patches = packages.load_verl("verl.models.transformers.monkey_patch")
    patches.is_trl_available = lambda: False  # verl would import a class that TRL has removed


def engine(path: str, fused: bool) -> Any:
    home = packages.load_verl("verl.workers.engine.fsdp.transformer_impl")
    configs = packages.load_verl("verl.workers.config")
    model = configs.HFModelConfig(
        path=path, load_tokenizer=False, use_remove_padding=False,
        enable_gradient_checkpointing=False, use_fused_kernels=fused,
        override_config={"attn_implementation": "eager"},
        fused_kernel_options={"impl_backend": "torch"},
    )  # fmt: skip
    fp32 = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    sharding = {"strategy": "fsdp2", "use_torch_compile": False, "mixed_precision": fp32}
    sgd = {"lr": 0.05, "optimizer": "SGD", "total_training_steps": 99, "weight_decay": 0.0}
    checkpoints = packages.load_verl("verl.trainer.config").CheckpointConfig()
    parts = configs.FSDPEngineConfig(**sharding), configs.FSDPOptimizerConfig(**sgd)
    made = home.FSDPEngineWithLMHead(model, *parts, checkpoints)
    made.initialize()
    return made


def nested(parts: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def batch(seed: int, fused: bool) -> Any:
    """Return this rank's two micro-batches of two completions, as verl's TensorDict.

    The batches of the two ranks have different numbers of tokens.
    """
    rank = distributed.get_rank()
    random = torch.Generator().manual_seed(2 * seed + rank)
    lengths = RESPONSES[rank]
    rows = []
    for prompt, n, advantage in zip(PROMPTS, lengths, (1.0, -1.0, 0.5, -0.3), strict=True):
        ids = torch.randint(2, 200, (prompt + n,), generator=random)
        places = torch.arange(prompt + n)
        rows.append({
            "input_ids": ids, "position_ids": places, "prompts": ids[:prompt],
            "responses": ids[prompt:], "response_mask": torch.ones(n, dtype=torch.long),
            "loss_mask": (places >= prompt).float(), "advantages": torch.full((n,), advantage),
            "old_log_probs": -4.5 - 2 * torch.rand(n, generator=random),
            "ref_log_prob": -4.5 - 2 * torch.rand(n, generator=random),
        })  # fmt: skip
    tensors = {name: nested([row[name] for row in rows]) for name in rows[0]}
    settings = {
        "temperature": 0.9, "global_batch_size": 8, "micro_batch_size_per_gpu": 2,
        "use_dynamic_bsz": False, "use_remove_padding": False, "use_fused_kernels": fused,
        "calculate_entropy": True, "pad_token_id": 0,
    }  # fmt: skip
    utils = packages.load_verl("verl.utils.tensordict_utils")
    return utils.get_tensordict(tensors, non_tensor_dict=settings)


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of every micro-batch in a dictionary, with keys "name/micro-batch"."""
    found = {}
    for name, value in metrics.items():
        values = getattr(value, "values", value)
        values = values if isinstance(values, list) else [values]
        found |= {f"{name}/{i}": float(getattr(x, "values", x)) for i, x in enumerate(values)}
    return found


def train(made: Any, prefix: str, fused: bool) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Make one training step with each loss, and return the metrics of each step and the weights.

    The aggregation changes from step to step. The losses are verl's if the prefix is "", and ours
    if it is "fast_".
    """
    cases = importlib.import_module("tests.integrations.test_verl")
    ppo_loss = packages.load_verl("verl.workers.utils.losses").ppo_loss
    logs = []
    with made.train_mode():
        for step, name in enumerate(cases.ours.LOSSES):
            options = {"use_kl_loss": True, "entropy_coeff": 0.01, "kl_loss_coef": 0.1}
            config = cases.actor(name, loss_agg_mode=MODES[step % len(MODES)], **options)
            object.__setattr__(config.policy_loss, "loss_mode", prefix + name)
            out = made.train_batch(batch(step, fused), functools.partial(ppo_loss, config))
            losses = dict(enumerate(out["loss"]))
            logs.append(numbers(out["metrics"]) | {f"loss/{i}": x for i, x in losses.items()})
    parameters = made.module.named_parameters()
    return logs, {name: p.detach().full_tensor() for name, p in parameters}


def run(name: str, path: str) -> Result:
    cases = importlib.import_module("tests.integrations.test_verl")
    theirs, ours = FUSED[name]
    logs, expected = train(engine(path, theirs), "", theirs)
    made = engine(path, ours)
    with cases.head.use_fast_head(), cases.ours.register():
        ours_logs, found = train(made, "fast_", ours)
    return outcome(
        type(made.module).__name__, made.get_data_parallel_size(), [logs, ours_logs], expected,
        found, tokens=sum(RESPONSES[distributed.get_rank()]),
    )  # fmt: skip


def cases(folder: Path) -> Iterator[tuple[str, Callable[[], Result]]]:
    on_a_cpu()
    patched = importlib.import_module("transformers").Qwen2ForCausalLM
    forward = patched.forward
    for name in FUSED:
        path = folder / f"qwen2-{name}"
        if distributed.get_rank() == 0:
            trl_cases.folder(path, "qwen2", tie_word_embeddings=name == "fused")
        distributed.barrier()
        yield f"verl-{name}", partial(run, name, str(path))
        patched.forward = forward  # undo verl's patch for later cases

"""Tests that runs of FastGRPOTrainer and of TRL's GRPOTrainer have equal logs and final weights.

Both trainers get the same prompts, completions and rewards. The learning rate is high, and each
batch is used for two iterations, so that some ratios exceed every bound.
"""

import importlib
import math
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl", minversion="1.16")
cases = importlib.import_module("tests.integrations.trl_cases")
fast = importlib.import_module("grpo_fast.integrations.trl.trainer")


SINGLE, ON_LOGPS = "single pass", "TRL's on our logps"
# Options that give several updates per batch, so that the ratios differ from 1. TRL computes the
# old logps in a separate pass.
MOVING = {"num_iterations": 2, "gradient_accumulation_steps": 2, "max_steps": 3}


class ToolMask:
    """Mixin that makes a trainer mark some tokens of every completion as tool output."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        mask = torch.ones_like(output["completion_ids"])
        mask[:, 1] = 0
        mask[0, 1:4] = 0
        return {**output, "tool_mask": mask}


class PerTokenAdvantages:
    """Mixin that makes a trainer use advantages per token instead of per completion."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        ramp = torch.linspace(1.5, -0.5, output["completion_ids"].shape[1])
        return {**output, "advantages": output["advantages"][:, None] * ramp}


class Sampler:
    """Mixin that makes a trainer handle its completions like completions of vLLM.

    The trainer then reads the sampler's logps, which `sampled_by` returns. One of these logps is
    NaN. If `corrects` is True, the loss corrects the difference between the sampler's logps and the
    model's logps.
    """

    def _generate_and_score_completions(self, inputs):
        self.use_vllm = True
        try:
            return super()._generate_and_score_completions(inputs)
        finally:
            self.use_vllm = self.corrects

    corrects = True


def sampled_by(injected: Any) -> Any:
    def generate(*args: Any, **kwargs: Any) -> tuple[list, list]:
        completions, _ = injected(*args, **kwargs)
        logps = [[-5.5 + 0.3 * ((t + i) % 7 - 3) for i, t in enumerate(ids)] for ids in completions]
        logps[0][0] = math.nan
        return completions, logps

    return generate


def compare_runs(
    model_path, tmp_path, *, mixins=(), loss=SINGLE, forward="packed", reaches=None, tolerances=(),
    **options,
):  # fmt: skip
    """Check that `GRPOTrainer` and `FastGRPOTrainer` end with equal logs and weights.

    Args:
        model_path: Folder of the model.
        tmp_path: Folder of the runs.
        mixins: Classes to add before the first base class of both trainers.
        loss: Start of the expected `fast_path["loss"]`.
        forward: Start of the expected `fast_path["forward"]`.
        reaches: Name of a metric that must be nonzero in at least one of TRL's logs. Otherwise the
            run would not test the option.
        tolerances: Arguments `tolerance`, `near_zero` and `weights` of `trl_cases.compare_runs`.
        **options: Options of `trl_cases.trainer`.
    """
    runs = []
    for number, base in enumerate((trl.GRPOTrainer, fast.FastGRPOTrainer)):
        cls = type(base.__name__, (*mixins, base), {})
        sampler = cases.Injected(260) if Sampler not in mixins else sampled_by(cases.Injected(260))
        output = tmp_path / str(number)
        trainer = cases.trainer(cls, model_path, output, completions=sampler, **options)
        trainer.train()
        if options.get("evaluation"):
            trainer.evaluate()
        runs.append(trainer)
    theirs, ours = runs
    assert ours.fast_path["loss"].startswith(loss), ours.fast_path
    assert ours.fast_path["forward"].startswith(forward), ours.fast_path
    cases.compare_runs(theirs, ours, *tolerances)
    if reaches is not None:
        assert max(abs(entry.get(reaches) or 0.0) for entry in theirs.state.log_history) > 0


# For each loss type that is computed in a single pass, a metric that differs from 0 only if some
# ratios leave the clip range.
CLIPPED = "clip_ratio/region_mean"
REACHED = {"grpo": CLIPPED, "bnpo": CLIPPED, "dr_grpo": CLIPPED, "dapo": CLIPPED, "luspo": CLIPPED,
           "cispo": "cispo_clip_ratio", "sapo": "kl"}  # fmt: skip
SEQUENCE = {"importance_sampling_level": "sequence", "beta": 0.05, "loss": ON_LOGPS}
TOOLS = {"mixins": [ToolMask], "beta": 0.05, "entropy_coef": 0.02}
SAMPLED = {"mixins": [Sampler], "beta": 0.05, "vllm_importance_sampling_clip_max": 2.0,
           "reaches": "sampling/importance_sampling_ratio/max"}  # fmt: skip
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
# Tolerances in bf16. Each operation rounds by up to 2^-9, so sums of gradients differ in the third
# digit.
IN_BF16 = {"tolerances": (3e-2, 2e-3, 2e-2), "max_steps": 2, "num_iterations": 1}
RUNS: dict[str, dict[str, Any]] = {
    f"token_{name}": {"loss_type": name, "beta": 0.05, "reaches": metric,
                      **({"epsilon_high": 1.1} if name == "cispo" else {"delta": 1.5})}
    for name, metric in REACHED.items()
}  # fmt: skip
RUNS |= {
    # At sequence level, TRL's function computes every loss type.
    "sequence_grpo": {"loss_type": "grpo", "epsilon": 0.05, **SEQUENCE},
    "sequence_cispo": {"loss_type": "cispo", "epsilon_high": 1.05, **SEQUENCE},
    "vespo": {"loss_type": "vespo", "loss": ON_LOGPS, "reaches": "vespo/phi_seq_mean"},
    "no_kl": {"loss_type": "grpo", "beta": 0.0},
    "kl_without_ratio": {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},
    "two_sided": {"loss_type": "dapo", "delta": 1.1, "epsilon_high": 0.28},
    "temperature": {"loss_type": "dapo", "temperature": 0.7, "beta": 0.02},
    "on_policy": {"num_iterations": 1, "max_steps": 2},
    "one_generation_for_four_steps": {"gradient_accumulation_steps": 1, "steps_per_generation": 4,
                                      "num_iterations": 1},
    "entropy_bonus": {"loss_type": "grpo", "entropy_coef": 0.05},
    "adaptive_entropy": {"loss_type": "dapo", "use_adaptive_entropy": True, "entropy_coef": 0.02,
                         "entropy_target": 4.8, "entropy_coef_delta": 0.01,
                         "entropy_coef_max": 0.1},
    "truncated_masked": {"loss_type": "dapo", "mask_truncated_completions": True, "beta": 0.02},
    "synced_reference": {"loss_type": "grpo", "beta": 0.1, "sync_ref_model": True,
                         "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.6},
    "checkpointing": {"loss_type": "dapo", "gradient_checkpointing": True},
    "clipped_gradients_adamw": {"loss_type": "grpo", "optim": "adamw_torch",
                                "learning_rate": 1e-4, "max_grad_norm": 1.0},
    "fp32_head": {"loss_type": "dapo", "cast_lm_head_to_fp32": True, "beta": 0.02},
    "several_groups": {"loss_type": "dapo", "per_device_train_batch_size": 8,
                       "num_generations": 2, "beta": 0.02},
    # With these options, the gradient of a token depends on other tokens, too, so a single pass is
    # not possible.
    "high_entropy_tokens": {"loss_type": "dapo", "top_entropy_quantile": 0.4, "loss": ON_LOGPS},
    "off_policy_mask": {"loss_type": "grpo", "off_policy_mask_threshold": 0.01, "loss": ON_LOGPS},
    "evaluation": {"evaluation": True, "beta": 0.05, "num_generations_eval": 2,
                   "reaches": "eval_entropy"},
    "vespo_with_sampler_correction_and_mask": {
        "mixins": [Sampler], "loss": ON_LOGPS, "loss_type": "vespo",
        "off_policy_mask_threshold": 0.5, "vllm_importance_sampling_mode": "token_truncate"},
    "lora": {"loss_type": "grpo", "beta": 0.1, "lora": {}, "reaches": "kl"},
    "bf16_weights": {"dtype": torch.bfloat16, **IN_BF16},
    "bf16_autocast": {"bf16": True, "beta": 0.05, **IN_BF16},
}  # fmt: skip
RUNS |= {f"tool_mask_{name}": {"loss_type": name, **TOOLS} for name in ("grpo", "dapo")}
RUNS |= {f"advantages_per_token_{name}": {"mixins": [PerTokenAdvantages], "loss_type": name}
         for name in ("dapo", "cispo", "sapo")}  # fmt: skip
RUNS |= {f"sampler_{mode}": {"loss_type": "dapo", **SAMPLED, "vllm_importance_sampling_mode": mode}
         for mode in MODES}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_run(model_path, tmp_path, name):
    compare_runs(model_path, tmp_path, **{**MOVING, **RUNS[name]})


WINDOW_IN_THE_MASK = {
    "use_sliding_window": True, "sliding_window": 6, "initializer_range": 0.3,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip


FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 16},  # has softcaps
    "qwen2": {},
    "cohere": {},  # has a scaled head
    "qwen2_moe": WINDOW_IN_THE_MASK,
    "qwen3_5_text": {  # has a recurrent layer
        "layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "initializer_range": 0.2,
    },
    "gpt_oss": {  # has attention sinks
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6,
        "initializer_range": 0.2,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path, family):
    """Check runs of models that pack their rows in special ways."""
    changes = FAMILIES[family]
    path = cases.folder(tmp_path / family, family, **changes)
    # Gemma 2 needs eager attention, because transformers 5.17 uses sdpa by default, which ignores
    # the softcap.
    loading = {"attn_implementation": "eager"} if family == "gemma2" else {}
    options = {"router_aux_loss_coef": 0.0} if "num_experts_per_tok" in changes else {}
    options |= {"loss_type": "dapo", "beta": 0.05, "max_steps": 3, "loading": loading}
    compare_runs(path, tmp_path, **options)


def test_router_loss_stays_with_trl(tmp_path):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    path = cases.folder(tmp_path / "mixtral", "mixtral", **experts)
    options = {"loss_type": "dapo", "router_aux_loss_coef": 0.1, "max_steps": 2}
    left = {"loss": "TRL's: router", "forward": "TRL's: router", "reaches": "aux_loss"}
    compare_runs(path, tmp_path, **left, **options)

"""What a planted bug is, the tests that must see it, and the whole list.

A bug is an exact textual replacement, so it is read as easily as it is planted. None of them is
equivalent to the original: each changes a loss, a gradient or a refusal for inputs that the
documentation allows.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

# The modules of this package that plant bugs, in the order of `all_mutants`: the quick ones first.
AREAS = (
    "objectives",
    "loss",
    "divergences",
    "train",
    "train_checkpoint",
    "train_compare",
    "train_words",
    "train_objectives",
    "train_ppo",
    "train_ranks",
    "train_replay",
    "train_rewards",
    "train_seeing",
    "train_unnoticed",
    "vllm",
    "heads",
    "kernels",
    "gradients",
    "products",
    "shards",
    "devices",
    "integrations",
    "attention_cpu",
    "trees",
    "windows",
    "rollout",
    "support",
    "support_triton",
    "doctor",
)

# What pytest is given for each kind of bug: the fitting tests, fast enough to be run once per bug.
SUITES: dict[str, list[str]] = {
    "windows": ["tests/attention/test_windows.py"],
    "trl_window": ["tests/integrations/test_trl_parity.py", "-k", "test_families and moe"],
    "leaves": ["tests/objective/test_objectives.py"],
    "estimators": [
        "tests/objective/test_objectives.py",
        "tests/objective/test_published_numbers.py",
        "-k",
        "kl or k3",
    ],
    "traps": ["tests/loss/test_loss_traps.py"],
    "logps": ["tests/loss/test_loss_parity.py", "-k", "logps or totals or kl_estimators"],
    "kl": ["tests/loss/test_loss_parity.py", "-k", "kl"],
    "sweeps": ["tests/loss/test_loss_parity.py", "-k", "test_linear or test_logits"],
    "sampling": ["tests/loss/test_loss_extras.py", "-k", "sampling or sampler or at_once"],
    "advantage_modes": ["tests/objective/test_advantages.py"],
    "prompts": ["tests/loss/test_loss_extras.py", "-k", "prompts"],
    "whole_entropy": ["tests/loss/test_support.py", "-k", "whole_vocabulary"],
    "off_policy": ["tests/loss/test_loss_extras.py", "-k", "off_policy"],
    "entropy": ["tests/loss/test_loss_extras.py", "-k", "entropy and not metrics"],
    "rules": ["tests/loss/test_loss_extras.py", "-k", "softcap or temperature or oracle"],
    "gradient": ["tests/loss/test_loss_finite_differences.py"],
    "inert": ["tests/loss/test_contract_poison.py"],
    "accuracy": ["tests/loss/test_contract_accuracy.py", "-k", "confident or many_chunks"],
    "edges": ["tests/loss/test_loss_edge_shapes.py", "-k", "not two_to_the_31"],
    "refusals": ["tests/loss/test_refusals.py"],
    "splits": ["tests/loss/test_splits.py"],
    "autograd": ["tests/loss/test_loss_autograd.py"],
    "table": [
        "tests/loss/test_argument_table.py",
        "-k",
        "graph and (support or hidden_rows or group) and linear",
    ],
    "carried": ["tests/loss/test_compile.py", "-k", "no_schema"],
    "csrc_self_check": ["tests/kernels/test_gemm_cpu.py", "-k", "self_check"],
    "grad_filter": ["tests/kernels/test_grad_filter.py", "-k", "masses or one_chunk or chunk"],
    "hidden_rows": ["tests/loss/test_hidden_rows.py"],
    "graphs": ["tests/gpu/test_cuda_graphs.py"],
    "chunks": ["tests/loss/test_chunks.py"],
    "kept": ["tests/loss/test_kept_logits.py"],
    "entropy_gradient": ["tests/loss/test_entropy_gradient.py"],
    "metrics": ["tests/loss/test_loss_extras.py", "-k", "metrics"],
    "range": ["tests/loss/test_gradient_range.py", "-k", "not compiled"],
    "sharded": ["tests/integrations/test_sharded_heads.py", "-k", "of_one_process and 2"],
    "ranks": ["tests/integrations/test_lightning.py", "-k", "two_ranks"],
    "two_processes": [
        "tests/integrations/test_two_processes.py",
        "-k",
        "ends_in_the_same and dapo",
    ],
    "checkpoint_files": [
        "tests/train/test_checkpoints.py",
        "-k",
        "damaged or best or middle_of_a_save or full_disk",
    ],
    "checkpoint_bits": ["tests/train/test_checkpoints.py", "-k", "left_goes_on_bit_for_bit"],
    "checkpoint_kept": ["tests/train/test_checkpoints.py", "-k", "bit_for_bit and kept"],
    "replay": ["tests/train/test_replay.py"],
    "ahead": ["tests/train/test_ahead.py"],
    "ahead_ranks": ["tests/train/test_ranks.py", "-k", "what_one_does and apart"],
    "ahead_bits": ["tests/train/test_ahead.py", "-k", "stand_still"],
    "totals": ["tests/train/test_totals.py"],
    "checkpoint_random": ["tests/train/test_checkpoints.py", "-k", "torchs_own"],
    "checkpoint_path": ["tests/train/test_checkpoints.py", "-k", "path_of or cannot_take"],
    "prompt_rows": ["tests/rollout/test_decode.py", "-k", "fit_it"],
    "decode_check": ["tests/rollout/test_decode.py", "-k", "behind_an_eos"],
    "zero_loss": [
        "tests/train/test_train_loop.py",
        "-k",
        "near_0 or on_policy or are_centred or lengths_are_named",
    ],
    "checkpoint_attacks": ["tests/train/test_attacked_checkpoints.py"],
    "checkpoint_prints": ["tests/train/test_fingerprints.py"],
    "ranks_order": ["tests/train/test_ranks.py", "-k", "no_order_behind"],
    "ranks_dealt": ["tests/train/test_ranks.py", "-k", "rank_0_reads"],
    "ranks_apart": ["tests/train/test_ranks.py", "-k", "differently or other_data"],
    "checkpoint_warm": ["tests/train/test_checkpoints.py", "-k", "warm_start"],
    "checkpoint_loop": [
        "tests/train/test_checkpoints.py",
        "-k",
        "passes or configuration or schedule or two_runs or remembered",
    ],
    "ranks_mu": ["tests/train/test_ranks.py", "-k", "does and mu and not 4"],
    "ranks_few": ["tests/train/test_ranks.py", "-k", "does and few and not 4"],
    "ranks_local": ["tests/train/test_ranks.py", "-k", "does and local"],
    "ranks_ppo": ["tests/train/test_ranks.py", "-k", "does and ppo and not shared and not 4"],
    "ranks_exact": ["tests/train/test_ranks.py", "-k", "does and exact"],
    "ranks_left": [
        "tests/train/test_ranks.py",
        "-k",
        "goes_on and (mu-fsdp2 or mu-ddp) or shards_again",
    ],
    "ranks_memory": ["tests/train/test_ranks.py", "-k", "halves"],
    "ranks_ended": ["tests/train/test_ranks.py", "-k", "killed"],
    "ranks_refused": ["tests/train/test_ranks.py", "-k", "refused or do_not_fit"],
    "checkpoint_ends": ["tests/train/test_endings.py", "-k", "whole_or_absent or audit"],
    "shards": ["tests/loss/test_vocabulary_shards.py", "-k", "2- or chunks"],
    "support": ["tests/loss/test_support.py", "-k", "not every_loss and not aggregations"],
    "support_refusals": ["tests/loss/test_support.py", "-k", "refus"],
    "support_doors": ["tests/kernels/test_support_doors.py"],
    "csrc_support": ["tests/kernels/test_support_doors.py"],
    "csrc_shards": ["tests/loss/test_vocabulary_shards.py", "-k", "2- and cpu"],
    "training": ["tests/train/test_train_loop.py", "tests/train/test_train_metrics.py"],
    "optimizer": ["tests/train/test_train_loop.py", "-k", "schedules or bad_gradient or in_a_row"],
    "rollout": ["tests/rollout/test_rollout.py"],
    "trl_rollouts": [
        "tests/integrations/test_trl_rollouts.py",
        "-k",
        "not greedy and not calculator",
    ],
    "generate": ["tests/rollout/test_generate.py"],
    "vllm": ["tests/rollout/test_vllm_server.py", "-k", "not busy and not url and not one_server"],
    "vllm_busy": ["tests/rollout/test_vllm_server.py", "-k", "busy"],
    "vllm_checks": ["tests/rollout/test_vllm_server.py", "-k", "another_ or shapes"],
    "vllm_faults": ["tests/rollout/test_vllm_faults.py"],
    "vllm_open": ["tests/rollout/test_vllm_server.py", "-k", "open or whole_transfer"],
    "vllm_secrets": ["tests/rollout/test_vllm_server.py", "-k", "not_shown or one_server or key"],
    "vllm_engine": ["tests/rollout/test_vllm_engine.py"],
    "decode": ["tests/rollout/test_decode.py"],
    "csrc_attention": ["tests/attention/test_attention_csrc.py"],
    "csrc_cache": ["tests/rollout/test_decode.py"],
    "csrc_decode": ["tests/kernels/test_decode_cpu.py"],
    "engines": ["tests/rollout/test_engine.py", "tests/rollout/test_continuous.py"],
    "agreement": ["tests/train/test_agreement.py"],
    "policy": ["tests/train/test_train_policy.py"],
    "data": ["tests/data/test_data.py"],
    "words": ["tests/train/test_words.py", "-k", "not hostile"],
    "words_hostile": ["tests/train/test_words.py", "-k", "hostile and train"],
    "compare": ["tests/train/test_compare.py", "-k", "not command"],
    "variance": ["tests/train/test_variance.py", "-k", "not baseline"],
    "train": ["tests/train/test_train_loop.py", "-k", "in_another_step or in_a_row"],
    "ppo_math": ["tests/objective/test_value_losses.py", "tests/objective/test_advantages.py"],
    "ppo_step": ["tests/train/test_ppo_step.py"],
    "ppo_critic": ["tests/train/test_ppo_runs.py", "-k", "critic_path or own_rate"],
    "ppo_passes": [
        "tests/train/test_ppo_runs.py",
        "-k",
        "keeps_the_values or shuffled or early_stop or rate_that",
    ],
    "ppo_kl": ["tests/train/test_ppo_runs.py", "-k", "beta or adapted or fifth"],
    "completions": ["tests/train/test_completions.py", "-k", "not browser"],
    "trackers": ["tests/train/test_trackers.py"],
    "paired": ["tests/train/test_paired.py"],
    "eval": ["tests/train/test_eval_command.py"],
    "evaluate": ["tests/train/test_evaluate.py"],
    "small_sets": ["tests/data/test_data.py", "tests/train/test_small_sets.py"],
    "levels": ["tests/loss/test_loss_traps.py", "-k", "summed or of_its_prob"],
    "advantages": ["tests/objective/test_advantages.py", "-k", "constant_baseline"],
    "divergence": ["tests/loss/test_divergence.py"],
    "csrc_divergence": ["tests/loss/test_divergence.py", "-k", "cpu or fp64 or sets"],
    "divergence_term": ["tests/loss/test_divergence_term.py"],
    "distill": ["tests/train/test_distill.py", "-k", "teacher"],
    "exact_kl_training": ["tests/train/test_exact_kl_training.py", "-k", "not of_the_run"],
    "baseline": ["tests/train/test_running_baseline.py"],
    "lecture": ["tests/train/test_lecture.py", "-k", "not learns and not log and not saved"],
    "csrc": [
        "tests/kernels/test_csrc_loss.py",
        "tests/kernels/test_csrc.py",
        "-k",
        "not loader and not instruction_sets and not gemm and not added and not printer",
    ],
    "csrc_gemm": ["tests/kernels/test_gemm_cpu.py"],
    "csrc_linear": ["tests/kernels/test_linear_cpu.py"],
    "nan": ["tests/loss/test_nan_is_seen.py", "-k", "torch"],
    "csrc_inplace": ["tests/loss/test_loss_autograd.py", "-k", "inplace and cpu"],
    "csrc_nan": ["tests/loss/test_nan_is_seen.py", "-k", "cpu"],
    "triton_nan": ["tests/kernels/triton_tools/cases_nan.py", "-k", "every_loss"],
    "triton_inert": ["tests/kernels/triton_tools/cases_nan.py", "-k", "inert"],
    "devices": ["tests/kernels/test_gpu_device.py", "-k", "not cut_off"],
    "continuous": ["tests/rollout/test_continuous.py", "-k", "words"],
    "plan": ["tests/train/test_memory_model.py", "-k", "known_model"],
    "triton_range": ["tests/kernels/triton_tools/cases_range.py", "-k", "transposed"],
    "workspace": ["tests/kernels/test_workspace.py", "-k", "not measured"],
    "rewards": ["tests/rewards/test_rewards_hostile.py", "-k", "changes_its_lists"],
    "workers": ["tests/rewards/test_reward_workers.py", "-k", "not mathematics"],
    "code_tests": [
        "tests/rewards/test_code_tests.py",
        "-k",
        "share or own_time or (hostile and sleeps)",
    ],
    "code_tests_socket": ["tests/rewards/test_code_tests.py", "-k", "connected"],
    "code_tests_all": ["tests/rewards/test_code_tests.py", "-k", "hostile and writes"],
    "code_tests_limit": ["tests/rewards/test_code_tests.py", "-k", "per_completion"],
    "code_tests_exit": ["tests/rewards/test_code_tests.py", "-k", "exits"],
    "code_tests_block": ["tests/rewards/test_code_tests.py", "-k", "last_block"],
    "code_tests_check": ["tests/rewards/test_code_tests.py", "-k", "preparations"],
    "per_token": ["tests/rewards/test_rewards_per_token.py"],
    "process": ["tests/objective/test_advantages.py", "-k", "process"],
    "page_seen": ["tests/train/test_page_seen.py"],
    "told_progress": [
        "tests/train/test_report.py",
        "tests/train/test_train_loop.py",
        "-k",
        "terminal or bar or near_0 or progress",
    ],
    "per_token_ranks": ["tests/train/test_ranks.py", "-k", "per-token and ddp"],
    "told_offline": ["tests/train/test_talking.py", "-k", "network or folder_that"],
    "talking": ["tests/train/test_talking.py", "-k", "not network"],
    "token_rewards": ["tests/train/test_token_rewards.py", "-k", "not goes_on"],
    "loss_curves": ["tests/train/test_loss_curves.py"],
    "shaping": ["tests/rewards/test_reward_shaping.py"],
    "scorer": ["tests/train/test_reward_model.py", "-k", "not to_a_policy"],
    "dynamic": ["tests/train/test_dynamic_sampling.py", "-k", "not repeats_itself"],
    "causal_lm": ["tests/integrations/test_integration_examples.py", "-k", "heads_logits"],
    "late": ["tests/loss/test_late_checks.py"],
    "attention": ["tests/attention/test_attention.py"],
    "trees": ["tests/attention/test_trees.py"],
    "recorded": ["tests/integrations/test_recorded_trees.py"],
    "offline": ["tests/train/test_recorded.py", "-k", "flattened"],
    "tree_kernels": ["tests/attention/test_attention_kernels.py"],
    "csrc_sums": [
        "tests/loss/test_chunks.py",
        "tests/kernels/test_grad_filter.py",
        "tests/loss/test_contract_accuracy.py",
        "-k",
        "fused",
    ],
    "triton_rows": ["tests/kernels/triton_tools/cases_rows.py", "-k", "logps_and_gradient"],
    "triton_kl": ["tests/kernels/triton_tools/cases_rows.py", "-k", "every_kl"],
    "triton_leaf": ["tests/kernels/triton_tools/cases_rows.py", "-k", "every_leaf"],
    "triton_linear": ["tests/kernels/triton_tools/cases_linear.py"],
    "triton_gradients": ["tests/kernels/triton_tools/cases_gradients.py"],
    "triton_weights": ["tests/kernels/triton_tools/cases_weights.py"],
    "doctor": ["tests/doctor/test_diagnosis.py"],
    "doctor_plants": ["tests/doctor/test_plants.py"],
    "doctor_views": ["tests/doctor/test_views.py"],
    "doctor_selftest": ["tests/doctor/test_selftest.py"],
    "doctor_command": ["tests/doctor/test_doctor_command.py"],
    "triton_support": ["tests/kernels/triton_tools/cases_support.py", "-k", "not 1030"],
    "triton_support_public": [
        "tests/kernels/triton_tools/cases_support_public.py",
        "-k",
        "every_row or hidden_rows or differentiable or bonus",
    ],
    "triton_scale": ["tests/kernels/triton_tools/cases_scale.py"],
}


class Mutant(NamedTuple):
    """One planted bug.

    Attributes:
        name: unique; the file's kind first.
        file: path in the repository.
        old, new: `old` occurs exactly once in the file and is replaced by `new`.
        why: what a reader of the code would call the mistake.
        suite: the tests that must see it, a name of `SUITES`.
    """

    name: str
    file: str
    old: str
    new: str
    why: str
    suite: str

    @property
    def engine(self) -> str:
        """Who computes: "torch" (no C++ kernels), "csrc" or "triton" (its interpreter)."""
        return (
            self.suite.partition("_")[0] if self.suite.startswith(("csrc", "triton")) else "torch"
        )


def all_mutants() -> list[Mutant]:
    """Every planted bug, the quick ones first."""
    areas = (importlib.import_module(f"tests.mutation.{area}") for area in AREAS)
    return [m for area in areas for m in area.MUTANTS]


def problems(mutants: list[Mutant], read) -> list[str]:
    """What is wrong with the list: a name twice, a pattern that does not occur exactly once."""
    found = [
        f"{m.name}: the name occurs twice"
        for i, m in enumerate(mutants)
        if m.name in {x.name for x in mutants[:i]}
    ]
    for m in mutants:
        count = read(m.file).count(m.old)
        if count != 1:
            found.append(f"{m.name}: the pattern occurs {count} times in {m.file}: {m.old!r}")
        if m.old == m.new or m.suite not in SUITES:
            found.append(f"{m.name}: replaces nothing, or names an unknown suite")
    return found

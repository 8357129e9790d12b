"""What a planted bug is, the tests that must see it, and the whole list.

A bug is an exact textual replacement, so it is read as easily as it is planted. None of them is
equivalent to the original: each changes a loss, a gradient or a refusal for inputs that the
documentation allows.
"""

from __future__ import annotations

import ast
import importlib
from typing import NamedTuple

# The modules of this package that plant bugs, in the order of `all_mutants`: the quick ones first.
AREAS = (
    "objectives loss divergences train train_checkpoint train_compare train_words "
    "train_objectives train_ppo train_ranks train_replay train_rewards train_seeing "
    "train_unnoticed vllm heads kernels gradients products shards devices integrations "
    "attention_cpu trees windows rollout support support_triton doctor"
).split()

# What pytest is given for each kind of bug, in tests/: the fitting tests, fast enough to be run once
# per bug.
SUITES: dict[str, str] = {
    "windows": "attention/test_windows.py",
    "trl_window": "integrations/test_trl_parity.py -k 'test_families and moe'",
    "leaves": "objective/test_objectives.py",
    "estimators": "objective/test_objectives.py objective/test_published_numbers.py -k 'kl or k3'",
    "traps": "loss/test_loss_traps.py",
    "logps": "loss/test_loss_parity.py -k 'logps or totals or kl_estimators'",
    "kl": "loss/test_loss_parity.py -k kl",
    "sweeps": "loss/test_loss_parity.py -k sweeps",
    "sampling": "loss/test_loss_extras.py -k 'sampling or sampler or at_once'",
    "advantage_modes": "objective/test_advantages.py",
    "prompts": "loss/test_loss_extras.py -k prompts",
    "whole_entropy": "loss/test_support.py -k whole_vocabulary",
    "off_policy": "loss/test_loss_extras.py -k off_policy",
    "entropy": "loss/test_loss_extras.py -k 'entropy and not metrics'",
    "rules": "loss/test_loss_extras.py -k 'softcap or temperature or oracle'",
    "inert": "loss/test_contract_poison.py",
    "accuracy": "loss/test_contract_accuracy.py -k 'confident or many_chunks'",
    "edges": "loss/test_loss_edge_shapes.py -k 'not two_to_the_31'",
    "refusals": "loss/test_refusals.py",
    "splits": "loss/test_splits.py",
    "autograd": "loss/test_loss_autograd.py",
    "table": "loss/test_argument_table.py "
    "-k 'graph and (support or hidden_rows or group) and linear'",
    "carried": "loss/test_compile.py -k no_schema",
    "csrc_self_check": "kernels/test_gemm_cpu.py -k self_check",
    "grad_filter": "kernels/test_grad_filter.py -k 'masses or one_chunk or chunk'",
    "hidden_rows": "loss/test_hidden_rows.py",
    "graphs": "gpu/test_cuda_graphs.py",
    "chunks": "loss/test_chunks.py",
    "kept": "loss/test_kept_logits.py",
    "entropy_gradient": "loss/test_loss_extras.py -k logps_functions",
    "metrics": "loss/test_loss_extras.py -k metrics",
    "range": "loss/test_gradient_range.py",
    "sharded": "integrations/test_sharded_heads.py -k 'of_one_process and 2'",
    "ranks": "integrations/test_lightning.py -k two_ranks",
    "two_processes": "integrations/test_two_processes.py -k 'ends_in_the_same and dapo'",
    "checkpoint_files": "train/test_checkpoints.py "
    "-k 'damaged or best or middle_of_a_save or full_disk'",
    "checkpoint_bits": "train/test_checkpoints.py -k left_goes_on_bit_for_bit",
    "checkpoint_kept": "train/test_checkpoints.py -k 'bit_for_bit and kept'",
    "replay": "train/test_replay.py",
    "ahead": "train/test_ahead.py",
    "ahead_ranks": "train/test_ranks.py -k 'what_one_does and apart'",
    "ahead_bits": "train/test_ahead.py -k stand_still",
    "totals": "train/test_totals.py",
    "checkpoint_random": "train/test_checkpoints.py -k torchs_own",
    "checkpoint_path": "train/test_checkpoints.py -k 'path_of or cannot_take'",
    "prompt_rows": "rollout/test_decode.py -k fit_it",
    "decode_check": "rollout/test_decode.py -k behind_an_eos",
    "zero_loss": "train/test_train_loop.py -k is_explained",
    "checkpoint_attacks": "train/test_attacked_checkpoints.py",
    "checkpoint_prints": "train/test_fingerprints.py",
    "ranks_order": "train/test_ranks.py -k no_order_behind",
    "ranks_dealt": "train/test_ranks.py -k rank_0_reads",
    "ranks_apart": "train/test_ranks.py -k 'differently or other_data'",
    "checkpoint_warm": "train/test_checkpoints.py -k 'warm and start'",
    "checkpoint_loop": "train/test_checkpoints.py -k 'passes or configuration or remembered'",
    "ranks_mu": "train/test_ranks.py -k 'does and mu and not 4'",
    "ranks_few": "train/test_ranks.py -k 'does and few and not 4'",
    "ranks_local": "train/test_ranks.py -k 'does and local'",
    "ranks_ppo": "train/test_ranks.py -k 'does and ppo and not shared and not 4'",
    "ranks_exact": "train/test_ranks.py -k 'does and exact'",
    "ranks_left": "train/test_ranks.py -k 'goes_on and (mu-fsdp2 or mu-ddp)'",
    "ranks_memory": "train/test_ranks.py -k halves",
    "ranks_ended": "train/test_ranks.py -k killed",
    "ranks_refused": "train/test_ranks.py -k 'refused or do_not_fit'",
    "checkpoint_ends": "train/test_endings.py -k 'whole_or_absent or audit'",
    "shards": "loss/test_vocabulary_shards.py -k '2- or chunks'",
    "support": "loss/test_support.py -k 'not every_loss and not aggregations and not threads'",
    "support_refusals": "loss/test_support.py -k refus",
    "support_doors": "kernels/test_support_doors.py",
    "csrc_support": "kernels/test_support_doors.py",
    "csrc_shards": "loss/test_vocabulary_shards.py -k '2- and cpu'",
    "training": "train/test_train_loop.py train/test_train_metrics.py",
    "optimizer": "train/test_train_loop.py -k 'schedules or bad_gradient or in_a_row'",
    "rollout": "rollout/test_rollout.py",
    "trl_rollouts": "integrations/test_trl_rollouts.py -k 'not greedy and not calculator'",
    "generate": "rollout/test_generate.py",
    "vllm": "rollout/test_vllm_server.py -k 'not busy and not url and not one_server'",
    "vllm_busy": "rollout/test_vllm_server.py -k busy",
    "vllm_checks": "rollout/test_vllm_server.py -k 'another_ or shapes'",
    "vllm_teacher": "rollout/test_vllm_teacher.py",
    "trl_distillation": "integrations/test_trl_distillation.py -k 'not autocast'",
    "ranks_distill": "train/test_ranks.py -k 'does and distill and not 2'",
    "vllm_faults": "rollout/test_vllm_faults.py",
    "vllm_open": "rollout/test_vllm_server.py -k 'open or whole_transfer'",
    "vllm_secrets": "rollout/test_vllm_server.py -k 'not_shown or one_server or key'",
    "vllm_engine": "rollout/test_vllm_engine.py",
    "decode": "rollout/test_decode.py",
    "csrc_attention": "attention/test_attention_csrc.py",
    "csrc_windows": "attention/test_windows.py -k deepseek",
    "csrc_cache": "rollout/test_decode.py",
    "csrc_decode": "kernels/test_decode_cpu.py",
    "csrc_decoder": "rollout/test_decoder.py",
    "engines": "rollout/test_generate.py rollout/test_continuous.py",
    "agreement": "train/test_train_metrics.py -k 'far_apart or cause or stale'",
    "policy": "train/test_train_policy.py",
    "data": "data/test_data.py",
    "words": "train/test_words.py -k 'not hostile'",
    "words_hostile": "train/test_words.py -k 'hostile and train'",
    "compare": "train/test_compare.py -k 'not command'",
    "variance": "train/test_totals.py -k variance",
    "train": "train/test_train_loop.py -k 'in_another_step or in_a_row'",
    "ppo_math": "objective/test_value_losses.py objective/test_advantages.py",
    "ppo_step": "train/test_ppo_step.py",
    "ppo_critic": "train/test_ppo_runs.py -k 'critic_path or own_rate'",
    "ppo_passes": "train/test_ppo_runs.py "
    "-k 'keeps_the_values or shuffled or early_stop or rate_that'",
    "ppo_kl": "train/test_ppo_runs.py -k 'beta or adapted or fifth'",
    "completions": "train/test_completions.py",
    "trackers": "train/test_trackers.py",
    "paired": "train/test_evaluate.py -k 'p_is or p_of or mcnemars or signs or real or pair'",
    "eval": "train/test_eval_command.py",
    "evaluate": "train/test_evaluate.py",
    "small_sets": "data/test_data.py train/test_small_sets.py",
    "levels": "loss/test_loss_traps.py -k 'summed or of_its_prob'",
    "advantages": "objective/test_advantages.py -k constant_baseline",
    "divergence": "loss/test_divergence.py",
    "csrc_divergence": "loss/test_divergence.py -k cpu",
    "divergence_term": "loss/test_divergence_term.py",
    "distill_refused": "train/test_words.py -k 'refusals and distill'",
    "distill": "train/test_teachers.py -k 'exact_kl or alone or an_advantage or server'",
    "exact_kl_training": "train/test_teachers.py "
    "-k 'own_logits or references_logps or packing or fit_the_policy'",
    "baseline": "train/test_step_advantages.py -k 'steps or measured or gdpo'",
    "lecture": "train/test_lecture.py -k 'not learns and not saved and not notebook'",
    "csrc": "kernels/test_rows.py",
    "csrc_gemm": "kernels/test_gemm_cpu.py",
    "csrc_layers": "kernels/test_layers_cpu.py",
    "csrc_linear": "kernels/test_head.py",
    "nan": "loss/test_nan_is_seen.py -k torch",
    "csrc_inplace": "loss/test_loss_autograd.py -k 'inplace and cpu'",
    "csrc_nan": "loss/test_nan_is_seen.py -k cpu",
    "triton_nan": "loss/test_nan_is_seen.py -k 'triton and every_loss and (grpo or dro)'",
    "triton_inert": "kernels/test_rows.py -k inert",
    "devices": "kernels/test_gpu_device.py -k 'not cut_off'",
    "continuous": "rollout/test_continuous.py -k words",
    "plan": "train/test_memory_model.py -k known_model",
    "triton_range": "kernels/triton_tools/cases_range.py -k transposed",
    "workspace": "kernels/test_workspace.py -k 'not measured'",
    "rewards": "rewards/test_rewards_hostile.py -k changes_its_lists",
    "workers": "rewards/test_reward_workers.py -k 'not mathematics'",
    "code_tests": "rewards/test_code_tests.py -k 'share or own_time or (hostile and sleeps)'",
    "code_tests_socket": "rewards/test_code_tests.py -k connected",
    "code_tests_all": "rewards/test_code_tests.py -k 'hostile and writes'",
    "code_tests_limit": "rewards/test_code_tests.py -k per_completion",
    "code_tests_exit": "rewards/test_code_tests.py -k share",
    "isolated": "rewards/test_rewards_isolated.py",
    "code_tests_block": "rewards/test_code_tests.py -k last_block",
    "code_tests_check": "rewards/test_code_tests.py -k preparations",
    "per_token": "rewards/test_reward_shaping.py -k 'token or row or tensors'",
    "process": "objective/test_advantages.py -k process",
    "page_seen": "train/test_page_seen.py",
    "pictures": "train/test_report.py -k mathematics",
    "told_progress": "train/test_report.py train/test_train_loop.py -k 'terminal or clip_say'",
    "per_token_ranks": "train/test_ranks.py -k 'per-token and ddp'",
    "told_offline": "train/test_talking.py -k 'network or folder_that'",
    "talking": "train/test_talking.py -k 'not network'",
    "token_rewards": "train/test_step_advantages.py -k 'token or lost'",
    "loss_curves": "train/test_loss_curves.py",
    "shaping": "rewards/test_reward_shaping.py -k 'overlong or penalty or tag or sense'",
    "scorer": "train/test_reward_model.py",
    "dynamic": "train/test_dynamic_sampling.py -k 'not repeats_itself'",
    "causal_lm": "integrations/test_integration_examples.py -k heads_logits",
    "late": "loss/test_late_checks.py",
    "attention": "attention/test_attention.py",
    "trees": "attention/test_trees.py",
    "recorded": "integrations/test_recorded_trees.py",
    "offline": "train/test_recorded.py -k flattened",
    "tree_support": "attention/test_trees.py -k supports_and",
    "tree_memory": "train/test_memory_model.py -k 'sums_of or recorded'",
    "tree_kernels": "attention/test_attention_kernels.py",
    "csrc_sums": "loss/test_chunks.py kernels/test_grad_filter.py loss/test_contract_accuracy.py "
    "-k fused",
    "triton_rows": "kernels/test_rows.py -k 'test_numerics and (-127- or -2051- or -5000- or offsets)'",
    "triton_kl": "kernels/test_rows.py -k every_kl",
    "triton_leaf": "kernels/test_rows.py -k every_leaf",
    "triton_linear": "kernels/triton_tools/cases_tiles.py kernels/test_head.py "
    "-k 'triton_tools or triton and (infinity or values)'",
    "triton_gradients": "kernels/triton_tools/cases_gradients.py",
    "triton_weights": "kernels/triton_tools/cases_launches.py kernels/test_head.py "
    "-k 'triton_tools or triton and (far_below or bad_row or values)'",
    "doctor": "doctor/test_diagnosis.py",
    "doctor_plants": "doctor/test_plants.py",
    "doctor_views": "doctor/test_views.py",
    "doctor_selftest": "doctor/test_selftest.py",
    "doctor_command": "doctor/test_doctor_command.py",
    "triton_support": "kernels/test_support_doors.py -k 'triton and not 1030'",
    "triton_support_public": "loss/test_support.py "
    "-k 'triton and (aggregations or one_hidden or logps_entropies or extras or no_row_has)'",
    "triton_scale": "kernels/triton_tools/cases_scale.py",
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
    """What is wrong with the list: a name twice, a pattern that does not occur exactly once, Python
    that does not parse once the bug is planted.
    """
    found = [
        f"{m.name}: the name occurs twice"
        for i, m in enumerate(mutants)
        if m.name in {x.name for x in mutants[:i]}
    ]
    for m in mutants:
        count = read(m.file).count(m.old)
        if count != 1:
            found.append(f"{m.name}: the pattern occurs {count} times in {m.file}: {m.old!r}")
        elif m.file.endswith(".py"):
            try:
                ast.parse(read(m.file).replace(m.old, m.new))
            except SyntaxError as error:
                found.append(f"{m.name}: {error}")
        if m.old == m.new or m.suite not in SUITES:
            found.append(f"{m.name}: replaces nothing, or names an unknown suite")
    return found

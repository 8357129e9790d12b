"""Tests of the names in metrics.jsonl, of `perf/mfu`, and of the warning about the sampler."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from grpo_fast.attention import pack_groups
from grpo_fast.rollout import Completion, Sampling
from grpo_fast.rollout.own.engine import TransformersEngine
from grpo_fast.train import loop
from grpo_fast.train.metrics import clock as metrics
from grpo_fast.train.metrics.samples import SamplerWatch
from grpo_fast.train.models.policy import Policy
from tests.tiny import tiny_folder, tiny_model
from tests.train.resuming import config_of
from tests.train.tiny_runs import logged, sort

KL = ["loss.beta=0.1", "reference.kind=frozen", "inner_iterations=2", "minibatches=2"]
# These metrics must have the same names as in TRL, because dashboards use the names. The metrics
# perf/mfu and perf/peak_memory_gib are missing here, because only runs on a GPU log them.
NAMES = {
    *"loss grad_norm learning_rate num_tokens step_time reward reward_std kl entropy".split(),
    *"policy_loss frac_reward_zero_std completions/clipped_ratio".split(),
    *"perf/rollout_tok_s perf/train_tok_s".split(),
    *(
        f"completions/{how}_{which}length"
        for how in ("mean", "min", "max")
        for which in ("", "terminated_")
    ),
    *(f"rewards/sort_positions/{how}" for how in ("mean", "std")),
    *(
        f"clip_ratio/{side}_{how}"
        for side in ("low", "high", "region")
        for how in ("mean", "min", "max")
    ),
    *(f"sampling/sampling_logp_difference/{how}" for how in ("mean", "max")),
    *(f"sampling/importance_sampling_ratio/{how}" for how in ("min", "mean", "max")),
}

pytestmark = pytest.mark.usefixtures("no_pictures")


def steps_of(folder, *overrides):
    sort(folder, "loss.compute_entropy=true", "steps=2", *overrides)
    return [line for line in logged(folder) if "loss" in line]


def test_every_name_is_there_and_a_cpu_has_no_mfu(tmp_path):
    for row in steps_of(tmp_path / "run", *KL):
        assert NAMES <= row.keys(), sorted(NAMES - row.keys())
        assert "perf/mfu" not in row
    assert "policy_grad_norm" in steps_of(tmp_path / "alone", "loss.entropy_coef=0")[0]


@pytest.mark.parametrize(
    ("overrides", "forward", "updates"), [([], 0, 1), (KL, 2, 2), (["loss.beta=0"], 0, 1)]
)
def test_mfu_of_a_step(tmp_path, monkeypatch, overrides, forward, updates):
    """Check that `perf/mfu` is the number of FLOPs, divided by the time and the peak FLOP/s.

    The FLOPs are those of all forward passes and updates of the step.
    """
    monkeypatch.setattr(metrics, "peak_flops", lambda device: 1e12)
    seen = []
    for name, flops in (("forward", 1000), ("update", 1)):
        work = lambda self, *counts, flops=flops: seen.append(counts) or flops  # noqa: E731
        monkeypatch.setattr(metrics.Work, name, work)
    rows = steps_of(tmp_path / "run", *overrides)
    for row in rows:
        flops = 1000 * forward + updates
        assert row["perf/mfu"] == pytest.approx(flops / row["perf/train_time"] / 1e12)
    tokens, scored = seen[0]
    assert tokens == rows[0]["num_tokens"]
    assert scored == pytest.approx(16 * rows[0]["completions/mean_length"])


# The LM head of the tiny llama is a separate weight. The head of the tiny qwen2 is tied to the
# embedding.
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("frozen", [False, True])
def test_flops_against_torchs_counter(tmp_path, family, frozen):
    from transformers import AutoTokenizer

    lm = tiny_model(family)
    if frozen:
        for layer in lm.base_model.layers:
            layer.mlp.requires_grad_(False)
    policy = Policy(lm, AutoTokenizer.from_pretrained(tiny_folder(tmp_path / "tokenizer")))
    packed = pack_groups([([5, 6, 7, 8], [[9, 10, 11], [12, 13]])])
    tokens, rows = packed.layout.total, len(packed.target_ids)
    work = metrics.Work(policy.lm)

    def products(*, backward):
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
            logits = policy.hidden(packed)[packed.predicting] @ policy.head.weight.T
            if backward:
                logits.sum().backward()
        found = counter.get_flop_counts()["Global"]
        return sum(flops for name, flops in found.items() if str(name) in ("aten.mm", "aten.addmm"))

    assert products(backward=False) == work.forward(tokens, rows)
    assert products(backward=True) == work.update(tokens, rows)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", 989e12), ("NVIDIA H200 NVL", 835e12), ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12), ("NVIDIA H200 MIG 1g.18gb", None), ("NVIDIA H20", None),
        ("NVIDIA A10", None), ("AMD Instinct MI300X", None),
    ],
)  # fmt: skip
def test_the_peak_of_a_gpu(monkeypatch, name, expected):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert metrics.peak_flops(torch.device("cuda", 0)) == expected
    assert metrics.peak_flops(torch.device("cpu")) is None


# --------------------------------------- The warning if sampler and trainer compute different logps
PAIRS = [(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.0])), (torch.zeros(2),) * 2]


def moved(by):
    return [(ours, samplers + by) for ours, samplers in PAIRS]


def test_it_is_said_once_and_only_when_far_apart(caplog):
    watch = SamplerWatch(Sampling())
    for step, pairs in enumerate(([], [(torch.zeros(0),) * 2], PAIRS, moved(0.049))):
        watch.look(step, pairs)
    assert not caplog.messages
    watch.look(5, moved(-0.3))
    watch.look(6, moved(0.3))
    (said,) = caplog.messages
    assert said.startswith("step 5: the sampler's and the trainer's logps are 0.3 nats apart")
    assert "stale weights" in said and "top_p" not in said


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 4}])
def test_truncation_is_named_as_a_cause(options, caplog):
    SamplerWatch(Sampling(**options)).look(1, moved(1.0))
    assert "the mass that top_k and top_p leave out" in caplog.text


@pytest.mark.usefixtures("no_pictures")
def test_a_run_with_stale_weights_says_so(tmp_path, monkeypatch, caplog):
    original = TransformersEngine.generate

    def stale(self, *arguments, **options):
        done = original(self, *arguments, **options)
        return [Completion(one.ids, one.logps - 0.5, *one[2:]) for one in done]

    monkeypatch.setattr(TransformersEngine, "generate", stale)
    loop.train(config_of(tmp_path / "run", "steps=2", "eval.every=0"))
    assert caplog.text.count("nats apart per token") == 1 and "step 1:" in caplog.text

"""Tests of our losses and our fused head against verl's: losses, gradients and metrics."""

import importlib
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from grpo_fast import TeacherTopK, linear_divergence
from tests.command_line import ROOT
from tests.integrations import packages
from tests.tiny import tiny_model

with packages.skipping():
    core = packages.load_verl("verl.trainer.ppo.core_algos")
ActorConfig = importlib.import_module("verl.workers.config").ActorConfig
ours = importlib.import_module("grpo_fast.integrations.verl.losses")
head = importlib.import_module("grpo_fast.integrations.verl.head")

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm",
         "seq-mean-token-mean")  # fmt: skip
CLIPPED = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}
# Options of verl's config for some losses. dppo gets small clip ranges, so that some tokens exceed
# them.
CONFIGS = {
    "dppo_tv": {"clip_ratio_low": 0.02, "clip_ratio_high": 0.05},
    "dppo_kl": {"clip_ratio_low": 1e-3},
}


def actor(loss_mode: str = "vanilla", info: dict | None = None, **changes):
    fields = {**CLIPPED, "clip_ratio_c": 2.0, "tau_pos": 1.3, "tau_neg": 1.7}
    fields |= CONFIGS.get(loss_mode, {}) | changes
    config = ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=4, **fields)
    config.global_batch_info.update(info or {})
    if loss_mode == "dro":
        object.__setattr__(config.policy_loss, "dro_beta", 0.3)
    return config


def batch(step: float = 0.4, weights: bool = False, seed: int = 0) -> dict:
    """Return a batch that reaches every branch of a loss.

    The mask has gaps, and one completion has no active token. Log ratios grow with `step`. With
    `weights`, the batch has rollout importance weights.
    """
    rows, length = 6, 9
    random = torch.Generator().manual_seed(seed)
    old = -2.5 * torch.rand(rows, length, generator=random) - 0.01
    new = (old + step * torch.randn(rows, length, generator=random)).clamp(max=-1e-3)
    mask = (torch.rand(rows, length, generator=random) > 0.25).long()
    mask[2] = 0
    advantages = torch.randn(rows, 1, generator=random).expand(rows, length).contiguous()
    ratios = torch.rand(rows, length, generator=random) * 2 if weights else None
    return {"old_log_prob": old, "log_prob": new, "advantages": advantages, "response_mask": mask,
            "rollout_is_weights": ratios}  # fmt: skip


def run(function, data: dict, mode: str, config) -> tuple:
    log_prob = data["log_prob"].clone().requires_grad_()
    loss, metrics = function(**{**data, "log_prob": log_prob}, loss_agg_mode=mode, config=config)
    loss.backward()
    return loss.detach(), log_prob.grad, metrics


def compare(name: str, data: dict, mode: str, config) -> None:
    theirs = run(core.get_policy_loss_fn(name), data, mode, config)
    mine = run(ours.policy_loss(name), data, mode, config)
    torch.testing.assert_close(mine[0], theirs[0], **TOLERANCE)
    torch.testing.assert_close(mine[1], theirs[1], **TOLERANCE)
    assert list(mine[2]) == list(theirs[2])
    for key, value in theirs[2].items():
        assert isinstance(mine[2][key], float), key
        assert mine[2][key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", list(ours.LOSSES))
def test_loss_gradient_and_metrics(name, mode):
    """Check that our losses and verl's losses have equal values, gradients and metrics.

    The test runs with and without counts over all ranks, and with and without rollout weights.
    """
    whole_step = {"dp_size": 4, "batch_num_tokens": 230, "global_batch_size": 24}
    whole_step["loss_scale_factor"] = 128
    for info in ({}, whole_step, {**whole_step, "dp_size": 1, "loss_scale_factor": None}):
        for weights in (False, True) if name != "dro" else (False,):
            compare(name, batch(weights=weights), mode, actor(name, info))
    # Check completions whose token advantages have both signs, as with GAE.
    data = batch(weights=name != "dro", seed=5)
    data["advantages"] = torch.randn(6, 9, generator=torch.Generator().manual_seed(1))
    compare(name, data, mode, actor(name))


@pytest.mark.parametrize("name", list(ours.LOSSES))
@pytest.mark.parametrize("step", [0.0, 4.0, 40.0])
def test_on_policy_and_far_off_policy(name, step):
    """Check the losses at a ratio of exactly 1, and at log ratios above 20.

    verl clamps log ratios to at most 20.
    """
    if step == 40.0 and name == "geo_mean":
        # With a step of 40, the ratio would underflow to 0, and both gradients would be 0.
        step = 10.0
    data = batch(step=step, seed=3)
    if name == "dro":
        data["log_prob"] = data["log_prob"].clamp(min=-30.0)
    compare(name, data, "token-mean", actor(name))


@pytest.mark.parametrize("value", [float("nan"), 0.5])
def test_gpg_does_not_read_the_old_log_probabilities(value):
    data = {**batch(), "old_log_prob": torch.full((6, 9), value)}
    compare("gpg", data, "token-mean", actor("gpg"))


def test_the_data_reaches_every_branch():
    """Check that the losses clip some tokens of the test batch, but not all.

    Otherwise the other tests would not test clipping.
    """

    def share(name, data, metric):
        metrics = run(core.get_policy_loss_fn(name), data, "token-mean", actor(name))[2]
        return metrics[f"actor/{metric}"]

    for name in ("vanilla", "cispo", "dppo_tv", "dppo_kl", "geo_mean", "gspo"):
        assert 0.02 < share(name, batch(), "pg_clipfrac") < 0.9, name
    for name in ("vanilla", "dppo_kl"):
        assert 0.02 < share(name, batch(step=4.0, seed=3), "pg_clipfrac_lower") < 0.9, name
    config = actor(clip_ratio=0.05, clip_ratio_low=None, clip_ratio_high=None)
    compare("vanilla", batch(), "token-mean", config)


@pytest.mark.parametrize("name", ["vanilla", "gspo", "geo_mean"])
def test_masks_of_every_dtype_and_what_they_hide(name):
    data = batch()
    expected = run(ours.policy_loss(name), data, "token-mean", actor(name))
    for dtype in (torch.bool, torch.int64, torch.float32):
        hidden = {**data, "response_mask": data["response_mask"].to(dtype)}
        for key in ("old_log_prob", "log_prob", "advantages"):
            hidden[key] = torch.where(data["response_mask"].bool(), data[key], torch.nan)
        result = run(ours.policy_loss(name), hidden, "token-mean", actor(name))
        assert torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1])
        assert result[1].isfinite().all() and result[2] == expected[2]
    data = {**batch(), "response_mask": torch.zeros(6, 9)}
    for mode in MODES:
        loss, gradient, metrics = run(ours.policy_loss(name), data, mode, actor(name))
        assert loss == 0 and not gradient.any() and set(metrics.values()) == {0.0}


def refused(pattern: str, name: str = "vanilla", mode: str = "token-mean", config=None, **changes):
    config = config or actor(name)
    with pytest.raises(ValueError, match=pattern):
        ours.policy_loss(name)(**{**batch(), **changes}, loss_agg_mode=mode, config=config)


def test_refusals_name_the_option():
    refused("loss_agg_mode: expected one of", mode="token-median")
    refused("loss_agg_mode: expected one of", name="sapo", mode="token-median")
    refused("global_batch_info: expected .* got \\['rank'\\]", config=actor(info={"rank": 1}))
    two = actor(info={"dp_size": 2})
    refused("batch_num_tokens: expected .* dp_size = 2", config=two)
    refused("global_batch_size: expected .* dp_size = 2", mode=MODES[2], config=two)
    refused("policy_loss.dro_beta: expected a number > 0", name="dro", config=actor())
    refused("is_weights conflicts with dro", name="dro", rollout_is_weights=torch.ones(6, 9))
    refused("clip_ratio_c: expected a number > 1", config=actor(clip_ratio_c=1.0))
    refused("clip_ratio_low: expected", name="cispo", config=actor(clip_ratio_low=-0.1))
    uncapped = actor("dppo_tv", clip_ratio_c=0.0)
    refused("clip_ratio_c: expected a number > 0", name="dppo_tv", config=uncapped)
    single_zero = torch.ones(6, 9)
    single_zero[0, batch()["response_mask"][0].nonzero()[0]] = 0
    refused("advantages: .*one for a completion .geo_mean", name="geo_mean", advantages=single_zero)
    for name in ("clip_cov", "kl_cov", "bypass_mode", "ppo"):
        with pytest.raises(ValueError, match="loss_mode: expected one of"):
            ours.policy_loss(name)
    with pytest.raises(ValueError, match="config: expected"):
        ours.policy_loss("vanilla")(**batch())


def test_losses_and_head_of_the_process_are_given_back():
    functional = importlib.import_module("verl.utils.experimental.torch_functional")
    theirs, before = functional.FusedLinearForPPO, dict(core.POLICY_LOSS_REGISTRY)
    with ours.register(), head.use_fast_head() as handle:
        assert functional.FusedLinearForPPO is head.FastLinearForPPO
        added = core.POLICY_LOSS_REGISTRY.keys() - before.keys()
        assert added == {f"fast_{name}" for name in ours.LOSSES}
        both = core.get_policy_loss_fn("fast_gspo"), ours.policy_loss("gspo")
        assert torch.equal(*(run(loss, batch(), "token-mean", actor())[0] for loss in both))
        handle.undo()
        assert functional.FusedLinearForPPO is theirs
    assert before == core.POLICY_LOSS_REGISTRY and functional.FusedLinearForPPO is theirs


WORKER = """
from tests.integrations import packages
core = packages.load_verl("verl.trainer.ppo.core_algos")
functional = packages.load_verl("verl.utils.experimental.torch_functional")
print(core.get_policy_loss_fn("fast_gspo").__module__, functional.FusedLinearForPPO.__module__)
"""


def test_plugin_in_a_worker_process():
    """Check that the plugin works if verl imports it during its own import, as in Ray workers."""
    plugin = {"VERL_USE_EXTERNAL_MODULES": "grpo_fast.integrations.verl.plugin"}
    result = subprocess.run(
        [sys.executable, "-c", WORKER], env={**os.environ, **plugin, "GRPO_FAST_VERL_HEAD": "1"},
        capture_output=True, text=True, cwd=ROOT, timeout=120,
    )  # fmt: skip
    assert result.stdout.split() == [ours.__name__, head.__name__], result.stderr[-2000:]


@pytest.mark.parametrize(
    ("shape", "temperature", "autocast"),
    [((13,), 1.0, False), ((3, 5), 0.7, False), ((9,), 1.0, True)],
)
def test_head_equals_verls(shape, temperature, autocast):
    """Check that our head and verl's head have equal outputs and gradients.

    Under autocast, both heads must multiply in bf16.
    """
    functional = importlib.import_module("verl.utils.experimental.torch_functional")
    random = torch.Generator().manual_seed(0)
    results = []
    hidden = torch.randn(*shape, 16, generator=random)
    weight = torch.randn(67, 16, generator=random) * 0.4
    ids = torch.randint(0, 67, shape, generator=random)
    slopes = torch.randn(2, *shape, generator=random)
    for build in (functional.FusedLinearForPPO, head.FastLinearForPPO):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        made = build(chunk_size=4, impl_backend="torch")
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            log_probs, entropy = made(*leaves, ids, temperature=temperature)
        ((slopes[0] * log_probs).sum() + (slopes[1] * entropy).sum()).backward()
        results.append([log_probs.detach(), entropy.detach(), *(x.grad for x in leaves)])
    tolerance = {"rtol": 0.02, "atol": 0.05} if autocast else {"rtol": 1e-5, "atol": 1e-5}
    for theirs, mine in zip(*results, strict=True):
        assert mine.shape == theirs.shape and (autocast or mine.dtype == theirs.dtype)
        torch.testing.assert_close(mine.float(), theirs.float(), **tolerance)
    exact = (hidden @ weight.T / temperature).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    apart = (results[1][0] - exact).abs().max()
    assert 1e-4 < apart < 0.1 if autocast else apart < 1e-4


def test_the_head_takes_one_temperature():
    """Check a tensor of equal temperatures, as verl passes it, and one of several temperatures."""
    hidden, weight, ids = torch.randn(5, 16), torch.randn(67, 16), torch.randint(67, (5,))
    made = head.FastLinearForPPO()
    expected = made(hidden, weight, ids, temperature=0.5)
    for temperature in (torch.tensor(0.5), torch.full((5,), 0.5)):
        found = made(hidden, weight, ids, temperature=temperature)
        assert all(map(torch.equal, found, expected))
    several = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.5])
    for said, wrong in (
        ("one .* got numbers from 0.5 to 2.0", several),
        ("one .* got numbers from nan to nan", several * torch.nan),
        (r".* of input_ids, got shape \(0,\)", torch.empty(0)),
        (r".* of input_ids, got shape \(5, 1\)", torch.full((5, 1), 0.5)),
        (".* floating-point number.* in torch.bool", torch.ones(5, dtype=torch.bool)),
        ("a tensor without a gradient", torch.full((5,), 0.5, requires_grad=True)),
    ):
        with pytest.raises(ValueError, match=f"temperature: expected {said}"):
            made(hidden, weight, ids, temperature=wrong)
    with pytest.raises(ValueError, match=r"temperature: expected one .* got shape \(0,\)"):
        made(hidden[:0], weight, ids[:0], temperature=torch.empty(0))


@pytest.fixture
def patched_model(request):
    """Return a tiny model whose class verl has patched, and undo the patch after the test."""
    verl = importlib.import_module("verl.models.transformers.monkey_patch")
    family, backend = getattr(request, "param", ("qwen2", "torch"))
    model = tiny_model(family, num_hidden_layers=1)
    before = type(model).forward
    verl.patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend=backend)
    yield model
    type(model).forward = before


def test_fast_head_in_verls_forward(patched_model, spied):
    """Check that verl's patched forward gives the same results with our head."""
    model = patched_model
    ids = torch.arange(3, 27).view(2, 12)

    def once() -> list:
        model.zero_grad()
        out = model(input_ids=ids, temperature=0.8, return_dict=True, use_cache=False)
        (out.log_probs[:, :-1].sum() + 0.1 * out.entropy.sum()).backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        return [out.log_probs.detach(), out.entropy.detach(), *gradients]

    calls = spied(head.FastLinearForPPO, "forward")
    theirs = once()
    with head.use_fast_head():
        mine = once()
    assert len(calls) == 1
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    once()
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("patched_model", "change", "message"),
    [
        (("gemma2", "torch"), lambda m: None, "leaves out final_logit_softcapping = 3.0"),
        (("qwen2", "torch"), lambda m: setattr(m.config, "logit_scale", 0.5), "logit_scale = 0.5"),
        (("qwen2", "liger"), lambda m: m.lm_head.register_parameter(
            "bias", torch.nn.Parameter(torch.zeros(()))), "leaves out the bias of lm_head"),
        (("qwen2", "triton"), lambda m: None, "impl_backend: expected .*, got 'triton'"),
    ],
    indirect=["patched_model"],
    ids=["softcap", "scale", "bias", "triton"],
)  # fmt: skip
def test_fast_head_refuses_what_verls_forward_leaves_out(patched_model, change, message):
    change(patched_model)
    with head.use_fast_head(), pytest.raises(ValueError, match=message):
        patched_model(input_ids=torch.arange(4)[None], return_dict=True)


@pytest.mark.parametrize("chunked", [False, True])
def test_forward_kl_topk_leaves_the_tail_out(chunked):
    """Check that the loss of a `TeacherTopK` equals verl's top-k loss plus a term for the tail.

    The tail is all tokens outside the k most probable ones. verl's loss has no term for it.
    """
    module = importlib.import_module("verl.trainer.distillation.fsdp.losses")
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=g).requires_grad_() for n in (11, 40))
    top, ids = torch.randn(11, 40, generator=g).log_softmax(-1).topk(5)
    parts = ([x[:4], x[4:]] for x in (top, ids))
    nested = [torch.nested.as_nested_tensor(x, layout=torch.jagged) for x in parts]
    settings = SimpleNamespace(use_chunked_topk=chunked, log_prob_min_clamp=None)
    config = SimpleNamespace(distillation_loss=settings)
    logits = (hidden @ weight.T)[None]
    said = module.compute_forward_kl_topk(logits, *nested, config, "thd")
    rest, own = 1 - said["teacher_mass"][0], 1 - said["student_mass"][0]
    values = said["distillation_losses"][0] + rest * (rest.log() - own.log())
    out = linear_divergence(hidden, weight, TeacherTopK(ids, top), "forward_kl")
    torch.testing.assert_close(out.values, values, **TOLERANCE)
    found, wanted = (torch.autograd.grad(x, (hidden, weight)) for x in (out.loss, values.mean()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)

"""Stress tests on a real GPU.

They cover repeated calls while another stream is busy, long completions, and more than 2³¹ logits.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels import exact
from grpo_fast import LossConfig, linear_grpo_loss, linear_logps, logits_grpo_loss

pytestmark = pytest.mark.gpu
DEVICE, BACKEND, EPSILON = "cuda", "triton", 0.2
REPEATS = 1000
# Number of tokens in a long completion. The test of large logits also uses it as vocabulary size.
# It exceeds 65535, the limit of a grid dimension on a GPU.
LONG = 131072
# BAR is the maximum relative L2 error of a gradient, and is the limit that our documentation
# promises for bf16. LOSS_BAR is the maximum error of the loss, relative to the loss of one token.
BAR, LOSS_BAR = 3e-3, 2e-6
CONFIG = LossConfig(loss_type="dapo", epsilon_low=EPSILON, epsilon_high=EPSILON)


def random_tokens(n: int, vocab: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return random targets, one advantage and log ratios for one completion of n tokens.

    The log ratios are not close to the clip bounds.
    """
    log_ratio = torch.tensor([-0.6, -0.05, 0.0, 0.08], device=DEVICE)[
        torch.randint(4, (n,), generator=generator, device=DEVICE)
    ]
    return {
        "target_ids": torch.randint(vocab, (n,), generator=generator, device=DEVICE),
        "advantages": torch.tensor([0.7], device=DEVICE),
        "log_ratio": log_ratio,
        "cu_seqlens": torch.tensor([0, n], dtype=torch.int32, device=DEVICE),
    }


def linear_inputs(
    n: int, h: int, vocab: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    g = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(n, h, generator=g, device=DEVICE).bfloat16()
    weight = (torch.randn(vocab, h, generator=g, device=DEVICE) * (2 / h**0.5)).bfloat16()
    return hidden, weight, random_tokens(n, vocab, g)


def linear_call(hidden, weight, tokens, old_logps) -> tuple[torch.Tensor, ...]:
    """Call `linear_grpo_loss` on a GPU, and return loss, logps, dH and dW."""
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    out = linear_grpo_loss(
        hidden, weight, tokens["target_ids"], tokens["advantages"], CONFIG,
        cu_seqlens=tokens["cu_seqlens"], old_logps=old_logps, backend=BACKEND,
    )  # fmt: skip
    return (out.loss.detach(), out.logps, *torch.autograd.grad(out.loss, (hidden, weight)))


def logits_call(logits, tokens, old_logps, inplace: bool) -> tuple[torch.Tensor, ...]:
    """Call `logits_grpo_loss` on a GPU, and return loss, logps and the gradient of the logits."""
    leaf = logits.detach().requires_grad_()
    out = logits_grpo_loss(
        leaf, tokens["target_ids"], tokens["advantages"], CONFIG, cu_seqlens=tokens["cu_seqlens"],
        old_logps=old_logps, backend=BACKEND, inplace=inplace,
    )  # fmt: skip
    return (out.loss.detach(), out.logps, *torch.autograd.grad(out.loss, leaf))


@pytest.mark.parametrize("operation", ["linear_grpo_loss", "linear_logps", "logits_grpo_loss"])
def test_the_same_bits_a_thousand_times_beside_a_busy_stream(operation):
    hidden, weight, tokens = linear_inputs(256, 896, 32000)
    old_logps = (
        linear_logps(hidden, weight, tokens["target_ids"], backend=BACKEND) - tokens["log_ratio"]
    )
    logits = hidden @ weight.T

    head = hidden.detach(), weight.detach()
    call = {
        "linear_grpo_loss": lambda: linear_call(hidden, weight, tokens, old_logps),
        "linear_logps": lambda: [linear_logps(*head, tokens["target_ids"], backend=BACKEND)],
        "logits_grpo_loss": lambda: logits_call(logits, tokens, old_logps, inplace=False),
    }[operation]
    first = [tensor.clone() for tensor in call()]
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    noise, side = torch.randn(2048, 2048, device=DEVICE).bfloat16(), torch.cuda.Stream()
    scratch = torch.empty_like(noise)
    for _ in range(REPEATS):
        # Run an independent matrix product concurrently to change the timing of the kernels. If
        # they contain a race, their results then differ.
        with torch.cuda.stream(side):
            torch.mm(noise, noise, out=scratch)
        for value, expected in zip(call(), first, strict=True):
            different += (value != expected).any()
    torch.cuda.synchronize()
    assert different.item() == 0


@pytest.mark.parametrize(
    ("rows", "vocab"),
    # The first case is a long completion with an odd vocabulary size, so the rows are not aligned.
    # The second case has 2.16e9 logits (4.3 GB in bf16), which are too many for int32 indices.
    [(LONG, 1003), (16500, LONG)],
    ids=["L131072", "NV-above-2**31"],
)
def test_logits_loss_is_exact(rows, vocab):
    if torch.cuda.mem_get_info()[0] < 5 * 2 * rows * vocab + 2**33:
        pytest.skip("needs more free GPU memory")
    g = torch.Generator(DEVICE).manual_seed(1)
    logits = torch.empty(rows, vocab, dtype=torch.bfloat16, device=DEVICE)
    tokens = random_tokens(rows, vocab, g)
    for block in exact.blocks(logits):
        logits[block] = 2 * torch.randn(logits[block].shape, generator=g, device=DEVICE)
    lse = exact.logits_lse(logits)
    logps = logits.gather(-1, tokens["target_ids"][:, None])[:, 0].double() - lse
    old_logps = (logps - tokens["log_ratio"]).float()
    mask, advantages = torch.ones_like(old_logps), tokens["advantages"].expand(rows)
    loss, slope, scale = exact.dapo(logps, old_logps, advantages, mask, EPSILON)
    gradient = exact.LogitRows(logits, tokens["target_ids"], lse, slope)
    named = {"loss": loss, "grad_logits": gradient, "logps": logps}
    truth = exact.Truth(named, loss_scale=scale, mask=mask)
    for inplace in (False, True):
        given = logits.clone() if inplace else logits
        loss, found, gradient = logits_call(given, tokens, old_logps, inplace)
        errors = truth.errors({"loss": loss, "logps": found, "grad_logits": gradient})
        bars = {"loss": LOSS_BAR, "logps": 1e-5, "grad_logits": BAR}
        assert all(errors[name] <= bar for name, bar in bars.items()), errors


def test_linear_loss_of_a_long_completion_is_exact():
    hidden, weight, tokens = linear_inputs(LONG, 64, 4104)
    logps = exact.logps(hidden, weight, tokens["target_ids"])
    old_logps = (logps - tokens["log_ratio"]).float()
    mask, advantages = torch.ones_like(old_logps), tokens["advantages"].expand(LONG)
    loss, slope, scale = exact.dapo(logps, old_logps, advantages, mask, EPSILON)
    gradients = exact.gradients(hidden, weight, tokens["target_ids"], slope)
    names = ("loss", "logps", "grad_hidden", "grad_weight")
    truth = exact.Truth(
        dict(zip(names, (loss, logps, *gradients), strict=True)), loss_scale=scale, mask=mask
    )
    found = linear_call(hidden, weight, tokens, old_logps)
    errors = truth.errors(dict(zip(names, found, strict=True)))
    bar = exact.logps_bar(64, DEVICE)
    assert errors["loss"] <= LOSS_BAR and errors["logps"] <= bar, errors
    assert max(errors["grad_hidden"], errors["grad_weight"]) <= BAR, errors

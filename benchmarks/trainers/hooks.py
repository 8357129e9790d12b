"""Losses and LM heads of verl and OpenRLHF, compared with their grpo_fast replacements.

    GRPO_FAST_TRAINERS=.venv/trainers python -m benchmarks.trainers.hooks
    [--quick] [--device cuda] [--json results.json]

A hook is a function of verl or OpenRLHF that grpo_fast can replace. The values and gradients of the
original and of the replacement must agree within 1e-3 in fp32. The forward and backward passes of
both are then timed on the same tensors, in interleaved rounds in one process. The peak memory is
measured in one warm call.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.kernels.exact import relative_l2
from benchmarks.trainers import packages
from benchmarks.trainers.options import Defaults, new_parser, parsed, save

Step = Callable[[], Any]  # returns (loss, gradients)
AGREEMENT = 1e-3
# Number of tokens, hidden size and vocabulary size of the LM head. The head on a GPU is that of
# Qwen2.5-0.5B. On a CPU, the hidden size is a quarter and the vocabulary a sixteenth, to save time.
HEADS = {"quick": (128, 64, 2048), "cpu": (1024, 224, 9496), "cuda": (1024, 896, 151936)}
BATCH = (64, 1024)  # number of completions, and their padded length


DEFAULTS = Defaults(threads=2, budget=(10.0, 1.0), rounds=(20, 5))


def main() -> None:
    options = parsed(new_parser(__doc__), DEFAULTS)
    device = options.device
    shape = HEADS["quick" if options.quick else device]
    hooks = [head(device, *shape), *policy_losses(device)]
    rows = [measured(name, theirs, ours, options) for name, theirs, ours in hooks]
    title = "hooks of other trainers, forward and backward"
    save(options, title, {"head": shape, "batch": BATCH}, cases=rows)


def measured(name: str, theirs: Step, ours: Step, options: argparse.Namespace) -> dict[str, Any]:
    """Check that both steps agree, then time them alternately and measure their memory."""
    mine, expected = (torch.cat([x.flatten() for x in step()]) for step in (ours, theirs))
    difference = relative_l2(mine, expected.double())
    if not difference <= AGREEMENT:
        raise SystemExit(f"{name}: ours differs by {difference:.1e}; a wrong result is not timed")
    steps = {"theirs": theirs, "ours": ours}
    row: dict[str, Any] = {"hook": name, "difference": difference}
    row |= measure.measured(steps, options)
    row["speedup"] = row["theirs"]["median_ms"] / row["ours"]["median_ms"]
    sides = (
        f"{side} {row[side]['median_ms']:9.2f} ms {row[side]['workspace_mib']:7.1f} MiB"
        for side in steps
    )
    print(f"{name:24} {'   '.join(sides)}   {row['speedup']:.2f}x, within {difference:.0e}")
    return row


def head(device: str, tokens: int, hidden_size: int, vocabulary: int) -> tuple[str, Step, Step]:
    """Return the hook "verl head": its name, the step of FusedLinearForPPO, and our step.

    FusedLinearForPPO is verl's LM head and has its default chunk size. The loss depends on the
    logps and on the entropy.
    """
    functional = packages.load_verl("verl.utils.experimental.torch_functional")
    from grpo_fast.integrations.verl.head import FastLinearForPPO

    random = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=random, device=device).requires_grad_()
    weight = torch.randn(vocabulary, hidden_size, generator=random, device=device) * 0.05
    weight.requires_grad_()
    ids = torch.randint(vocabulary, (tokens,), generator=random, device=device)
    slope = torch.randn(tokens, generator=random, device=device) / tokens

    def step_of(module: torch.nn.Module) -> Step:
        def step() -> tuple[Tensor, ...]:
            log_probs, entropy = module(hidden, weight, ids, temperature=0.9)
            loss = (slope * log_probs).sum() - 0.01 * entropy.mean()
            return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

        return step

    return "verl head", step_of(functional.FusedLinearForPPO()), step_of(FastLinearForPPO())


def policy_losses(device: str) -> list[tuple[str, Step, Step]]:
    """Return the hooks that compute a policy loss from logps (B, L).

    They are three losses of verl, and OpenRLHF's PolicyLoss. Each entry has the name of the hook,
    the step of the original, and our step.
    """
    core = packages.load_verl("verl.trainer.ppo.core_algos")
    actor = packages.load_verl("verl.workers.config").ActorConfig
    theirs = packages.load_openrlhf_loss().PolicyLoss
    from grpo_fast.examples import openrlhf_loss
    from grpo_fast.integrations import verl

    random = torch.Generator(device).manual_seed(0)
    old = -torch.rand(BATCH, generator=random, device=device)
    logps = (old + 0.1 * torch.randn(BATCH, generator=random, device=device)).requires_grad_()
    lengths = torch.randint(BATCH[1] // 2, BATCH[1], (BATCH[0], 1), generator=random, device=device)
    mask = torch.arange(BATCH[1], device=device) < lengths
    advantages = torch.randn(BATCH[0], 1, generator=random, device=device)
    advantages = advantages.expand(BATCH).contiguous()
    config = actor(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=8)

    def differentiate(loss: Tensor) -> tuple[Tensor, ...]:
        return loss.detach(), *torch.autograd.grad(loss, logps)

    def verl_step(function: Any) -> Step:
        arguments = (old, logps, advantages, mask, "token-mean", config)
        return lambda: differentiate(function(*arguments)[0])

    def openrlhf_step(module: Any) -> Step:
        return lambda: differentiate(module(logps, old, advantages, mask)[0])

    pairs = []
    for name in ("vanilla", "gspo", "geo_mean"):
        step = verl_step(core.get_policy_loss_fn(name))
        pairs.append((f"verl {name}", step, verl_step(verl.policy_loss(name))))
    loss = theirs(dual_clip=3.0)
    ours = openrlhf_step(openrlhf_loss.PolicyLoss(loss))
    return [*pairs, ("OpenRLHF PolicyLoss", openrlhf_step(loss), ours)]


if __name__ == "__main__":
    main()

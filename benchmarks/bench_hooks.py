"""What verl and OpenRLHF call, against ours in its place: the fused head, the policy losses, a tutorial's loss.

    GRPO_FAST_TRAINERS=.venv/trainers python benchmarks/bench_hooks.py [--quick] [--device cuda] [--json results.json]

Forward and backward of each hook on the same tensors, interleaved in one process. A pair is compared before it is
timed: values and gradients within 1e-3 of each other (fp32). Peak memory is that of one warm call.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  (the path above makes the script runnable without installation)
from torch import Tensor  # noqa: E402

from benchmarks import measure  # noqa: E402
from tests import trainer_packages  # noqa: E402

Step = Callable[[], Any]  # (loss, gradients)
AGREEMENT = 1e-3
# Qwen2.5-0.5B's head on 1024 tokens for a GPU; a quarter of its width and a sixteenth of its vocabulary on a CPU.
HEADS = {"cpu": (1024, 224, 9496), "cuda": (1024, 896, 151936)}
QUICK_HEAD = (128, 64, 2048)
BATCH = (64, 1024)  # completions and their padded length


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    device, shape = options.device, QUICK_HEAD if options.quick else HEADS[options.device]
    rows = []
    for name, theirs, ours in [head(device, *shape), *policy_losses(device), *tutorial(device)]:
        rows.append(measured(name, theirs, ours, options))
    report = {
        "benchmark": "hooks of other trainers, forward and backward",
        "commit": measure.commit(),
        "hardware": measure.hardware(device),
        "threads": options.threads,
        "head": dict(zip(("tokens", "hidden", "vocabulary"), shape, strict=True)),
        "batch": BATCH,
        "cases": rows,
    }
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of timing for each hook and side")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="a small head, few rounds")
    parser.add_argument("--json", help="where the report goes")
    options = parser.parse_args()
    if options.quick:
        options.budget, options.rounds = 1.0, 5
    return options


def measured(name: str, theirs: Step, ours: Step, options: argparse.Namespace) -> dict[str, Any]:
    """Compare the two, time them in turns, take the memory of each."""
    mine, expected = (torch.cat([x.flatten() for x in step()]) for step in (ours, theirs))
    difference = measure.relative_l2(mine, expected.double())
    if not difference <= AGREEMENT:
        raise SystemExit(f"{name}: ours differs by {difference:.1e}; a wrong result is not timed")
    times = measure.interleaved({"theirs": theirs, "ours": ours}, options.device, options.budget, options.rounds)
    row: dict[str, Any] = {"hook": name, "difference": difference}
    for side, step in (("theirs", theirs), ("ours", ours)):
        row[side] = measure.spread(times[side]) | measure.peak_memory(step, options.device)
    row["speedup"] = row["theirs"]["median_ms"] / row["ours"]["median_ms"]
    print(
        f"{name:24} theirs {row['theirs']['median_ms']:9.2f} ms {row['theirs']['workspace_mib']:7.1f} MiB   "
        f"ours {row['ours']['median_ms']:9.2f} ms {row['ours']['workspace_mib']:7.1f} MiB   {row['speedup']:.2f}x, "
        f"within {difference:.0e}"
    )
    return row


def head(device: str, tokens: int, hidden_size: int, vocabulary: int) -> tuple[str, Step, Step]:
    """verl's FusedLinearForPPO with its default chunk, logps and entropy with a gradient each."""
    functional = trainer_packages.load_verl("verl.utils.experimental.torch_functional")
    from grpo_fast.integrations.verl_head import FastLinearForPPO

    random = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=random, device=device).requires_grad_()
    weight = (torch.randn(vocabulary, hidden_size, generator=random, device=device) * 0.05).requires_grad_()
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
    """verl's registry and OpenRLHF's PolicyLoss on (B, L) logps, with the metrics each returns."""
    core = trainer_packages.load_verl("verl.trainer.ppo.core_algos")
    actor = trainer_packages.load_verl("verl.workers.config").ActorConfig
    theirs = trainer_packages.load_openrlhf_loss().PolicyLoss
    from grpo_fast.integrations import openrlhf, verl

    random = torch.Generator(device).manual_seed(0)
    old = -torch.rand(BATCH, generator=random, device=device)
    logps = (old + 0.1 * torch.randn(BATCH, generator=random, device=device)).requires_grad_()
    lengths = torch.randint(BATCH[1] // 2, BATCH[1], (BATCH[0], 1), generator=random, device=device)
    mask = torch.arange(BATCH[1], device=device) < lengths
    advantages = torch.randn(BATCH[0], 1, generator=random, device=device).expand(BATCH).contiguous()
    config = actor(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=8)

    def differentiate(loss: Tensor) -> tuple[Tensor, ...]:
        return loss.detach(), *torch.autograd.grad(loss, logps)

    def verl_step(function: Any) -> Step:
        return lambda: differentiate(function(old, logps, advantages, mask, "token-mean", config)[0])

    def openrlhf_step(module: Any) -> Step:
        return lambda: differentiate(module(logps, old, advantages, mask)[0])

    names = ("vanilla", "gspo", "geo_mean")
    pairs = [
        (f"verl {n}", verl_step(core.get_policy_loss_fn(n)), verl_step(verl.policy_loss(n)))
        for n in names
    ]  # fmt: skip
    options: dict[str, Any] = {"dual_clip": 3.0}
    pairs.append(
        ("OpenRLHF PolicyLoss", openrlhf_step(theirs(**options)), openrlhf_step(openrlhf.PolicyLoss(**options)))
    )
    return pairs


def tutorial(device: str) -> list[tuple[str, Step, Step]]:
    """A small causal LM: all logits and plain torch against `causal_lm.policy_loss`, as Lightning and loops call it."""
    from grpo_fast import LossConfig
    from grpo_fast.integrations.causal_lm import policy_loss
    from tests.grpo_reference import grpo, rows
    from tests.tiny import tiny_model

    model = tiny_model("qwen2", vocab_size=16384, hidden_size=128).to(device)
    batch = {k: v.to(device) for k, v in rows(16, 160, 16384).items()}
    advantages, config = batch["rewards"] - batch["rewards"].mean(), LossConfig(loss_type="grpo", compute_entropy=True)
    parameters = list(model.parameters())

    def plain() -> tuple[Tensor, ...]:
        loss = grpo(model, batch, advantages, None, None)[0]
        return loss.detach(), *torch.autograd.grad(loss, parameters)

    def ours() -> tuple[Tensor, ...]:
        loss = policy_loss(model, batch, advantages, config).loss
        return loss.detach(), *torch.autograd.grad(loss, parameters)

    return [("causal LM, plain torch", plain, ours)]


if __name__ == "__main__":
    main()

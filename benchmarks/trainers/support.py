"""Speed of the losses with a sampler's support (`support=`), compared with the full vocabulary.

    python -m benchmarks.trainers.support [--quick] [--cases 512,896,32000,50 ...] [--json PATH]

The support of a token is the set of ids that a truncating sampler could choose. A case is T,H,V,K:
the number of tokens, the hidden size, the vocabulary size, and the number of ids in each support.
Half of the ids are drawn from 2000 frequent ids, and half from the other ids.

Three steps are timed with and without a support: the loss, the loss with a frozen head, and the
logps. The results with a support are first compared with fp64 results. All steps are timed in one
process in interleaved rounds, so the ratios are reliable even if the times vary.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.kernels import exact
from benchmarks.trainers.options import Defaults, new_parser, parsed, save
from grpo_fast import LossConfig, Support, linear_grpo_loss, linear_logps

Case = tuple[int, ...]
CASES: dict[str, list[Case]] = {
    "quick": [(64, 64, 3000, 20)],
    "cpu": [(512, 896, v, k) for v in (32000, 151936) for k in (8, 50, 512)],
    "cuda": [(8192, 4096, 151936, k) for k in (8, 50, 512)],
}
DEFAULTS = Defaults(threads=2, budget=(10.0, 0.2), rounds=(15, 3))
COMPLETIONS = 8
EPSILON = 0.2
FREQUENT = 2000  # number of frequent ids
BLOCK = 32  # number of rows of the exact answer that are computed at once, which limits the memory


class Problem(NamedTuple):
    hidden: Tensor  # (T, H)
    weight: Tensor  # (V, H)
    target_ids: Tensor  # (T,)
    advantages: Tensor  # (B,)
    old_logps: Tensor  # (T,)
    cu_seqlens: Tensor  # (B + 1,)
    support: Support

    @property
    def ids(self) -> Tensor:
        """Return the ids of all supports, (T, K). The first id of each row is the target."""
        return self.support.ids.view(len(self.hidden), -1)


def case_of(text: str) -> Case:
    numbers = tuple(int(part) if part.isdecimal() else 0 for part in text.split(","))
    if len(numbers) != 4 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected T,H,V,K, each at least 1, got {text!r}")
    return numbers


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--cases", nargs="+", type=case_of, metavar="T,H,V,K")
    options = parsed(parser, DEFAULTS)
    options.cases = options.cases or CASES["quick" if options.quick else options.device]
    options.dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    for t, _, v, k in options.cases:
        if t % COMPLETIONS or k > v:
            expected = f"T a multiple of {COMPLETIONS} and K at most V"
            parser.error(f"--cases: expected {expected}, got T={t}, K={k}, V={v}")
    rows = [timed(case, options) for case in options.cases]
    title = "linear_grpo_loss and linear_logps, support against dense"
    save(options, title, {"dtype": str(options.dtype)}, cases=rows)


def problem_of(case: Case, options: argparse.Namespace) -> Problem:
    t, h, v, k = case
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(v, generator=generator)
    count = min(FREQUENT, v // 2)
    frequent, others = order[:count], order[count:]
    half = min(k // 2, count)

    def drawn(part: Tensor, count: int) -> Tensor:  # (T, count)
        # Draw one id from each of `count` intervals, so that the ids of a row differ.
        size = len(part) // max(count, 1)
        offsets = torch.randint(size, (t, count), generator=generator)
        return part[torch.arange(count) * size + offsets]

    ids = torch.cat([drawn(frequent, half), drawn(others, k - half)], 1)
    ids = ids.gather(1, torch.rand(t, k, generator=generator).argsort(1))
    hidden = torch.randn(t, h, generator=generator)
    weight = torch.randn(v, h, generator=generator) * (2 / h**0.5)
    advantages = torch.tensor([1.0, -1.0]).repeat(COMPLETIONS // 2)
    hidden, weight = (x.to(options.device, options.dtype) for x in (hidden, weight))
    ids = ids.to(options.device)
    support = Support(ids.flatten(), torch.arange(t + 1, device=options.device) * ids.shape[1])
    cu_seqlens = torch.arange(0, t + 1, t // COMPLETIONS, dtype=torch.int32)
    problem = Problem(
        hidden.requires_grad_(), weight.requires_grad_(), ids[:, 0].contiguous(),
        advantages.to(options.device), torch.zeros(t), cu_seqlens.to(options.device), support,
    )  # fmt: skip
    noise = 0.02 * torch.randn(t, generator=generator).to(options.device)
    return problem._replace(old_logps=(exact_answer(problem)[0] + noise).float())


@torch.no_grad()
def exact_answer(problem: Problem, slope: Tensor | None = None) -> tuple[Tensor, ...]:
    """Compute the logps and their gradients in fp64.

    Args:
        problem: the inputs.
        slope: (T,) gradient of the loss with respect to the logps. If None, only the logps are
            computed.

    Returns:
        The logps (T,), the gradient of `hidden` (T, H), and the gradient of the weight rows whose
        ids are in a support, in the order of the ids.
    """
    used, place = problem.ids.unique(return_inverse=True)
    logps, d_hidden = [], []
    d_weight = problem.hidden.new_zeros(len(used), problem.hidden.shape[1], dtype=torch.float64)
    for rows in torch.arange(len(problem.hidden), device=used.device).split(BLOCK):
        h, w = problem.hidden[rows].double(), problem.weight[problem.ids[rows]].double()
        logp = torch.log_softmax((w @ h[:, :, None]).squeeze(-1), -1)  # the target is the first id
        logps.append(logp[:, 0])
        if slope is not None:
            d = -logp.exp() * slope[rows, None]
            d[:, 0] += slope[rows]
            d_hidden.append((d[:, None, :] @ w).squeeze(1))
            terms = d[:, :, None] * h[:, None, :]
            d_weight.index_add_(0, place[rows].flatten(), terms.flatten(0, 1))
    return torch.cat(logps), torch.cat(d_hidden) if d_hidden else d_weight, d_weight


def steps_of(problem: Problem, support: Support | None) -> dict[str, Callable[[], Any]]:
    """Return three steps: "loss", "frozen" (the loss with a frozen head) and "logps"."""
    config = LossConfig(epsilon_low=EPSILON, epsilon_high=EPSILON)
    hidden, weight, targets, advantages, old_logps, cu_seqlens, _ = problem

    def loss(*leaves: Tensor) -> tuple[Tensor, ...]:
        head = weight if len(leaves) == 2 else weight.detach()
        out = linear_grpo_loss(
            hidden, head, targets, advantages, config, cu_seqlens=cu_seqlens, old_logps=old_logps,
            support=support,
        )  # fmt: skip
        return out.loss.detach(), *torch.autograd.grad(out.loss, leaves)

    def logps() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (linear_logps(hidden, weight, targets, support=support),)

    return {"loss": lambda: loss(hidden, weight), "frozen": lambda: loss(hidden), "logps": logps}


def error_of(problem: Problem, steps: dict[str, Callable[[], Any]]) -> float:
    """Compare the results of `steps` to fp64 results. Return the largest relative L2 error."""
    logps, *_ = exact_answer(problem)
    per_token = problem.advantages.repeat_interleave(len(logps) // COMPLETIONS)
    ones = torch.ones_like(problem.old_logps)
    loss, slope, _ = exact.dapo(logps, problem.old_logps, per_token, ones, EPSILON)
    _, d_hidden, d_weight = exact_answer(problem, slope)
    found = steps["loss"]()
    used = problem.ids.unique()
    unused = torch.ones(len(problem.weight), dtype=torch.bool, device=used.device)
    unused[used] = False
    if found[2][unused].any() or not abs(found[0] - loss) <= 1e-4:  # also refuses NaN
        return float("inf")
    pairs = ((steps["logps"]()[0], logps), (found[1], d_hidden), (found[2][used], d_weight))
    frozen = steps["frozen"]()[1]
    return max(exact.relative_l2(x, y) for x, y in (*pairs, (frozen, d_hidden)))


def timed(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Verify a case, time it with and without a support, and return its results."""
    problem = problem_of(case, options)
    ways = {"dense": steps_of(problem, None), "support": steps_of(problem, problem.support)}
    row: dict[str, Any] = dict(zip(("tokens", "hidden", "vocabulary", "kept"), case, strict=True))
    row["error"] = error_of(problem, ways["support"])
    label = "T={} H={} V={} K={}".format(*case)
    if not row["error"] <= exact.TOLERANCE[options.dtype]:
        print(f"{label}  WRONG, not timed: error {row['error']:.2g}", flush=True)
        return row | {"wrong": True}
    steps = {f"{what} {way}": step for way, of in ways.items() for what, step in of.items()}
    row["times"] = measure.measured(steps, options)
    row["ratios"] = {}
    for what in ways["dense"]:
        dense, own = (row["times"][f"{what} {way}"]["median_ms"] for way in ways)
        row["ratios"][what] = dense / own
        times = f"dense {dense:9.1f} ms  support {own:8.1f} ms  ratio {dense / own:6.1f}"
        print(f"{label}  {what:7} {times}", flush=True)
    return row


if __name__ == "__main__":
    main()

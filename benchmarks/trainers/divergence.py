"""Speed of `linear_divergence`, compared with TRL's chunked divergence and with plain torch.

    python -m benchmarks.trainers.divergence [--quick] [--cases 256,512,32000 ...] [--json PATH]

A case N,H,V has N tokens, hidden size H and vocabulary size V. Teacher and student have the same
hidden size. Every result is compared with an fp64 result before it is timed. All candidates run in
one process in interleaved rounds, so the ratios are reliable even if the times vary. On a CPU, the
CPU time of the process is measured.

Times are also given relative to the matrix products that every implementation needs: the logits of
student and teacher, and the gradients of the student's hidden states and weight. The default case
takes about a minute on one CPU thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.kernels import exact
from benchmarks.trainers.options import Defaults, new_parser, parsed_cases, save
from grpo_fast import TeacherHead, linear_divergence

Head = tuple[Tensor, Tensor]  # hidden states (N, H) and weight (V, H)
KINDS = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}  # TRL's argument beta
CASES: dict[str, list[tuple[int, ...]]] = {
    "quick": [(64, 64, 3000)],
    "cpu": [(256, 512, 32000)],
    "cuda": [(8192, 4096, 151936)],
}
DEFAULTS = Defaults(threads=1, budget=(2.0, 0.2), rounds=(5, 3))


def main() -> None:
    options = parsed_cases(new_parser(__doc__), DEFAULTS, "N,H,V", CASES)
    if options.device == "cpu":
        options.clock = measure.clock = "process"
    rows = [timed(case, options) for case in options.cases]
    title = "linear_divergence, forward and backward"
    save(options, title, {"dtype": str(options.dtype)}, cases=rows)


def plain(kind: str, student: Head, teacher: Head) -> Tensor:
    """Return the mean divergence over all tokens, computed from all logits in plain torch."""
    dtype = torch.promote_types(student[0].dtype, torch.float32)
    lp, lq = ((h @ w.T).to(dtype).log_softmax(-1) for h, w in (student, teacher))
    if kind == "forward_kl":
        values = lq.exp() * (lq - lp)
    elif kind == "reverse_kl":
        values = lp.exp() * (lp - lq)
    else:
        lm = torch.logaddexp(lp, lq) - torch.log(torch.tensor(2.0))
        values = 0.5 * (lq.exp() * (lq - lm) + lp.exp() * (lp - lm))
    return values.sum(-1).mean()


def trl(kind: str, student: Head, teacher: Head) -> Tensor:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    scales = 1.0, 1.0, None, 1.0, None
    return ChunkedDivergenceFunction.apply(
        *student, None, *teacher, None, KINDS[kind], *scales
    )[0].mean()  # fmt: skip


def ours(kind: str, student: Head, teacher: Head) -> Tensor:
    return linear_divergence(*student, TeacherHead(*teacher), kind).loss


def products(student: Head, teacher: Head) -> None:
    (h, w), (t, u) = (tuple(x.detach() for x in side) for side in (student, teacher))
    _, y = h @ w.T, t @ u.T
    _ = y @ w, y.T @ h


def timed(case: tuple[int, ...], options: argparse.Namespace) -> dict[str, Any]:
    """Verify all candidates of a case, time the correct ones, and return the results."""
    n, h, v = case
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*x, generator=g) for x in ((n, h), (v, h)) * 2]
    tensors = [x * (2 / h**0.5) if x.shape[0] == v else x for x in tensors]
    a, b, c, d = (x.to(options.device, options.dtype) for x in tensors)
    student, teacher = (a.requires_grad_(), b.requires_grad_()), (c, d)
    steps: dict[str, Callable[[], Any]] = {"products": partial(products, student, teacher)}
    row: dict[str, Any] = dict(zip(("tokens", "hidden", "vocabulary"), case, strict=True))
    row["errors"] = {}

    def step(way: Callable[..., Tensor], *arguments: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(way(*arguments), student)

    for kind in KINDS:
        wide = a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
        truth = torch.autograd.grad(plain(kind, wide, (c.double(), d.double())), wide)
        for name, way in (("grpo_fast", ours), ("trl", trl), ("torch", plain)):
            call = partial(step, way, kind, student, teacher)
            try:
                found = call()
            except ImportError:
                continue
            off = max(exact.relative_l2(x, y) for x, y in zip(found, truth, strict=True))
            row["errors"][f"{kind} {name}"] = off
            if off <= exact.TOLERANCE[options.dtype]:
                steps[f"{kind} {name}"] = call
    row["times"] = measure.measured(steps, options)
    bare = row["times"]["products"]["median_ms"]
    for name, times in row["times"].items():
        off = row["errors"].get(name, 0.0)  # the bare products have no error
        ratio = times["median_ms"] / bare
        print(
            f"N={n} H={h} V={v}  {name:24} {times['median_ms']:9.1f} ms  {ratio:5.2f} of the "
            f"products  error {off:.0e}", flush=True,
        )  # fmt: skip
    return row


if __name__ == "__main__":
    main()

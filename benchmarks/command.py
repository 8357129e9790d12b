"""Benchmarks that compare grpo_fast with other libraries and with the limits of the hardware.

A run prints tables and writes a JSON file to benchmarks/results/. Every result is compared with an
exact fp64 result before it is timed. A wrong result is listed, but not timed. All candidates of a
case are timed in one process on the same tensors, in interleaved rounds. On a CPU, each case runs
twice: in a process with glibc's default memory allocator, and in a process with an allocator that
keeps freed pages ("fair").

    grpo-fast bench --quick
    grpo-fast bench linear_grpo_loss --shapes 1024,qwen3-8b 8192,qwen3-8b --active 1.0 0.2
    grpo-fast bench linear_logps --shapes 512,896,32000 --dtype fp32 --providers grpo_fast torch
    grpo-fast bench linear_grpo_loss --shapes 512,896,32000 --support 0 50

Several command lines that are separated by "+" run in one process, each with its own report.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from typing import Any

import torch

from benchmarks import RESULTS, measure
from benchmarks.kernels import runner
from benchmarks.kernels.operations import CPU, GPU, MODELS, OPERATIONS, QUICK, shape_of
from benchmarks.kernels.problem import Variant
from benchmarks.kernels.providers import BACKENDS, providers_of
from benchmarks.options import timing_parser


def main(arguments: list[str]) -> int:
    """Run `grpo-fast bench` and return its exit status.

    Returns:
        0 on success, 1 if a case did not run or a result of grpo_fast is wrong, and 2 if the
        arguments are wrong. For several command lines, the largest status.
    """
    if "+" in arguments:
        end = arguments.index("+")
        lines = arguments[:end], arguments[end + 1 :]
        if not all(lines):
            print("bench: +: expected a command line before and after it", file=sys.stderr)
            return 2
        return max(map(main, lines))
    options = parse_arguments(arguments)
    try:
        plan = plan_of(options)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    if options.dry:
        print(described(plan))
        return 0
    return measure_all(plan, options)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = timing_parser(__doc__, os.cpu_count() or 1, "grpo-fast bench")
    names = f"some of {', '.join(OPERATIONS)}"
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help=names)

    add = parser.add_argument_group("problems").add_argument
    words = "tokens (a multiple of 8), hidden size and vocabulary; or tokens and the model of the "
    words += f"head as N,MODEL: {', '.join(MODELS)}"
    add("--shapes", nargs="+", metavar="N,H,V", help=words)
    words = "default: fp32 (CPU), bf16 (GPU)"
    add("--dtype", nargs="+", choices=("fp32", "bf16", "fp16"), help=words)
    words = "fraction of rows that have a gradient"
    add("--active", nargs="+", type=float, default=[1.0], help=words)
    words = "why the other rows have no gradient (default: masked)"
    add("--inactive", choices=("masked", "zero-advantage", "clipped"), help=words)
    add("--softmax", nargs="+", default=["flat"], choices=("flat", "peaked"))
    add("--mask", nargs="+", default=["full"], choices=("full", "ragged"))
    words = "ids in each token's support, of linear_* operations (default: 0, all ids)"
    add("--support", nargs="+", type=int, default=[0], metavar="K", help=words)

    add = parser.add_argument_group("candidates").add_argument
    words = "backends of grpo_fast (default: auto torch)"
    add("--backend", nargs="+", default=["auto", "torch"], choices=BACKENDS, help=words)
    words = "run only the providers whose name contains one of these"
    add("--providers", nargs="+", default=[], metavar="PART", help=words)

    add = parser.add_argument_group("measurement").add_argument
    add("--allocator", nargs="+", choices=("default", "fair"), help="on a CPU; default: both")
    add("--verify-only", action="store_true", help="check the results without timing them")
    add("--dry", action="store_true", help="list what would run, and which providers cannot")
    options = parser.parse_args(arguments)
    options.operations = list(dict.fromkeys(options.operations)) or ["linear_grpo_loss"]
    unknown = [name for name in options.operations if name not in OPERATIONS]
    if unknown:
        parser.error(f"OPERATION: expected {names}, got {unknown[0]!r}")
    return options


def plan_of(options: argparse.Namespace) -> runner.Plan:
    """Return the plan for the given command line options.

    Raises:
        ValueError: an option is out of range, or two options contradict each other.
    """
    device = options.device
    if device == "cuda" and not (torch.cuda.is_available() or options.dry):
        raise ValueError("device: expected cpu (torch sees no GPU), got cuda")
    for fraction in options.active:
        if not 0 < fraction <= 1:
            raise ValueError(f"active: expected fractions in (0, 1], got {fraction:g}")
    if options.inactive and min(options.active) == 1:
        got = options.inactive
        raise ValueError(f"inactive: expected together with --active below 1, got {got}")
    if options.allocator and device == "cuda":
        got = options.allocator[0]
        raise ValueError(f"allocator: expected no --allocator for a GPU, got {got}")
    if min(options.support) < 0:
        raise ValueError(f"support: expected at least 0, got {min(options.support)}")
    if any(options.support) and any(x.startswith("logits") for x in options.operations):
        raise ValueError("support: expected only operations linear_*, got logits_*")
    defaults = GPU if device == "cuda" else CPU
    shapes = [shape_of(text) for text in options.shapes or ()]
    shapes = shapes or (QUICK if options.quick else defaults)
    if max(options.support) > min(shape.v for shape in shapes):
        raise ValueError(f"support: expected at most V, got {max(options.support)}")
    known = {p.name for name in options.operations for p in providers_of(name) if p.role != "limit"}
    for part in options.providers:
        if not any(part.lower() in name.lower() for name in known):
            expected = f"parts of {', '.join(sorted(known))}"
            raise ValueError(f"providers: expected {expected}, got {part!r}")
    reasons = [options.inactive or "masked"]
    product = itertools.product(
        options.active, reasons, options.softmax, options.mask, options.support
    )
    quick = options.quick
    budget = 3.0 if device == "cuda" else 20.0
    return runner.Plan(
        operations=options.operations,
        shapes=shapes,
        dtypes=options.dtype or ["bf16" if device == "cuda" else "fp32"],
        variants=[Variant(*fields) for fields in product],
        device=device,
        allocators=options.allocator or (["default"] if quick else ["default", "fair"]),
        backends=options.backend,
        providers=options.providers,
        threads=options.threads,
        budget=options.budget or (1.0 if quick else budget),
        rounds=options.rounds or (9 if quick else 25),
        verify_only=options.verify_only,
    )


def described(plan: runner.Plan) -> str:
    """Return the output of --dry: all cases, and whether each provider would run."""
    cpu = f", allocators {', '.join(plan.allocators)}, {plan.threads} threads"
    lines = [f"device {plan.device}{cpu if plan.device == 'cpu' else ''}"]
    for operation in plan.operations:
        product = itertools.product(plan.dtypes, plan.shapes, plan.variants)
        cases = [f"{','.join(map(str, s))} {d} {tuple(v)}" for d, s, v in product]
        lines.append(f"{operation}: {len(cases)} cases: {'; '.join(cases)}")
        for provider in plan.candidates(operation):
            reasons = {provider.missing(plan.device, runner.DTYPES[dtype]) for dtype in plan.dtypes}
            found = "; ".join(sorted(filter(None, reasons))) or "would run"
            lines.append(f"    {provider.name:32} {found}")
    return "\n".join(lines)


def measure_all(plan: runner.Plan, options: argparse.Namespace) -> int:
    """Run all cases of a plan, and write the report after each. Return the exit status, 0 or 1."""
    report: dict[str, Any] = {
        **measure.header("grpo-fast bench", plan.device),
        "settings": plan._asdict(), "cases": [],
    }  # fmt: skip
    name = f"{'quick' if options.quick else 'bench'}-{report['created'].replace(':', '')}.json"
    path = options.out or RESULTS / name
    measure.write(path, report)
    cases = runner.run(path)
    print(f"written: {os.path.relpath(path)}")
    wrong = [
        f"{case['operation']} {case['shape']} {case['dtype']}: "
        f"{name} {row['status']}: {row['reason']}"
        for case in cases
        for name, row in case["rows"].items()
        if row["role"] == "ours" and row["status"] in ("wrong", "failed")
    ]
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    wanted = len(plan.operations) * len(plan.shapes) * len(plan.dtypes) * len(plan.variants)
    complete = len(cases) == wanted * (1 if plan.device == "cuda" else len(plan.allocators))
    return 0 if complete and not wrong else 1

"""Compare packed rows and our sampling loop with transformers for every causal LM class.

Usage: `python -m tests.attention.sweep`. The reference is the padded eager attention of
transformers. The sweep builds a tiny model of each class from one generic configuration. Sequences
exceed every limit of the configuration, and each type of RoPE is tested.

    --only NAME     test only this family; may be repeated
    --write         write the table to grpo_fast/attention/README.md

Each family gets a verdict: right, slower, plain, refused or wrong. "slower" means that packed rows
are right, but transformers' `generate` runs the rollouts. "plain" means that each sequence is
computed alone by the model's own forward. The exit status is 1 if a family is wrong.
"""

import argparse
import re
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_fast.attention import agree, pack_groups
from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.rollout import Sampling
from grpo_fast.rollout.own import engine as hf
from grpo_fast.rollout.own.model import positions
from grpo_fast.train.policy import Policy, self_check
from tests.attention.families import ROPES, causal_lms, family_model

SAMPLED = 20  # tokens of a sampled completion
TOLERANCE = 2e-3  # largest difference of logps in nats; a wrong mask causes tenths
# Each entry is a group: the length of a prompt, and the lengths of its completions. Most sequences
# exceed the window of 16 tokens, and some exceed the other limits of `families.SIZES`: 24, 64 and
# 256. A group with a single completion has nothing to share.
LENGTHS = ((20, (7, 1, 19)), (6, (2, 15)), (24, (8,)), (58, (9, 5)), (250, (3, 11)))
RIGHT, SLOWER, PLAIN, REFUSED = "right", "slower", "plain", "refused"
WRONG, NOT_BUILT = "WRONG", "not built"
# The columns "training" and "rollouts" of each verdict.
MEANING = {
    RIGHT: "packed rows, shared prompts | our own loop",
    SLOWER: "packed rows, shared prompts | `generate`",
    PLAIN: "plain: each sequence alone | `generate`",
    REFUSED: "refused |",
    NOT_BUILT: "not tested: the generic configuration does not fit |",
    WRONG: "WRONG |",
}
README = Path(__file__).resolve().parents[2] / "grpo_fast/attention/README.md"
MARKS = "<!-- sweep -->", "<!-- end of sweep -->"

Group = tuple[list[int], list[list[int]]]


class Verdict(NamedTuple):
    family: str
    kind: str
    reason: str = ""


def groups_of(model: Any) -> list[Group]:
    """Return random groups with the lengths in LENGTHS that fit into the model's position table."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    room = agree.room_of(model, positions(model.config.get_text_config()))
    generator = torch.Generator().manual_seed(1)

    def ids(n: int) -> list[int]:
        return torch.randint(3, vocabulary, (n,), generator=generator).tolist()

    fitting = [(p, n) for p, n in LENGTHS if room < 0 or p + max(SAMPLED, *n) <= room]
    return [(ids(prompt), [ids(n) for n in completions]) for prompt, completions in fitting]


@torch.no_grad()
def padded_logps(model: Any, groups: Sequence[Group]) -> Tensor:
    """Return the logps (R,) of the completion tokens, computed by transformers' eager attention.

    The batch is padded on the right.
    """
    model.set_attn_implementation("eager")
    pairs = [(prompt, c) for prompt, completions in groups for c in completions]
    rows = [torch.tensor([*p, *c]) for p, c in pairs]
    ids = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    logps = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.cat(
        [row[len(p) - 1 : len(p) + len(c) - 1] for row, (p, c) in zip(logps, pairs, strict=True)]
    )


def judge(family: str, *, seed: int = 0, **changes: Any) -> Verdict:
    """Build a model of the family, run the trainer's checks on it, and return the verdict.

    A family is wrong only if models with two different seeds are wrong. If the scores of two
    experts are nearly equal, rounding decides which one a router chooses, and the logps of two
    right computations differ.
    """
    try:
        model = family_model(family, seed=seed, **changes)
        groups = groups_of(model)
        truth = padded_logps(model, groups)
    except Exception as error:  # transformers rejects our configuration
        return Verdict(family, NOT_BUILT, _line(error))
    try:
        policy = Policy(model, build_symbol_tokenizer(["0", "1"]))
        policy.eos_ids = frozenset()  # no end token, so completions exceed the window
        self_check(policy)
        measured = gaps(policy, groups, truth)
    except Exception as error:
        return Verdict(family, REFUSED, _line(error))
    found = [f"{name} by {gap:.2g}" for name, gap in measured.items() if not gap <= TOLERANCE]
    if found and not seed:
        return judge(family, seed=1, **changes)
    if found:
        return Verdict(family, WRONG, ", ".join(found))
    if policy.unshared is not None:
        return Verdict(family, PLAIN, policy.unshared.splitlines()[0])
    reason = hf._differences[policy.lm][hf.LOOP]
    return Verdict(family, RIGHT if reason is None else SLOWER, reason or "")


def judge_ropes(family: str) -> Verdict:
    """Judge a model family with its default RoPE and, if it is supported, with each RoPE in ROPES.

    Return the first wrong verdict, or the verdict for the default RoPE.
    """
    verdict = judge(family)
    if verdict.kind in (RIGHT, SLOWER, PLAIN):
        for rope in ROPES:
            other = judge(family, rope=rope)
            if other.kind == WRONG:
                return other._replace(reason=f"{rope}: {other.reason}")
    return verdict


@torch.no_grad()
def gaps(policy: Policy, groups: Sequence[Group], truth: Tensor) -> dict[str, float]:
    """Return the largest difference from the reference, in nats, for each of three computations.

    "shared" and "unshared" compare the logps of packed rows, with and without shared prompts, with
    the reference logps `truth`. "sampled" compares the logps of our sampling loop with the padded
    logps of its samples.
    """
    found = {}
    for name, shared in (("shared", True), ("unshared", False)):
        logps = policy.logps(pack_groups(groups, shared=shared))
        found[name] = float((logps - truth).abs().max())
    engine = hf.TransformersEngine(policy)
    prompts = [prompt for prompt, _ in groups]
    sampled = engine.generate(prompts, Sampling(max_new_tokens=SAMPLED), group_size=3, seed=5)
    owners = [prompt for prompt in prompts for _ in range(3)]
    pairs = [(p, [one.ids]) for p, one in zip(owners, sampled, strict=True)]
    logps = torch.cat([one.logps for one in sampled])
    found["sampled"] = float((logps - padded_logps(policy.lm, pairs)).abs().max())
    return found


def _line(error: Exception) -> str:
    text = str(error).strip() or "no message"
    line = text.splitlines()[0]
    return line if isinstance(error, ValueError) else f"{type(error).__name__}: {line}"


def table(verdicts: Sequence[Verdict]) -> str:
    """Return a Markdown table with one row for each pair of verdict and reason."""
    rows: dict[tuple[str, str], list[str]] = {}
    for kind in (RIGHT, SLOWER, PLAIN, REFUSED, NOT_BUILT, WRONG):
        for family, own, reason in verdicts:
            if own == kind:
                why = "" if kind == NOT_BUILT else _without_numbers(reason)
                rows.setdefault((kind, why), []).append(f"`{family}`")
    lines = ["| training | rollouts | families | reason |", "|---|---|---|---|"]
    for (kind, reason), names in rows.items():
        lines.append(f"| {MEANING[kind]} | {len(names)}: {', '.join(names)} | {reason} |")
    return "\n".join(lines)


def _without_numbers(reason: str) -> str:
    """Remove names and measured numbers from a reason, so that similar reasons share a row."""
    reason = re.sub(r"^(model_type \S+|\w+ForCausalLM): ", "", reason)
    reason = re.sub(r"expected \[.*\], got", "got", reason)
    reason = re.sub(r"[\d.]+(e-?\d+)? nats", "some nats", reason)
    reason = re.sub(r"^\w+(Attention: packed attention is causal)", r"\1", reason)
    return reason.replace("|", "\\|")


def write(verdicts: Sequence[Verdict]) -> None:
    """Write the table of verdicts between its two markers in the README."""
    import transformers

    text = README.read_text(encoding="utf-8")
    before, after = text[: text.index(MARKS[0])], text[text.index(MARKS[1]) :]
    version = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}:"
    README.write_text(
        f"{before}{MARKS[0]}\n{version}\n\n{table(verdicts)}\n{after}", encoding="utf-8"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    verdicts = []
    for family in asked.only or causal_lms():
        verdicts.append(judge_ropes(family))
        print(f"{verdicts[-1].kind:9} {family:24} {verdicts[-1].reason[:170]}", flush=True)
    print(", ".join(f"{n} {kind}" for kind, n in Counter(v.kind for v in verdicts).items()))
    if asked.write:
        write(verdicts)
    return int(any(verdict.kind == WRONG for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())

"""Test that the code blocks of the READMEs in grpo_fast/ run from top to bottom.

A README uses names that its reader has, such as a model. `NAMES` builds them for each README.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.docs.test_docs import BLOCK, NOT_RUN, README, READMES, names
from tests.tiny import TEXTS, tiny_model


def attention() -> dict[str, Any]:
    groups = [([5, 6, 7], [[8, 9], [10]]), ([3, 4], [[11, 12, 13]])]
    model = tiny_model("cohere")  # it has a logit scale
    return {"model": model, "groups": groups, "advantages": torch.tensor([1.0, -1.0, 0.5])}


def rollout() -> dict[str, Any]:
    from grpo_fast.data.tokenizer import build_bpe_tokenizer

    tokenizer = build_bpe_tokenizer(TEXTS, 300)
    model = tiny_model("llama", vocab_size=len(tokenizer))
    return {"model": model, "prompts": TEXTS[:2], "tokenizer": tokenizer, "score": len}


NAMES: dict[str, Callable[[], dict[str, Any]]] = {"attention": attention, "rollout": rollout}
TESTED = [page for page in READMES if page != README and BLOCK.findall(page.read_text())]


@pytest.mark.parametrize("page", TESTED, ids=names)
def test_the_code_of_a_readme_runs_from_top_to_bottom(page):
    known = NAMES.get(page.parent.name, dict)()
    for block in BLOCK.findall(page.read_text()):
        code = compile(block, str(page), "exec")
        if not block.startswith(NOT_RUN):
            exec(code, known)
    if page.parent.name == "attention":
        assert math.isfinite(known["out"].loss.item())
        assert known["head"].weight.grad.abs().sum() > 0
        assert [len(completions) for completions in known["logps"]] == [2, 1]
    if page.parent.name == "rollout":
        assert len(known["rewards"]) == 16

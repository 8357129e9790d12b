"""Test that the docstring examples of all public names print the results that they show."""

import doctest

import pytest

import grpo_fast
import grpo_fast.attention as attention
from grpo_fast.objective import gae

EXAMPLES = {name: getattr(grpo_fast, name) for name in grpo_fast.__all__}
OF_ATTENTION = ("pack_tree", "pack_groups", "plan_packs", "head_of", "register")
EXAMPLES |= {name: getattr(attention, name) for name in OF_ATTENTION}
EXAMPLES["gae"] = gae.gae


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstring_examples(name: str) -> None:
    test = doctest.DocTestParser().get_doctest(EXAMPLES[name].__doc__, {}, name, None, None)
    assert test.examples, f"{name} has no Example: section"
    assert doctest.DocTestRunner().run(test).failed == 0

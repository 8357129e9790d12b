"""Tests that reward functions give the same rewards in TRL's trainer and in ours."""

import pytest
import torch

pytest.importorskip("trl")

from trl import GRPOTrainer

from grpo_fast.data.records import parse_record
from grpo_fast.rewards import build_rewards, score
from grpo_fast.train.config import DataConfig
from tests.integrations import trl_cases, trl_rewards
from tests.reward_specs import spec

JSONL = DataConfig(task="jsonl", path=".")
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FUNCTIONS = {
    name: f() if isinstance(f := getattr(trl_rewards, name), type) else f
    for name in trl_rewards.NAMES
}


def rows(is_chat):
    texts = trl_cases.prompts(8)
    prompts = [[{"role": "user", "content": text}] if is_chat else text for text in texts]
    # In TRL, `answer` and `answers` are ordinary columns of the data set. The same must hold for
    # our rewards with TRL's signature, although `answers` is a special name for our other rewards.
    return [{"prompt": prompt, "answer": "abcdefgh"[i], "level": i, "answers": f"other {i}"}
            for i, prompt in enumerate(prompts)]  # fmt: skip


class Recorded(GRPOTrainer):
    """TRL's trainer with an attribute `seen`, which records each computation of rewards.

    An entry of `seen` contains the step, the inputs, the completion ids and the rewards.
    """

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        found = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        ids = [list(each) for each in completion_ids_list]
        entry = self.state.global_step, inputs, ids, found
        self.seen = [*getattr(self, "seen", []), entry]
        return found


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
def test_functions_of_trl_give_equal_rewards(model_path, tmp_path, is_chat, here):
    theirs = trl_cases.trainer(
        Recorded, model_path, tmp_path, data=rows(is_chat),
        more={"reward_funcs": list(FUNCTIONS.values())},
    )  # fmt: skip
    theirs._tokenizer.chat_template = TEMPLATE
    theirs.train()
    names = trl_rewards.NAMES
    assert len(theirs.seen) == 2
    options = {"in_process": here, "convention": "trl"}
    rewards = build_rewards([spec(f"{trl_rewards.__file__}:{name}", **options) for name in names])
    try:
        for step, inputs, ids, expected in theirs.seen:
            examples = [parse_record("row", dict(row), JSONL) for row in inputs]
            texts = theirs._tokenizer.batch_decode(ids, skip_special_tokens=True)
            rewards.progress = {"global_step": step, "max_steps": 2}
            found = score(rewards, examples, texts, ids)
            for name, column in zip(names, expected.T, strict=True):
                torch.testing.assert_close(found.per_fn[name], column, equal_nan=True)
            assert not any(found.reasons.values())
            torch.testing.assert_close(found.total, expected.nansum(dim=1))
    finally:
        for reward in () if here else rewards.rewards:
            reward.function.close()

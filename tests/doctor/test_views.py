"""What views are made of: rows by the definition, readings of prompts, which views can be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from grpo_fast.attention import Head
from grpo_fast.doctor import prompts
from grpo_fast.doctor.recompute import joined
from grpo_fast.doctor.rows import ROWS, Truncation, row_logps
from grpo_fast.doctor.search import fits
from grpo_fast.doctor.view import View
from grpo_fast.rollout import Kept, Sampling
from grpo_fast.rollout.sampler import Sampler
from tests.doctor.faulty import BOS, tokenizer_with_bos

R, V, H = ROWS + 6, 50, 8  # more rows than are there at a time


@pytest.fixture
def head():
    return Head(torch.randn(V, H), torch.randn(V), 4.0, 1.5)


def logits_of(hidden, head):
    z = head.logit_scale * (hidden @ head.weight.T + head.bias)
    return head.softcap * torch.tanh(z / head.softcap)


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.7}])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_rows_are_what_the_sampler_reports(head, options, temperature):
    hidden = torch.randn(R, H)
    sampler = Sampler(torch.rand(R, 1), Sampling(temperature=temperature, **options))
    drawn = sampler(torch.zeros(R, 1), logits_of(hidden, head)).argmax(-1)
    cut = Truncation(options.get("top_k", 0), options.get("top_p", 1.0))
    assert cut.is_on == bool(options)
    temperatures = [3.0, temperature]
    given = {"truncation": cut} if cut.is_on else {}
    found = row_logps(hidden, head, drawn, temperatures, **given)
    assert found.shape == (2, R)
    torch.testing.assert_close(found[1], sampler.logps[:, 0], rtol=0, atol=2e-6)


def test_rows_over_what_an_engine_kept(head):
    hidden = torch.randn(R, H)
    targets = torch.randint(V, (R,))
    rows = [[] if i % 3 == 0 else sorted({int(t), i % V, 7}) for i, t in enumerate(targets)]
    sizes = torch.tensor([0, *map(len, rows)]).cumsum(0)
    ids = torch.tensor([t for row in rows for t in row], dtype=torch.int32)
    found = row_logps(hidden, head, targets, [1.0], kept=Kept(ids, sizes))[0]
    z = logits_of(hidden, head)
    for i, row in enumerate(rows):
        kept = z[i, row] if row else z[i]
        assert float(found[i]) == pytest.approx(float(z[i, targets[i]] - kept.logsumexp(-1)),
                                                abs=2e-6)  # fmt: skip


def test_kept_of_several_completions():
    one = Kept(torch.tensor([4, 5, 6]), torch.tensor([0, 2, 3]))
    two = Kept(torch.tensor([7]), torch.tensor([0, 0, 1]))
    both = joined([one, two])
    assert both.ids.tolist() == [4, 5, 6, 7] and both.offsets.tolist() == [0, 2, 3, 3, 4]
    assert joined([one, None]) is None and joined([]) is None


def test_readings_of_texts_and_of_messages():
    tokenizer = tokenizer_with_bos()
    bos = tokenizer.bos_token_id
    ids = [tokenizer("4 more")["input_ids"], tokenizer("7")["input_ids"]]
    found = prompts.readings(tokenizer, ["4 more", "7"], ids)
    assert found[prompts.AS_SENT] == ids and ids[0][0] == bos
    assert found[prompts.BOS_TWICE] == [[bos, *tokens] for tokens in ids]
    assert found[prompts.NO_BOS] == [tokens[1:] for tokens in ids]
    shown = tokenizer.decode(found[prompts.TEMPLATED][1])
    assert shown == f"{BOS}user: 7\nassistant:"
    # Tokenized again it has its BOS twice, which is there already; a text has no template to lose.
    assert set(found) == {
        prompts.AS_SENT, prompts.BOS_TWICE, prompts.NO_BOS, prompts.TEMPLATED,
    }  # fmt: skip
    chat = [[{"role": "user", "content": "7"}]]
    sent = [tokenizer(shown, add_special_tokens=False)["input_ids"]]
    found = prompts.readings(tokenizer, chat, sent)
    assert found[prompts.UNTEMPLATED] == [ids[1]] and prompts.TEMPLATED not in found
    assert tokenizer.decode(found[prompts.UNPROMPTED][0]) == f"{BOS}user: 7\n"


def test_a_tokenizer_without_template_or_bos_has_other_readings_left():
    class Bare:
        bos_token_id = None

        def decode(self, ids):
            return ids

        def __call__(self, ids):
            return {"input_ids": [5, *ids]}

    found = prompts.readings(Bare(), ["a"], [[3]])
    assert found == {prompts.AS_SENT: [[3]], prompts.AGAIN: [[5, 3]]}


def test_padding_is_read_on_its_side():
    ids = [[3, 4], [5]]
    assert prompts.padded(ids, prompts.LEFT, 0) == [[3, 4], [0, 5]]
    assert prompts.padded(ids, prompts.RIGHT, 0) == [[3, 4], [5, 0]]
    assert prompts.padded(ids, prompts.UNPADDED, 0) == ids


def test_views_that_cannot_be():
    known = {prompts.AS_SENT: [[3, 4], [5]], prompts.BOS_TWICE: [[9, 3, 4], [9, 5]]}

    def can(view, room, readings=known):
        rollout = SimpleNamespace(completion_ids=[[1] * 10, [1]])
        policy = SimpleNamespace(positions=room)
        made = SimpleNamespace(readings=readings, rollout=rollout, policy=policy)
        return fits(made, view)

    twice = View(1.0, reading=prompts.BOS_TWICE)
    assert can(twice, 12) and not can(twice, 11) and can(View(1.0), 2)
    left = View(1.0, padding=prompts.LEFT)
    assert can(left, 11) and not can(left, 10)
    assert not can(left, 99, {prompts.AS_SENT: [[3], [5]]})  # there is nothing to pad

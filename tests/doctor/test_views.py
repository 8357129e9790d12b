"""What views are made of: rows by the definition, readings of prompts, which views can be."""

from types import SimpleNamespace

import pytest
import torch

from grpo_fast import Support
from grpo_fast.attention import Head
from grpo_fast.doctor import prompts
from grpo_fast.doctor.search import ONE, Change, Search, fitted
from grpo_fast.doctor.view import KEPT, ROWS, Drawn, Rows, Truncation, View
from grpo_fast.rollout import Sampling
from grpo_fast.rollout.sampler import Sampler

R, V, H = ROWS + 6, 50, 8  # more rows than are there at a time


@pytest.fixture
def head():
    return Head(torch.randn(V, H), torch.randn(V), 4.0, 1.5)


def logits_of(hidden, head):
    z = head.logit_scale * (hidden @ head.weight.T + head.bias)
    return head.softcap * torch.tanh(z / head.softcap)


def rows_of(hidden, head, drawn, view):
    """The log-probabilities of a view, ROWS at a time, as `Recomputed` has them."""
    z = head.logit_scale * (hidden @ head.weight.T + head.bias)
    return torch.cat([
        Rows(z[first : first + ROWS], first, drawn, head.softcap).logps(view)
        for first in range(0, len(z), ROWS)
    ])  # fmt: skip


def drawn_of(targets, kept=None):
    return Drawn(targets, torch.zeros_like(targets), [[0]] * len(targets), [1], kept)


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.7}])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_rows_are_what_the_sampler_reports(head, options, temperature):
    hidden = torch.randn(R, H)
    sampler = Sampler(torch.rand(R, 1), Sampling(temperature=temperature, **options))
    drawn = sampler(torch.zeros(R, 1), logits_of(hidden, head)).argmax(-1)
    view = View(temperature, Truncation(**options) if options else None)
    found = rows_of(hidden, head, drawn_of(drawn), view)
    torch.testing.assert_close(found, sampler.logps[:, 0], rtol=0, atol=2e-6)


def test_rows_over_what_an_engine_kept(head):
    hidden = torch.randn(R, H)
    targets = torch.randint(V, (R,))
    rows = [[] if i % 3 == 0 else sorted({int(t), i % V, 7}) for i, t in enumerate(targets)]
    sizes = torch.tensor([0, *map(len, rows)]).cumsum(0)
    ids = torch.tensor([t for row in rows for t in row], dtype=torch.int32)
    found = rows_of(hidden, head, drawn_of(targets, Support(ids, sizes)), View(1.0, KEPT))
    z = logits_of(hidden, head)
    for i, row in enumerate(rows):
        kept = z[i, row] if row else z[i]
        assert float(found[i]) == pytest.approx(float(z[i, targets[i]] - kept.logsumexp(-1)),
                                                abs=2e-6)  # fmt: skip


def test_padding_is_read_on_its_side():
    class Bare:
        bos_token_id = None

        def decode(self, ids):
            raise TypeError

        def __call__(self, text, **_):
            return {"input_ids": [8]}

    found = prompts.readings(Bare(), ["a", "b"], [[3, 4], [5]], 0)
    assert found[prompts.LEFT] == [[3, 4], [0, 5]] and found[prompts.RIGHT] == [[3, 4], [5, 0]]
    assert prompts.AGAIN not in found and "bos in front" not in found


def test_a_reading_that_has_no_room_is_left_out():
    known = {prompts.AS_SENT: [[3, 4], [5]], "bos in front": [[9, 3, 4], [9, 5]]}

    def can(view, room):
        made = SimpleNamespace(
            readings=known, rollout=SimpleNamespace(lengths=[10, 1]), logps=lambda view: None,
            policy=SimpleNamespace(positions=room), drawn=SimpleNamespace(kept=None),
            difference=None,
        )  # fmt: skip
        return Search(made, View(1.0), Sampling(), 0.0, 0.0)._is_possible(view)

    twice = View(1.0, reading="bos in front")
    assert can(twice, 12) and not can(twice, 11) and can(View(0.5), 2)
    assert not can(View(1.0), 99) and not can(View(0.5, KEPT), 99)


def test_a_number_is_fitted_and_the_end_of_a_range_is_no_finding():
    class Toy:
        def __init__(self, best):
            self.best = best

        def compute(self, views):
            """Nothing."""

        def difference(self, view):
            return abs(view.temperature - self.best)

    def found(best):
        return fitted(Toy(best), View(1.0), "temperature", float, 0.25, 4.0)

    assert found(0.9).temperature == 0.9
    assert found(0.8537).temperature == pytest.approx(0.8537, 1e-4)
    assert [found(x) for x in (0.1, 0.25, 4.0, 7.0)] == [None] * 4


def test_a_cause_is_named_where_it_explains_most_and_no_other_does():
    base, warm, late = View(1.0), View(0.5), View(1.0, shift=1)

    def named(left):
        """The view that wins by what each view leaves of a difference of 1."""
        made = SimpleNamespace(
            difference=lambda view: {base: 1.0, **left}[view],
            logps=lambda view: torch.tensor([view.temperature, view.shift]),
        )
        changes = [
            Change("shifted" if view.shift else "temperature", {}, view, is_fitted=view == warm)
            for view in sorted(left, key=left.get)
        ]
        won = Search(made, base, Sampling(), 1e-6, 1e-4).winner(changes, ONE)
        return won and won.view

    assert named({warm: 0.05, late: 0.9}) == warm
    assert named({warm: 0.15, late: 0.9}) is None  # it leaves too much
    assert named({warm: 0.05, late: 0.1}) is None  # another leaves about as little
    assert named({View(0.51): 0.06, warm: 0.05, late: 0.9}) == View(0.51)  # the known value
    assert named({View(0.51): 0.06, warm: 0.02, late: 0.9}) == warm  # a known one that fits worse

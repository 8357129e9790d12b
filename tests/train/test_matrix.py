"""Tests of whole runs: each case of `CASES` is resumed, runs on several ranks, and accumulates.

These runs must have the same results as a run without interruption in one process.
"""

import logging
import shutil
from pathlib import Path

import pytest

from grpo_fast.errors import SAVED
from grpo_fast.train.folder import checkpoints_in
from tests.train.runs import CASES, differences, result, sort, train, train_until

pytestmark = pytest.mark.usefixtures("no_pictures")

# ----------------------------------------------------------------------------- Resumed on one rank
PLACES = (0.37, 0.66, 0.85)  # fraction of the calls that `Leave` counts


@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES)), ids=CASES)
def test_a_run_that_was_left_goes_on_bit_for_bit(ranks, plain, tmp_path, number, case):
    whole = plain(case)
    folder = tmp_path / case  # the page of completions shows the name
    at = round(PLACES[number % len(PLACES)] * plain.passes[case])
    [[left]] = ranks(1, [train_until, case, None, str(folder), 0, at])
    assert left["code"] == SAVED and left["seen"] >= at
    ranks(1, [train, case, None, str(folder), "resume=auto"])
    found = result(folder)
    expected = result(whole)
    assert {"metrics", "page"} <= expected.keys()
    assert any(name.startswith("model/model.safetensors/") for name in expected)
    assert [key for key in expected if found.get(key) != expected[key]] == []
    assert found == expected


# ------------------------------------------------------------------------------------ Several ranks
# "exact" logs the gradient variance, and "alone" computes every completion alone. Neither works
# with sharded weights.
SHARDED = ("few", "mu", "lora", "dynamic", "ppo", "ppo-shared", "divergence", "hybrid")
COMPARED = [
    *((case, "ddp", 2) for case in CASES if case not in ("lora", "divergence", "hybrid")),
    *((case, "fsdp2", 2) for case in SHARDED),
    ("few", "ddp", 4),
    ("mu", "hsdp", 4),
]


@pytest.mark.parametrize("case, kind, count", COMPARED)
def test_several_processes_do_what_one_does(ranks, plain, tmp_path, case, kind, count):
    """Check that several ranks produce the same metrics and weights as one process.

    In the case "few", one rank gets no group of samples.
    """
    expected = plain(case)
    found = ranks(count, [train, case, kind, str(tmp_path / "run")])
    assert all(x == found[0] and x[0]["skipped"] == 0 for x in found), found
    assert differences(tmp_path / "run", expected) == []


# Each entry has the case, the number of ranks and the setting `distributed` of a run that is left,
# and those of the runs that resume it. It also resumes on the same ranks.
LEFT = [
    ("mu", 1, None, [(2, "ddp"), (2, "fsdp2")]),
    ("mu", 2, "ddp", [(4, "ddp"), (1, None)]),
    ("mu", 2, "fsdp2", [(1, None)]),
    ("ppo", 2, "fsdp2", [(4, "fsdp2")]),
    ("ppo", 2, "ddp", [(2, "fsdp2")]),
]


def copied(run: Path, name: str) -> str:
    """Copy the folder of a run, so that a test can resume the run more than once."""
    return str(shutil.copytree(run, run.with_name(name)))


@pytest.mark.parametrize("case, count, kind, others", LEFT)
def test_a_run_that_is_left_goes_on_on_any_number_of_processes(
    ranks, plain, tmp_path, case, count, kind, others
):
    """Check that a signal to one rank ends all ranks at the same step with one checkpoint.

    The resumed run must have the results of an uninterrupted run.
    """
    left, whole = tmp_path / "left", tmp_path / "whole"
    at = 12 if count > 1 else 20
    found = ranks(count, [train_until, case, kind, str(left), count - 1, at])
    assert [x[0]["code"] for x in found] == [SAVED] * count, found
    assert found[-1][0]["seen"] >= at
    [saved] = checkpoints_in(left)
    assert saved.name in ("step_000001", "step_000002")
    folders = [copied(left, str(number)) for number in range(len(others) + 1)]
    again = [train, case, kind, folders[-1], "resume=auto"]
    ranks(count, again, [train, case, kind, str(whole)])
    assert differences(Path(folders[-1]), whole, 0.0) == []
    for folder, (number, other) in zip(folders, others, strict=False):
        ranks(number, [train, case, other, folder, "resume=auto"])
        assert differences(Path(folder), plain(case)) == [], (number, other)


# ------------------------------------------------------------------------ Accumulation and packing
def close(one, other, names=("loss", "grad_norm", "reward", "entropy", "policy_loss")):
    for a, b in zip(one, other, strict=True):
        for name in names:
            if name in a:
                assert a[name] == pytest.approx(b[name], abs=2e-5, rel=2e-5), name


@pytest.mark.parametrize("loss", ["loss_type=grpo", "loss_type=bnpo"])
def test_accumulation_changes_nothing(tmp_path, loss, monkeypatch, caplog):
    kl = ["loss.beta=0.05", "reference.kind=frozen"]
    options = [f"loss.{loss}", "loss.compute_entropy=true", "steps=2", *kl]
    whole = sort(tmp_path / "whole", *options)
    options += ["tokens_per_microbatch=30"]
    close(whole, sort(tmp_path / "tokens", *options))

    def refuse(model):
        raise ValueError("rope_type: 'some'")

    monkeypatch.setattr("grpo_fast.train.policy.check_supported", refuse)
    with caplog.at_level(logging.WARNING, "grpo_fast"):
        close(whole, sort(tmp_path / "packed", *options))
    said = "completions are computed alone, without shared prompts: rope_type: 'some'"
    # The level also applies to torch's checkpoints, whose loggers are not ours.
    ours = [record.message for record in caplog.records if record.name.startswith("grpo_fast")]
    assert ours == [said]

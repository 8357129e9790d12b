"""Tests of the bench command: verification of results, rejected options and tables."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import command, measure
from benchmarks.gpu import report as gpu_report
from benchmarks.gpu import row_candidates
from benchmarks.kernels import runner
from benchmarks.kernels.operations import OPERATIONS, Shape
from benchmarks.kernels.problem import STANDARD, Variant, make_problem
from benchmarks.kernels.providers import Provider, differentiate, providers_of
from benchmarks.measure import Step
from benchmarks.options import save
from benchmarks.report import readme, tables
from benchmarks.trainers import loop, trees
from benchmarks.trainers import step as trainer_step
from tests.command_line import invoke, refused
from tests.pairs import pairs

ROOT = Path(__file__).resolve().parents[2]
SHAPE = Shape(32, 16, 97)  # 8 completions of 4 tokens, and a prime V
FP32 = torch.float32


def provider(operation: str, name: str) -> Provider:
    return next(p for p in providers_of(operation) if p.name == name)


# ---- verification ----


VARIANTS = [STANDARD, Variant(0.5, "masked", "peaked", "ragged"), Variant(0.5, "clipped"),
            Variant(0.25, "zero-advantage"), Variant(0.5, support=9)]  # fmt: skip


@pairs(operation=OPERATIONS, variant=VARIANTS, dtype=[torch.float32, torch.bfloat16])
def test_ours_and_plain_torch_are_right_on_every_variant(operation, variant, dtype):
    problem = make_problem(SHAPE, dtype, variant=variant)
    names = "grpo_fast (auto)", "grpo_fast (torch)", "plain torch"
    for name in names[:2] if operation.endswith("inplace") or variant.support else names:
        row, step = runner.verify(provider(operation, name), operation, problem, dtype, "cpu")
        assert row["status"] == "ok" and step is not None, (name, row)
        if name.startswith("grpo_fast"):
            assert max(row["errors"].values()) < (1e-5 if dtype == FP32 else 1e-2), row


def test_the_exact_answer_is_autograds_in_fp64():
    problem = make_problem(SHAPE, torch.float64)
    step = provider("linear_grpo_loss", "plain torch").prepare(problem)
    errors = problem.truth("loss").errors(step())
    assert max(errors.values()) < 1e-6  # plain torch converts the logits to fp32
    variant = make_problem(SHAPE, FP32, variant=Variant(0.5, "clipped"))
    idle = variant.truth("loss").values["grad_hidden"].abs().sum(-1) == 0
    assert 0.2 < idle.double().mean() < 0.8


def verified(candidate: Provider) -> tuple[dict, Step | None]:
    problem = make_problem(SHAPE, FP32)
    return runner.verify(candidate, "linear_grpo_loss", problem, FP32, "cpu")


def test_quack_computes_a_cross_entropy_and_no_policy_loss(monkeypatch):
    """Check that QuACK gets masked tokens as -100, is listed if absent, and is in no GRPO table.

    The fake module has the signature of QuACK's function at commit c8ec3170.
    """

    def chunked_linear_cross_entropy(x, weight, target, chunk_size=4096, ignore_index=-100,
        reduction="mean", tuned=True, use_scaled_exp=None):  # fmt: skip
        return torch.nn.functional.cross_entropy(
            x @ weight.T, target, ignore_index=ignore_index, reduction=reduction
        )

    operation, name = "linear_cross_entropy", "QuACK cross entropy"
    quack = provider(operation, name)
    assert "QuACK" not in " ".join(p.name for p in providers_of("linear_grpo_loss"))
    assert quack.missing("cpu", torch.bfloat16) in (
        "quack is not installed", "its CuTe-DSL kernels need an sm_90 GPU",
    )  # fmt: skip
    module = SimpleNamespace(
        chunked_linear_cross_entropy=chunked_linear_cross_entropy,
        scaled_exp_lce_supported=lambda x, weight, chunk_size, reduction: chunk_size % 128 == 0,
    )
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace(linear_cross_entropy=module))
    monkeypatch.setitem(sys.modules, "quack.linear_cross_entropy", module)
    problem = make_problem(SHAPE, FP32, variant=VARIANTS[1])
    can_run = quack._replace(needs=None, why_not=lambda *_: None)
    row, step = runner.verify(can_run, operation, problem, FP32, "cpu")
    assert row["status"] == "ok" and step is not None, row
    assert row["path"] == "scaled exponentials"
    module.scaled_exp_lce_supported = lambda *inputs, **options: False
    assert can_run.prepare(problem).path == "chunked logits"


def test_a_support_has_different_ids_and_begins_with_the_target():
    problem = make_problem(SHAPE, FP32, variant=Variant(support=9))
    ids = problem.support_ids
    assert ids.shape == (32, 9) and torch.equal(ids[:, 0], problem.target_ids)
    assert all(len(set(row)) == 9 for row in ids.tolist())
    peer = provider("linear_logps", "plain torch")
    row, step = runner.verify(peer, "linear_logps", problem, FP32, "cpu")
    assert (row["status"], row["reason"], step) == ("missing", "computes over all ids", None)


@pytest.mark.parametrize("wrong", ["loss", "grad_hidden", "grad_weight", "missing", "nan", "shape"])
def test_a_wrong_result_is_listed_and_not_timed(wrong):
    problem = make_problem(SHAPE, FP32)
    right = provider("linear_grpo_loss", "plain torch").prepare(problem)

    def spoil():
        result = right()
        if wrong == "missing":
            del result["grad_weight"]
        elif wrong == "shape":
            result["grad_weight"] = result["grad_weight"][:-1]
        elif wrong == "nan":
            result["grad_hidden"][0, 0] = float("nan")
        else:
            result[wrong] = result[wrong] * 1.01
        return result

    row, step = verified(Provider("bad", "peer", lambda problem: Step(spoil)))
    assert row["status"] == "wrong" and "not timed" in row["reason"] and step is None


def test_one_wrong_row_of_ours_is_seen_in_bf16():
    """Check that a zero gradient in the largest of 16384 rows is refused, except from a peer."""
    problem = make_problem(Shape(16384, 8, 64), torch.bfloat16)
    right = provider("linear_grpo_loss", "grpo_fast (torch)").prepare(problem)

    def spoil():
        result = right()
        rows = result["grad_hidden"]
        rows[rows.float().norm(dim=1).argmax()] = 0.0
        return result

    for role, status in (("ours", "wrong"), ("peer", "ok")):
        bad = Provider("bad", role, lambda problem: Step(spoil))
        row, _ = runner.verify(bad, "linear_grpo_loss", problem, torch.bfloat16, "cpu")
        assert row["status"] == status, row


@pytest.mark.parametrize("wrong", [0.0, 2.0, torch.nan])
def test_a_wrong_tree_layout_is_seen(monkeypatch, wrong):
    """Check that the layout with trees is compared with the plain one, not the other way round."""
    monkeypatch.setattr(trees, "model_step", lambda trunk, pack, grad: lambda: pack.found)
    found = {"flat": torch.ones(3), "tree": torch.full((3,), wrong)}
    layouts = {
        name: SimpleNamespace(predicting=[0], found=(torch.ones(3), x)) for name, x in found.items()
    }
    options = SimpleNamespace(device="cpu", dtype=FP32)
    _, error = trees.trunk_steps(layouts, trees.Heads("tiny", 2, 1, 8, 16), 8, 8, options)
    assert error >= 1


def test_a_provider_that_fails_or_is_absent_is_listed():
    def fail(problem):
        return differentiate(problem, lambda: torch.zeros(()) + undefined)  # noqa: F821

    row, step = verified(Provider("broken", "peer", fail))
    assert (row["status"], step) == ("failed", None) and "NameError" in row["reason"]
    row, step = verified(Provider("absent", "peer", fail, needs="no_such_package"))
    assert (row["status"], step) == ("missing", None)
    assert row["reason"] == "no_such_package is not installed"


def test_an_in_place_step_gets_its_input_back():
    problem = make_problem(SHAPE, FP32)
    step = provider("logits_grpo_loss_inplace", "grpo_fast (auto)").prepare(problem)
    first, second = step()["grad_logits"].clone(), step()["grad_logits"].clone()
    assert torch.equal(first, second) and step.owned_bytes == problem.logits.nbytes
    again = step.run()["grad_logits"]  # without `reset`, the input is the gradient
    assert not torch.equal(first, again)


# ---- the command ----


def test_a_run_writes_its_report_and_the_readers_read_it(tmp_path, capfd):
    out, page = tmp_path / "r.json", tmp_path / "REPORT.md"
    words = "linear_grpo_loss logits_grpo_loss --shapes 16,8,64 32,8,64 --threads 1 --rounds 2"
    words += f" --allocator default --budget 0.01 --providers grpo_fast plain --out {out}"
    words += " --backend auto triton"
    assert command.main(words.split()) == 0
    shown = capfd.readouterr().out
    assert "hidden -> GRPO loss" in shown and "× limit" in shown
    assert "# logits_grpo_loss 32,8,64 fp32: verifying plain torch" in shown
    report = json.loads(out.read_text())
    assert {"commit", "hardware", "versions", "settings"} <= report.keys()
    assert len(report["cases"]) == 4
    measured = "median_ms spread_ms ratio_to_limit rate unit workspace_mib errors".split()
    for case in report["cases"]:
        assert {*measured} <= case["rows"]["grpo_fast (auto)"].keys()
        assert case["rows"]["grpo_fast (triton)"]["status"] == "missing"
    assert tables.fastest_peer(tables.cases_of([out])[0]) == "plain torch"
    gpu_report.main([str(out), "-o", str(page)])
    assert "not measured" in page.read_text()


def test_an_interrupted_run_has_stored_the_cases_before(tmp_path, monkeypatch):
    """Check that the report has all cases that finished before the run was interrupted."""
    out = tmp_path / "r.json"
    done = iter([{"shape": [16, 8, 64]}])
    monkeypatch.setattr(runner, "run_case", lambda *_: next(done))
    monkeypatch.setattr(runner, "run", lambda path: runner.run_cases(path, "default"))
    words = f"linear_logps --shapes 16,8,64 32,8,64 --threads 1 --device cpu --out {out}"
    with pytest.raises(StopIteration):
        command.main(words.split())
    assert [case["shape"] for case in json.loads(out.read_text())["cases"]] == [[16, 8, 64]]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["linear_gpo_loss"], ["OPERATION", "linear_grpo_loss", "linear_gpo_loss"]),
        (["--shapes", "7,16,97"], ["multiple of 8", "7"]),
        (["--shapes", "8,16"], ["N,H,V", "8,16"]),
        (["--shapes", "8,gpt-9"], ["shapes", "qwen3-8b", "gpt-9"]),
        (["--shapes", "8,-16,97"], ["positive", "-16"]),
        (["--active", "1.5"], ["active", "1.5"]),
        (["--threads", "0"], ["--threads", "> 0", "0"]),
        (["--rounds", "-1"], ["--rounds", "> 0", "-1"]),
        (["--budget", "nan"], ["--budget", "> 0", "nan"]),
        (["--inactive", "clipped"], ["inactive", "--active", "clipped"]),
        (["--providers", "grpo_fast", "nobody"], ["providers", "plain torch", "nobody"]),
        (["--device", "cuda", "--allocator", "fair"], ["allocator", "fair"]),
        (["--out", "/tmp"], ["--out", "a file", "/tmp"]),
        (["linear_logps", "step"], ["OPERATION", "linear_grpo_loss", "step"]),
        (["--support", "-1"], ["support", "at least 0", "-1"]),
        (["--shapes", "8,8,8", "--support", "9"], ["support", "at most V", "9"]),
        (["logits_grpo_loss", "--support", "5"], ["support", "linear_*"]),
    ],
)
def test_refusals(words, parts, capsys):
    try:
        code = command.main([*words, "--dry"])
    except SystemExit as error:
        code = error.code
    shown = capsys.readouterr().err
    assert code == 2 and all(part in shown for part in parts), shown


def test_a_dry_run_says_what_cannot_run(capsys):
    words = "linear_logps --device cuda --shapes 8192,gemma-3-4b --dry"
    assert command.main(f"{words} + linear_grpo_loss --shapes 8,8,8 --dry".split()) == 0
    shown = capsys.readouterr().out
    parts = "8192,2560,262144 bf16", "Liger SM90", "(auto)", "linear_grpo_loss: 1 cases: 8,8,8"
    assert all(part in shown for part in parts)
    assert command.main(f"{words} + {words} --shapes 7,16,97 + {words}".split()) == 2
    if not torch.cuda.is_available():
        assert command.main(["linear_logps", "--device", "cuda"]) == 2
        assert "device: expected cpu" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["+", "+ linear_logps --dry", "linear_logps --dry +"])
def test_an_empty_command_line_is_refused(words, capsys):
    assert command.main(words.split()) == 2
    assert "expected a command line before and after" in capsys.readouterr().err


@pytest.mark.parametrize("status", ["wrong", "failed"])
def test_a_wrong_result_of_ours_fails_the_command(monkeypatch, tmp_path, capsys, status):
    """Check that a wrong or failed result of grpo_fast gives exit status 1, but not a peer's."""
    ours, peer = {"role": "ours", "status": "ok"}, {"role": "peer", "status": "ok"}
    rows = {"grpo_fast (auto)": ours, "TRL": peer}
    case = {"operation": "linear_logps", "shape": [8, 8, 8], "dtype": "fp32", "rows": rows}
    monkeypatch.setattr(runner, "run", lambda path: [case])
    words = "linear_logps --shapes 8,8,8 --device cpu --allocator default --verify-only".split()
    words += ["--out", str(tmp_path / "r.json")]
    assert command.main(words) == 0
    peer |= {"status": status, "reason": "beyond"}
    assert command.main(words) == 0
    ours |= {"status": status, "reason": "beyond"}
    assert command.main(words) == 1
    assert f"grpo_fast (auto) {status}: beyond" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "words", "expected"),
    [
        (trainer_step, ["--prompt", "0"], "an integer > 0"),
        (trainer_step, ["--model-config", "gpt-9"], "invalid choice"),
        (loop, ["--json", "/"], "a file, got the folder"),
        (loop, ["--model", "/"], "--model and --data: expected both"),
        (loop, ["--quick", "--rows", "3"], "a divisor of [8, 8], got 3"),
    ],
)
def test_refusals_of_the_trainers_benchmarks(monkeypatch, capsys, module, words, expected):
    monkeypatch.setattr("sys.argv", ["bench", *words])
    with pytest.raises(SystemExit) as error:
        module.main()
    assert error.value.code == 2 and expected in capsys.readouterr().err


def test_a_step_of_our_trainer_can_be_measured():
    options = SimpleNamespace(dtype="float32", model_config="tiny", layers=1, device="cpu")
    shape = loop.Shape(prompts=2, tokens=12, group=2, length=4)
    step = loop.our_step(loop.subject_of(options, shape), shape)
    found = measure.measured({"ours": step}, SimpleNamespace(device="cpu", budget=0.01, rounds=2))
    assert found["ours"]["median_ms"] > 0 and found["ours"]["workspace_mib"] > 0


def test_a_wrong_result_fails_a_benchmark_of_a_trainer(tmp_path):
    """Check that the report is written, and that the exit status is not 0."""
    fields = {"device": "cpu", "threads": 1, "budget": 1.0, "rounds": 1, "clock": "wall"}
    options = SimpleNamespace(**fields, out=tmp_path / "x.json")
    save(options, "support", {}, cases=[{"ratio": 2.0}])
    with pytest.raises(SystemExit, match="wrong"):
        save(options, "support", {}, cases=[{"ratio": 2.0}, {"wrong": True}])
    assert json.loads((tmp_path / "x.json").read_text())["cases"][1] == {"wrong": True}


def test_the_command_line_finds_the_checkout_or_says_so(tmp_path, monkeypatch):
    result = invoke("bench", "--help")
    assert result.exit_code == 0 and "--active" in result.output
    monkeypatch.setattr("grpo_fast.cli.__file__", str(tmp_path / "grpo_fast" / "cli.py"))
    assert refused(invoke("bench", "--quick"), "expected a checkout")


# ---- measure ----


def test_reports_are_no_uncommitted_changes(tmp_path, monkeypatch):
    """Check that the second of two runs still has the commit of a clean tree."""
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    for words in (("init", "-q"), (*who, "commit", "-q", "--allow-empty", "-m", "Begin")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.delenv(measure.COMMIT_VARIABLE, raising=False)
    (results / "linear_logps-cpu.json").touch()
    assert re.fullmatch("[0-9a-f]{12}", measure.commit())
    (tmp_path / "benchmarks" / "x.py").touch()
    assert measure.commit().endswith("+changes")


def test_row_candidates_that_are_wrong_or_fail_are_not_timed(monkeypatch, tmp_path):
    """Check that each candidate gets its configuration or kernel, and the report of all."""
    from grpo_fast.kernels.gpu import rows

    wrong, bad, *right, _ = row_candidates.CANDIDATES
    shipped, gradient = rows.row_loss_, torch.zeros(4)

    def call():
        config = rows.row_config(64)
        if rows.row_loss_ is not shipped:
            replaced.extend(getattr(rows.row_loss_, "args", [rows.row_loss_]))
        if config == bad:
            raise RuntimeError("out of resources")
        gradient.fill_(2.0 if config == wrong else 1.0)
        return torch.zeros(4)

    times = {"shipped": {"median_ms": 4.0}, "candidate": {"median_ms": 1.0}}
    monkeypatch.setattr(row_candidates, "call_of", lambda *_: (call, gradient))
    monkeypatch.setattr(row_candidates.measure, "header", lambda *_: {"commit": "abc"})
    monkeypatch.setattr(row_candidates.measure, "interleaved", lambda *_, **__: times)
    file, replaced = tmp_path / "rows.json", []
    assert row_candidates.main(["--out", str(file)]) == 0
    assert replaced == [*right, row_candidates.quack_row_loss_]
    timed = {"shipped": 4.0, "candidate": 1.0}
    reasons = {"reason": "wrong: not timed"}, {"reason": "RuntimeError: out of resources"}
    found = json.loads(file.read_text())
    lines = [row_candidates.line_of(config) for config in row_candidates.CANDIDATES]
    assert found["row_candidates"] == dict(zip(lines, (*reasons, *[timed] * 4), strict=True))
    assert [row[2:] for row in gpu_report.candidate_rows("H100", [found])] == [
        ("wrong: not timed", ""), ("RuntimeError: out of resources", ""), *[("1.00", "0.25×")] * 4,
    ]  # fmt: skip
    for config, line in zip((wrong, bad, *right), lines, strict=False):
        assert eval(line, vars(rows) | vars(row_candidates)) == config


def test_no_candidate_is_timed_after_a_cuda_error(monkeypatch, tmp_path):
    calls, gradient = [], torch.zeros(4)

    def call():
        calls.append(1)
        if len(calls) > 1:  # the first call computes the expected logps
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return torch.zeros(4)

    monkeypatch.setattr(row_candidates, "call_of", lambda *_: (call, gradient))
    monkeypatch.setattr(row_candidates.measure, "header", lambda *_: {})
    file = tmp_path / "rows.json"
    assert row_candidates.main(["--out", str(file)]) == 1 and len(calls) == 2
    [found] = json.loads(file.read_text())["row_candidates"].values()
    assert found["reason"].startswith("RuntimeError: CUDA error")


def test_benchmarks_import_nothing_from_the_tests():
    pattern = re.compile(r"^\s*(?:from|import) (tests|triton_tools|conftest)\b", re.M)
    for path in (ROOT / "benchmarks").rglob("*.py"):
        assert not pattern.search(path.read_text()), path
    pattern = re.compile(r"^\s*(?:from|import) benchmarks\b", re.M)
    package = (ROOT / "grpo_fast").rglob("*.py")  # only cli.py may import benchmarks
    assert [path.name for path in package if pattern.search(path.read_text())] == ["cli.py"]


# ---- the page and its picture ----


def test_the_tables_of_the_pages_are_those_of_the_committed_results():
    text = readme.PAGE.read_text()
    for device in readme.DEVICES:
        assert text.count(readme.BEGIN.format(device)) == text.count(readme.END.format(device)) == 1
    for page, expected in readme.pages().items():
        assert page.read_text() == expected, "python -m benchmarks.report.readme --tables"

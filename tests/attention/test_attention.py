"""Test the registered attention function: its errors, and the selection of its kernel.

A kernel with wrong results must be skipped.
"""

import logging
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from grpo_fast.attention import (
    TreeLayout,
    check_supported,
    disable_dropout,
    dispatch,
    register,
    shared_prompt_supported,
)
from grpo_fast.attention.dispatch import Kind, Provider
from tests.attention.layouts import two_levels
from tests.tiny import tiny_model

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture
def fresh_choice():
    dispatch.choose.cache_clear()
    yield
    dispatch.choose.cache_clear()


EVERY = "flash-attn flash-attn-4 flash_attn_interface"


@pytest.mark.parametrize(
    ("capability", "packages", "kind", "expected"),
    [
        ((9, 0), "", Kind("cpu", FP32, 64), "flash_cpu explicit"),
        ((9, 0), EVERY, Kind("cpu", FP32, 64, has_window=True), "explicit"),
        ((9, 0), EVERY, Kind("cpu", FP32, 64, has_softcap=True), "explicit"),
        ((9, 0), EVERY, Kind("cpu", FP64, 20), "flash_cpu explicit"),
        ((9, 0), EVERY, Kind("cpu", BF16, 64, has_window=True), "explicit"),
        ((9, 0), EVERY, Kind("cpu", BF16, 64, has_softcap=True), "explicit"),
        ((9, 0), EVERY, Kind("cpu", FP16, 64), "explicit"),
        ((9, 0), EVERY, Kind("cuda", BF16, 64), "fa4 fa3 fa2 flash_aten flex explicit"),
        ((9, 0), EVERY, Kind("cuda", FP16, 128, True), "fa4 fa3 fa2 flash_aten flex explicit"),
        ((9, 0), EVERY, Kind("cuda", BF16, 64, has_softcap=True), "fa3 fa2 flex explicit"),
        ((9, 0), EVERY, Kind("cuda", BF16, 256), "fa3 fa2 flash_aten flex explicit"),
        ((9, 0), EVERY, Kind("cuda", BF16, 512), "flex explicit"),
        ((9, 0), EVERY, Kind("cuda", BF16, 60), "flex explicit"),
        ((9, 0), EVERY, Kind("cuda", FP32, 64), "flex explicit"),
        ((8, 0), EVERY, Kind("cuda", BF16, 64), "fa2 flash_aten flex explicit"),
        ((10, 0), EVERY, Kind("cuda", BF16, 64), "fa4 fa2 flash_aten flex explicit"),
        # FA2 and FA4 both install a module named flash_attn. If only one of these packages is
        # installed, the other package must not appear available.
        ((9, 0), "flash-attn-4", Kind("cuda", BF16, 64), "fa4 flash_aten flex explicit"),
        ((9, 0), "flash-attn", Kind("cuda", BF16, 64), "fa2 flash_aten flex explicit"),
        ((9, 0), "", Kind("cuda", BF16, 64), "flash_aten flex explicit"),
        ((7, 5), "", Kind("cuda", BF16, 64), "flex explicit"),
    ],
    ids=str,
)
def test_candidates_by_kind_package_and_gpu(monkeypatch, capability, packages, kind, expected):
    monkeypatch.setattr(dispatch, "_has_distribution", packages.split().__contains__)
    monkeypatch.setattr(dispatch.util, "find_spec", lambda name: name in packages.split() or None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert " ".join(provider.name for provider in dispatch.candidates(kind)) == expected


def test_a_kernel_that_fails_or_lies_is_passed_over_with_one_line(
    fresh_choice, monkeypatch, caplog
):
    honest = next(p for p in dispatch.PROVIDERS if p.name == "explicit")
    raising = Provider("raising", lambda kind: True, lambda *_: 1 / 0)
    unable = Provider("unable", lambda kind: False, lambda *_: 1 / 0)

    def without_prompts(q, k, v, layout, params):
        return honest.attend(q, k, v, TreeLayout.of(layout.lengths), params)

    def wrong_gradient(q, k, v, layout, params):
        return honest.attend(q, k.detach() + 0.9 * (k - k.detach()), v, layout, params)

    def nan_gradient(q, k, v, layout, params):
        return honest.attend(q, k, v, layout, params) + 0 * (k.sum() - k.sum().detach()).sqrt()

    liars = [
        Provider(f.__name__, lambda kind: True, f)
        for f in (without_prompts, wrong_gradient, nan_gradient)
    ]
    monkeypatch.setattr(dispatch, "PROVIDERS", (raising, unable, *liars, honest))
    caplog.set_level(logging.INFO, logger="grpo_fast.attention.dispatch")
    for _ in range(2):
        assert dispatch.choose(Kind("cpu", FP32, 8)).name == "explicit"
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 5
    assert "raising skipped on cpu float32, head_dim 8: it fails: division by zero" in lines[0]
    for line, liar in zip(lines[1:4], liars, strict=True):
        assert f"{liar.name} skipped" in line and "it differs by" in line
    assert lines[4].startswith("packed attention on cpu float32, head_dim 8: using explicit")
    monkeypatch.setattr(dispatch, "PROVIDERS", (raising,))
    with pytest.raises(
        RuntimeError, match="no attention kernel agrees with the reference on cpu float64"
    ):
        dispatch.choose(Kind("cpu", FP64, 8))


@pytest.mark.parametrize(("index", "expected"), [(3, 3), (None, 2)])
def test_the_comparison_runs_on_the_gpu_of_the_tensors(fresh_choice, monkeypatch, index, expected):
    """Check that the thread of the comparison selects the GPU of the tensors.

    A new thread starts with GPU 0, which may belong to a different rank.
    """
    current = threading.local()  # in CUDA, each thread has a current device

    @contextmanager
    def device(index):
        current.index = index
        yield

    def difference():
        used.append(getattr(current, "index", 0))

    used: list[int] = []
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(dispatch, "pair_of", lambda *_: SimpleNamespace(difference=difference))
    monkeypatch.setattr(dispatch, "PROVIDERS", [Provider("any", lambda kind: True, lambda: None)])
    assert dispatch.choose(Kind("cuda", BF16, 64, gpu=index)).name == "any"
    assert used == [expected]
    assert not hasattr(current, "index"), "the caller's own device stays"


@pytest.fixture
def kinds(monkeypatch):
    """Replace `choose` with a recorder, and return the list of input kinds that it received."""
    seen = []
    provider = Provider("spy", lambda kind: True, lambda q, *_: q)
    monkeypatch.setattr(dispatch, "choose", lambda kind: seen.append(kind) or provider)
    return seen


def test_each_gpu_is_tested_by_itself(kinds):
    for device in ("cuda:1", "cuda:3"):
        q = SimpleNamespace(device=torch.device(device), dtype=BF16, shape=(5, 2, 64))
        dispatch.packed_rows_attention(q, q, q, TreeLayout.of([5]), scale=1.0)
    assert [str(kind).split()[0] for kind in kinds] == ["cuda:1", "cuda:3"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_first_call_may_come_without_gradients(fresh_choice, mode):
    state = torch.random.get_rng_state()
    q, k, v = (torch.ones(5, heads, 8) for heads in (2, 1, 1))
    with mode(), torch.autocast("cpu", dtype=BF16):
        out = dispatch.packed_rows_attention(q, k, v, TreeLayout.of([5]), scale=1.0)
    torch.testing.assert_close(out, torch.ones(5, 2, 8))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_window_that_no_query_reaches_is_none(kinds):
    # The longest context has 4 + 3 keys, so a window of 7 or more has no effect and must be
    # dropped.
    q, layout = (torch.ones(9, 1, 8), two_levels([4, 3, 2], [2]))
    for window in (None, 8, 7, 6):
        dispatch.packed_rows_attention(q, q, q, layout, scale=1.0, window=window)
    assert [kind.has_window for kind in kinds] == [False, False, False, True]


def test_refusals():
    model = tiny_model("llama")
    model.set_attn_implementation(register())
    ids = torch.arange(2, 8)[None]
    layout = TreeLayout.of([2, 4])
    call = {"input_ids": ids, "position_ids": layout.position_ids, "use_cache": False}
    with pytest.raises(ValueError, match="packed_layout: expected a TreeLayout"):
        model(**call)
    with pytest.raises(ValueError, match="attention_mask"):
        model(**call, packed_layout=layout, attention_mask=torch.ones_like(ids))
    with pytest.raises(ValueError, match="holds 5 tokens"):
        model(**call, packed_layout=TreeLayout.of([2, 3]))
    with pytest.raises(ValueError, match="one row"):
        model(input_ids=ids.repeat(2, 1), use_cache=False, packed_layout=layout)
    dropping = tiny_model("llama", attention_dropout=0.1).train()
    dropping.set_attn_implementation(register())
    with pytest.raises(ValueError, match="dropout: expected 0"):
        dropping(**call, packed_layout=layout)


def test_no_double_backward():
    q, k, v = (torch.randn(6, heads, 8, requires_grad=True) for heads in (2, 1, 1))
    out = dispatch.packed_rows_attention(q, k, v, two_levels([2, 2, 2], [2]), scale=1.0)
    with pytest.raises(RuntimeError, match="no double backward"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "rope_type"),
        ({"layer_types": ["full_attention", "indexed_attention"]}, "layer_types"),
    ],
)
def test_models_that_cannot_be_packed(fields, message):
    model = SimpleNamespace(config=SimpleNamespace(model_type="some", **fields))
    with pytest.raises(ValueError, match=message):
        check_supported(model)
    assert message in shared_prompt_supported(model)
    assert shared_prompt_supported(SimpleNamespace(config=SimpleNamespace())) is None


def test_dropout_is_switched_off_and_named(caplog):
    model = tiny_model("llama", num_hidden_layers=1)
    disable_dropout(model)
    assert not caplog.records
    model.model.layers[0].self_attn.attention_dropout = 0.5
    model.more = torch.nn.Dropout(1)
    disable_dropout(model)
    assert model.model.layers[0].self_attn.attention_dropout == model.more.p == 0
    (record,) = caplog.records
    assert "dropout is switched off" in record.message and "0.5" in record.message

"""Test the window of a layer, and the sweep on some of its families.

The window is read from the mask that the model requests.
"""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from transformers import masking_utils

from grpo_fast.attention import small_windows, window_as_mask, window_of
from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.kernels.cpu import decode as cpp
from grpo_fast.rollout.own import engine as hf
from grpo_fast.train.policy import Policy, self_check
from tests.attention import sweep
from tests.attention.families import WINDOW, family_model

SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("kind", "reason", "family", "changes"),
    [
        # Every other layer has a window, but only in its mask.
        (sweep.RIGHT, "", "qwen2_moe", {}),
        (sweep.RIGHT, "", "qwen2_moe", {"layer_types": [FULL, SLIDING, SLIDING, FULL]}),
        # In training mode the router would add random noise. Our code must switch it off.
        (sweep.RIGHT, "", "mixtral", {"router_jitter_noise": 0.5}),
        (sweep.RIGHT, "", "seed_oss", {}),  # its config field for dropout has an unusual name
        # Some layers have a window, in their mask and in a keyword argument.
        (sweep.RIGHT, "", "qwen2", {"max_window_layers": 1}),
        (sweep.RIGHT, "", "mistral", {"sliding_window": 1}),
        (sweep.RIGHT, "", "mistral", {"sliding_window": 4096}),  # longer than any sequence
        (sweep.RIGHT, "", "mistral", {"sliding_window": None}),
        (sweep.RIGHT, "", "gemma2", {"attn_logit_softcapping": 5.0}),  # has a softcap
        (sweep.RIGHT, "", "smollm3", {}),  # some layers have no RoPE
        (sweep.RIGHT, "", "exaone4", {"layer_types": [SLIDING, FULL, FULL, SLIDING]}),
        (sweep.RIGHT, "", "deepseek_v3", {}),  # its values are narrower than its keys
        (sweep.REFUSED, "rope_type: 'dynamic' depends on", "mistral", {"rope": "dynamic"}),
        (sweep.REFUSED, "training mode", "phimoe", {}),  # selects experts at random in training
        # Not causal.
        (sweep.REFUSED, "each sequence alone with the fused head", "bert", {"is_decoder": False}),
        (sweep.PLAIN, "chunked_attention", "llama4_text", {}),
        # Adds its mask to the scores.
        (sweep.PLAIN, "packed attention fails: 'int' object", "doge", {}),
        (sweep.PLAIN, "recurrent state", "rwkv", {}),  # also ignores a padding mask
        (sweep.PLAIN, "recurrent state", "recurrent_gemma", {}),
        (sweep.PLAIN, "recurrent state", "xlstm", {}),
        (sweep.PLAIN, "differs from its own logits", "bloom", {}),  # ALiBi
        # Transforms the hidden states before its head.
        (sweep.PLAIN, "differs from its own logits", "bert", {}),
        (sweep.PLAIN, "layer_types", "deepseek_v32", {}),
    ],
    ids=str,
)
def test_verdicts(kind, reason, family, changes):
    """Check whether rows are packed, each sequence is computed alone, or the model is refused."""
    verdict = sweep.judge(family, **changes)
    assert verdict.kind == kind and reason in verdict.reason


def test_the_kernels_in_torch_and_the_gathered_prompts_of_a_plain_mask(monkeypatch):
    monkeypatch.setattr(cpp, "runs", lambda x: False)
    assert sweep.judge("qwen2_moe").kind == sweep.RIGHT


@pytest.mark.parametrize("window", [WINDOW, 4096])  # 4096 is longer than any sequence
def test_a_lost_window_is_found_by_the_self_checks(monkeypatch, window):
    policy = Policy(
        family_model("qwen2_moe", sliding_window=window), build_symbol_tokenizer(["0", "1"])
    )
    monkeypatch.setattr("grpo_fast.attention.model.window_of", lambda mask, keyword: keyword)
    monkeypatch.setattr("grpo_fast.rollout.own.cache.window_of", lambda mask, keyword: keyword)
    self_check(policy)
    assert "differs from its own logits" in policy.unshared
    with policy.generation():
        assert "differs by" in hf.difference_of(policy, hf.LOOP)
    assert policy.lm.config.sliding_window == window


def test_a_loop_that_fails_says_so_of_the_model(monkeypatch):
    policy = Policy(family_model("llama"), build_symbol_tokenizer(["0", "1"]))
    monkeypatch.setitem(hf.RUNS, hf.LOOP, lambda *_, **__: torch.zeros(2) @ torch.zeros(3))
    with policy.generation():
        assert hf.difference_of(policy, hf.LOOP).startswith("it fails: ")


@pytest.mark.parametrize(
    ("mask", "keyword", "expected"),
    [(None, None, None), (None, 7, 7), (7, None, 7), (7, 7, 7), (1, None, 1)],
)
def test_mask_or_keyword(mask, keyword, expected):
    assert window_of(mask, keyword) == expected


@pytest.mark.parametrize(
    ("mask", "keyword"), [(7, 8), (7, 0), (0, None), (-1, -1), (print, None), (torch.ones(1), 7)]
)
def test_refused_masks(mask, keyword):
    with pytest.raises(ValueError, match=r"7 tokens in its mask|at least one token, got"):
        window_of(mask, keyword)


@pytest.mark.parametrize(
    ("build", "more", "expected"),
    [
        ("create_causal_mask", {}, None),
        ("create_sliding_window_causal_mask", {}, 6),
        ("create_chunked_causal_mask", {}, "chunks"),
        ("create_causal_mask", {"and_mask_function": lambda b, h, q, k: k > q - 2}, "its own"),
        ("create_causal_mask", {"or_mask_function": lambda b, h, q, k: k < 3}, "its own"),
    ],
)
def test_what_transformers_asks_for(build, more, expected):
    masking_utils.AttentionMaskInterface.register("asked", window_as_mask)
    config = SimpleNamespace(
        _attn_implementation="asked", sliding_window=6, attention_chunk_size=8, is_causal=True
    )
    mask = getattr(masking_utils, build)(
        config, torch.zeros(1, 9, 4), None, past_key_values=None,
        position_ids=torch.arange(9)[None] % 5, **more,
    )  # fmt: skip
    assert callable(mask) if isinstance(expected, str) else mask == expected


def test_windows_shrink_in_order_and_come_back_after_an_error():
    windows = (4096, None, 64, 2, 0, 4096)
    model = nn.ModuleList(nn.Identity() for _ in windows)
    for layer, window in zip(model, windows, strict=True):
        layer.config = SimpleNamespace(sliding_window=window, max_window_layers=2, hidden_size=64)
        layer.own_window, layer.width = window, window
    model[0].config.attention_chunk_size = 8192
    model[0].config.chunk_size_feed_forward = 0
    rope = model[0].config.rope_parameters = {"original_max_position_embeddings": 16384}

    def windows_of():
        return [(layer.config.sliding_window, layer.own_window) for layer in model]

    before = windows_of()
    with pytest.raises(KeyError), small_windows(model):
        assert windows_of() == [(6, 6), (None, None), (5, 5), (2, 2), (0, 0), (6, 6)]
        assert model[0].config.attention_chunk_size == 7
        assert rope["original_max_position_embeddings"] == 8
        assert model[0].width == 4096 and model[2].config.hidden_size == 64
        assert model[0].config.max_window_layers == 2
        raise KeyError
    assert windows_of() == before and model[0].config.attention_chunk_size == 8192
    assert rope["original_max_position_embeddings"] == 16384


def test_the_sweep_sees_a_wrong_window(monkeypatch):
    """Check that the sweep judges a model as wrong if the window in its mask is ignored.

    The sequences of the sweep exceed the window, so a lost window changes the logps.
    """
    monkeypatch.setattr(sweep, "self_check", lambda policy: 0.0)
    assert sweep.judge("phimoe").kind == sweep.RIGHT
    monkeypatch.setattr("grpo_fast.attention.model.window_of", lambda mask, keyword: keyword)
    assert sweep.judge("phimoe").kind == sweep.WRONG


def test_the_readme_has_a_verdict_for_every_family():
    text = sweep.README.read_text(encoding="utf-8")
    text = text[text.index(sweep.MARKS[0]) : text.index(sweep.MARKS[1])]
    if f"transformers {transformers.__version__}," not in text:
        pytest.skip("the table was made with another transformers")
    named = Counter(word for word in text.split("`")[1::2] if word in sweep.causal_lms())
    assert set(named) == set(sweep.causal_lms()) and "WRONG" not in text

"""Test the accuracy on a pretrained model, SmolLM2-135M-Instruct.

The tests use its hidden states and its LM head. A trained model has larger logits than random
weights, and some tokens are nearly certain. `make test-real` installs the model and sets
GRPO_FAST_REAL_MODEL to its folder. Without this variable the tests are skipped.
"""

import os
from types import SimpleNamespace

import pytest
import torch

import grpo_fast
from grpo_fast.examples import capitals
from tests.loss_cases import BACKENDS, Case, exact_logps, relative_l2, run, truth

FOLDER = os.environ.get("GRPO_FAST_REAL_MODEL")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="`make test-real` installs the model")

# Largest allowed error of a logp in nats. On an Intel Xeon (family 6, model 167), our largest error
# was 1.6e-5, and the largest error of torch was 2.6e-5.
LOGPS_BAR = 3e-5
# In fp32, the absolute error of a logp is about 1e-5. The relative error of the probability
# exp(logp) is then also about 1e-5, and so is the error of the gradient, which is computed from
# probabilities.
GRADIENT_BAR = {torch.float32: 1e-5, torch.bfloat16: 3e-3}


@pytest.fixture(scope="module")
def real() -> SimpleNamespace:
    """Return the hidden states of a short chat, the LM head's weight and the target ids."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    question = {"role": "user", "content": "Why is the sky blue? Answer in two sentences."}
    text = tokenizer.apply_chat_template([*capitals.EXAMPLE, question], tokenize=False)
    text += (
        "<|im_start|>assistant\nThe sky looks blue because air molecules scatter short wavelengths"
        " more strongly than long ones. So 4 + 9 = 13 photons of 20 reach us sideways.<|im_end|>"
    )
    ids = torch.tensor(tokenizer(text)["input_ids"])
    with torch.no_grad():
        hidden = model.model(ids[None, :-1]).last_hidden_state[0]
    assert len(ids) > 64 and hidden.shape[1] == 576
    return SimpleNamespace(hidden=hidden, weight=model.lm_head.weight.detach(), ids=ids[1:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_head_against_fp64(real, dtype, backend):
    hidden, weight, ids = real.hidden.to(dtype), real.weight.to(dtype), real.ids
    noise, shape = torch.Generator().manual_seed(9), (1, len(ids))
    case = Case(
        hidden[None], weight, None, ids[None], torch.ones(shape, dtype=torch.bool),
        torch.randn(shape, generator=noise), None, None, options={"loss_type": "dapo"},
    )  # fmt: skip
    exact, entropy64 = exact_logps(case)
    leaves = [x.clone().requires_grad_() for x in (case.hidden, weight)]
    found = grpo_fast.linear_logps(*leaves, case.ids, return_entropy=True, backend=backend)
    logps, entropy = (x.detach() for x in found)
    plain = (hidden @ weight.T).float().log_softmax(-1).gather(1, ids[:, None])[:, 0]
    error, error_of_torch = (float((x.double() - exact).abs().max()) for x in (logps, plain))
    print(f"largest error in nats: {error:.1e}, of torch {error_of_torch:.1e}")
    assert error <= min(LOGPS_BAR, 2 * error_of_torch)
    assert (entropy.double() - entropy64).abs().max() <= LOGPS_BAR
    # Keep the ratios away from the clip bounds, where rounding could choose a different branch.
    apart = 0.11 * torch.randn(shape, generator=noise).clamp(-1, 1)
    case = case.but(old=(logps - apart).clamp(max=0))
    result, true = run("linear", case, backend=backend), truth("linear", case)
    errors = {
        name: relative_l2(grad, getattr(true, f"{name}_grad"))
        for name, grad in result.grads.items()
    }
    print("relative errors:", {name: f"{error:.1e}" for name, error in errors.items()})
    assert max(errors.values()) <= GRADIENT_BAR[dtype], errors

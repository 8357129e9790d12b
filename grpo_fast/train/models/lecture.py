"""The lecture's own model (CS336, policy gradients), as a transformers causal LM.

It is not autoregressive: a prompt of P tokens becomes one vector, Σ_i E[x_i]·A_i with a matrix A_i
for each position, and the token at place j of the response has the logits E·(vector·B_j), whatever
the tokens before it are. Embeddings and head share E.

Row t of a sequence predicts token t + 1, so the row at position p serves place p + 1 − P. A longer
prompt counts by its first P tokens, and places beyond the last matrix use the last one. A packed
row is told apart by its layout, through a (T, T) mask, which the lecture's sizes allow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from grpo_fast.attention import TreeLayout
from grpo_fast.attention.kernels.reference import visible

MODEL_TYPE = "lecture"
NEVER = -100.0  # the logit bias of padding and end: a response ends by its length alone


class LectureConfig(PreTrainedConfig):
    """Sizes: P prompt tokens, and as many places of a response as have a matrix of their own."""

    model_type = MODEL_TYPE
    num_hidden_layers = 0  # of the cache that `generate` makes, and nobody fills

    def __init__(
        self,
        vocab_size: int = 7,
        hidden_size: int = 10,
        prompt_length: int = 3,
        response_length: int = 3,
        initializer_range: float = 1.0,
        tie_word_embeddings: bool = True,
        **more: Any,
    ) -> None:
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.prompt_length, self.response_length = prompt_length, response_length
        self.initializer_range = initializer_range  # of the embedding
        super().__init__(tie_word_embeddings=tie_word_embeddings, **more)


class LecturePreTrainedModel(PreTrainedModel):
    config_class = LectureConfig
    base_model_prefix = "model"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, LectureModel):
            for matrices in (module.encode, module.decode):
                nn.init.normal_(matrices, std=self.config.hidden_size**-0.5)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
            for token in (self.config.pad_token_id, self.config.eos_token_id):
                if token is not None:
                    module.bias[token] = NEVER


class LectureModel(LecturePreTrainedModel):
    """The trunk: from tokens to the vectors that the head turns into logits."""

    def __init__(self, config: LectureConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.encode = nn.Parameter(torch.empty(config.prompt_length, width, width))
        self.decode = nn.Parameter(torch.empty(config.response_length, width, width))
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,  # (B, T)
        attention_mask: Tensor | None = None,  # (B, T), 0 at padding on the left
        position_ids: Tensor | None = None,  # (B, T)
        packed_layout: TreeLayout | None = None,
        **_: Any,
    ) -> BaseModelOutput:  # (B, T, H)
        length = input_ids.shape[1]
        if packed_layout is not None:
            seen = visible(packed_layout)
        else:
            seen = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
        if attention_mask is not None:
            seen = seen & attention_mask.bool()[:, None]
            position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device)[None]
        places, prompt = self.config.response_length, self.config.prompt_length
        x = self.embed_tokens(input_ids)
        of_prompt = (position_ids < prompt).unsqueeze(-1)
        x = x * of_prompt  # a response's tokens tell nothing
        x = torch.einsum("bth,bthk->btk", x, self.encode[position_ids.clamp(max=prompt - 1)])
        place = (position_ids + 1 - prompt).clamp(0, places - 1)
        hidden = torch.einsum("bth,bthk->btk", seen.to(x.dtype) @ x, self.decode[place])
        return BaseModelOutput(last_hidden_state=hidden)


class LectureForCausalLM(LecturePreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    sampled_by_generate = "this model is not autoregressive"

    def __init__(self, config: LectureConfig) -> None:
        super().__init__(config)
        self.model = LectureModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        del self.lm_head.bias
        self.lm_head.register_buffer("bias", torch.zeros(config.vocab_size))  # never trained
        self.post_init()

    def forward(self, input_ids: Tensor, **inputs: Any) -> CausalLMOutput:
        hidden = self.model(input_ids, **inputs).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden))

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> dict[str, Any]:
        """The whole sequence each time: nothing is cached."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}


def register() -> None:
    """Make `model_type: lecture` known to transformers' auto classes."""
    AutoConfig.register(MODEL_TYPE, LectureConfig, exist_ok=True)
    AutoModelForCausalLM.register(LectureConfig, LectureForCausalLM, exist_ok=True)

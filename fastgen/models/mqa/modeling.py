"""The models of "Fast Transformer Decoding: One Write-Head is All You Need" (§4.1), for transformers.

Tests: tests/models/mqa/test_models.py, tests/models/mqa/test_training.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, Cache, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.utils import can_return_tuple

from fastgen.models.cache_names import CACHE, named_cache
from fastgen.models.mqa.configuration import MQATransformerConfig
from fastgen.models.mqa.stack import MQAPreTrainedModel, MQATransformerDecoder, MQATransformerEncoder


class MQATransformerModel(MQAPreTrainedModel):
    """An encoder and a decoder, which share their embeddings."""

    _tied_weights_keys = {
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    }

    def __init__(self, config: MQATransformerConfig) -> None:
        super().__init__(config)
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = MQATransformerEncoder(config)
        self.decoder = MQATransformerDecoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.shared

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.shared = self.encoder.embed_tokens = self.decoder.embed_tokens = value

    @named_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        """Returns hidden states `[B, n, d]` of `decoder_input_ids [B, n]`; source: `input_ids` or `encoder_outputs`."""
        wanted = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds, **wanted)
        decoded = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs[0],
            attention_mask,
            cache,
            decoder_inputs_embeds,
            use_cache=use_cache,
            **wanted,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoded.last_hidden_state,
            **{CACHE: decoded.get(CACHE)},
            decoder_hidden_states=decoded.hidden_states,
            decoder_attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
            encoder_last_hidden_state=encoder_outputs[0],
            encoder_hidden_states=getattr(encoder_outputs, "hidden_states", None),
            encoder_attentions=getattr(encoder_outputs, "attentions", None),
        )


class MQATransformerForConditionalGeneration(MQAPreTrainedModel, GenerationMixin):
    """The paper's model for translation: from `input_ids [B, m]` to logits `[B, n, vocab_size]` of a target.

    Trains with `labels [B, n]` (-100 where nothing is to be predicted), from which the decoder's inputs are made.
    """

    _tied_weights_keys = {"lm_head.weight": "model.shared.weight"}

    def __init__(self, config: MQATransformerConfig) -> None:
        super().__init__(config)
        self.model = MQATransformerModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Returns the labels `[B, n]` shifted to the right, after the start token; -100 becomes padding."""
        start = labels.new_full((labels.shape[0], 1), self.config.decoder_start_token_id)
        return torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == -100, self.config.pad_token_id)], dim=1)

    @named_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs,
            cache,
            inputs_embeds,
            decoder_inputs_embeds,
            use_cache,
            output_attentions,
            output_hidden_states,
        )
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return Seq2SeqLMOutput(loss=loss, logits=logits, **_other_fields(outputs))


class MQATransformerForCausalLM(MQAPreTrainedModel, GenerationMixin):
    """The paper's language model (§4.1, Table 3): the decoder alone, logits `[B, n, vocab_size]` of the next tokens.

    Trains with `labels [B, n]`, the tokens themselves (-100 where nothing is to be predicted). With the configuration
    of an encoder-decoder, it has the sizes of its decoder.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MQATransformerConfig) -> None:
        if config.is_encoder_decoder:
            config = type(config)(**(config.to_dict() | {"is_encoder_decoder": False}))
        super().__init__(config)
        self.model = MQATransformerDecoder(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    @named_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithCrossAttentions:
        """Returns logits; logits_to_keep: the number of last positions that get them, or their indices; 0 for all."""
        outputs = self.model(
            input_ids,
            attention_mask,
            cache=cache,
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, positions])
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithCrossAttentions(loss=loss, logits=logits, **_other_fields(outputs))


def _other_fields(outputs: Any) -> dict[str, Any]:
    """Returns the fields of a model's output except the last hidden states."""
    return {name: value for name, value in outputs.items() if name != "last_hidden_state"}


AutoModel.register(MQATransformerConfig, MQATransformerModel, exist_ok=True)
AutoModelForSeq2SeqLM.register(MQATransformerConfig, MQATransformerForConditionalGeneration, exist_ok=True)
AutoModelForCausalLM.register(MQATransformerConfig, MQATransformerForCausalLM, exist_ok=True)

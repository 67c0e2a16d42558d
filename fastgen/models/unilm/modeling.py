"""UniLM: one encoder-only network that writes a target after a source (arXiv:1905.03197, §2.2 to §2.5).

`[CLS] source [SEP]` is the prompt of `generate`. At every step the input is the last token, followed by `[MASK]`, whose
output predicts the next token. The keys of `[MASK]` belong to that step only, so they never enter the cache.

Tests: tests/models/unilm/test_unilm_generate.py
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    __version__,
    initialization,
)
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from fastgen.models.cache_names import CACHE, named_cache
from fastgen.models.unilm.configuration import UniLMConfig
from fastgen.models.unilm.encoder import UniLMEmbeddings, UniLMEncoder, UniLMHead
from fastgen.models.unilm.masks import visible
from fastgen.models.unilm.relative_positions import RelativePositions, distances_of

OLD_CACHES = "cache_position" in inspect.signature(DynamicLayer.get_mask_sizes).parameters


class InTarget(LogitsProcessor):
    """A logits processor that sees the target only, without the `source_length` tokens before it."""

    def __init__(self, processor: LogitsProcessor, source_length: int) -> None:
        self.processor, self.source_length = processor, source_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns the processed scores `[rows, vocab_size]`; input_ids `[rows, length]`."""
        return self.processor(input_ids[:, self.source_length :], scores)


class UniLMForConditionalGeneration(PreTrainedModel, GenerationMixin):
    """UniLM for sequence-to-sequence: for `generate` a decoder-only model whose prompt is the source.

    It follows the published decoder: the source sees all of itself, the target what precedes it, segments differ,
    `[MASK]` is fed at each step at the next position, and a step keeps the keys of the token, not of `[MASK]`. Version
    2's pseudo-masked training uses the same decoder, with relative positions (`rel_pos_bins`).

    Differences:
    - `generate` returns source and target, like every decoder-only model: cut off the first `input_ids.shape[1]`.
    - Sources are padded on the left (`tokenizer.padding_side = "left"`); the published decoder pads on the right.
      Positions count from the first token that is not padding, so both give the same.
    - `generate` raises ValueError if several tokens are predicted at a time (assistants, prompt lookup), the source
      comes in parts (`prefill_chunk_size`), or there are too few positions.
    - Keys and values are cached; version 1's decoder stores hidden states and multiplies them again at each step.
    - Attention weights as an output are not supported.
    - `[CLS]`'s pooled output and next-sentence prediction are not needed for generation and are omitted.

    Names in its state dict are the published ones (`bert.encoder.layer.0.attention.self.query.weight`,
    `cls.predictions.bias`); `load_published` reads such files.
    """

    config_class = UniLMConfig
    config: UniLMConfig
    base_model_prefix = "bert"
    main_input_name = "input_ids"
    input_modalities = ("text",)
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _is_stateful = True  # makes `generate` refuse assistants: a forward predicts one token, not several
    _no_split_modules: ClassVar[list[str]] = ["UniLMLayer"]
    _tied_weights_keys: ClassVar[dict[str, str]] = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"
    }

    def __init__(self, config: UniLMConfig) -> None:
        if OLD_CACHES:
            raise RuntimeError(
                f"UniLM with transformers {__version__}: its caches ask for positions (known good: 5.23)"
            )
        super().__init__(config)
        self.bert = nn.ModuleDict({"embeddings": UniLMEmbeddings(config), "encoder": UniLMEncoder(config)})
        if config.rel_pos_bins:
            sizes = config.rel_pos_bins, config.num_attention_heads, config.max_rel_pos
            self.bert["rel_pos_bias"] = RelativePositions(*sizes)
        self.cls = nn.ModuleDict({"predictions": UniLMHead(config)})
        self.post_init()

    @named_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        source_length: int | None = None,
        append_mask: bool = False,
    ) -> CausalLMOutputWithPast:
        """Returns the logits of the input tokens, or of the next one.

        input_ids `[rows, length]`, int64: tokens that follow those of the cache.
        attention_mask: `[rows, cached + length]`, 0 for padding; or a boolean mask of visible keys,
            `[rows, length, cached + length]` (see `attention_masks`) or `[rows, 1, length, cached + length]`.
        token_type_ids, position_ids `[rows, length]`, int64. By default the segments of source and target, and
            positions counted from the first token that is not padding.
        labels `[rows, length]`, int64: tokens to predict at their positions, -100 where nothing is to be predicted.
            This is the masked-target objective (§2.3): `input_ids` hold `[MASK]` there.
        source_length: the number of `input_ids`, from the first, that are source; None for all. 0 for tokens after a
            source that is in the cache.
        append_mask: whether `[MASK]` is appended after the last token, as in `generate`. It sees what the last token
            sees, and itself.

        The output's `logits` are `[rows, length, vocab_size]`, or with append_mask `[rows, 1, vocab_size]`, for the
        next token. `loss`: the mean cross-entropy over labels. `cache` (`past_key_values` before transformers 5.24):
        does not contain `[MASK]`.

        Raises ValueError for labels together with append_mask.
        """
        if labels is not None and append_mask:
            raise ValueError("labels with append_mask=True: only with False, the appended [MASK] has no label")
        if use_cache is None:
            use_cache = self.config.use_cache and labels is None
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        length = input_ids.shape[1]
        source_length = length if source_length is None else source_length
        if position_ids is None:
            position_ids = self._positions(input_ids, attention_mask, cache)
        if token_type_ids is None:
            is_source = torch.arange(length, device=input_ids.device) < source_length
            token_type_ids = torch.where(is_source, self.config.source_type_id, self.config.target_type_id)
            token_type_ids = token_type_ids.expand_as(input_ids)
        seen = _seen(input_ids, attention_mask, cache, source_length)
        if append_mask:
            input_ids = _append(input_ids, self.config.mask_token_id)
            token_type_ids = _append(token_type_ids, self.config.target_type_id)
            position_ids = torch.cat([position_ids, position_ids[:, -1:] + 1], dim=1)
        hidden = self.bert["embeddings"](input_ids, token_type_ids, position_ids)
        biases = self._biases(seen, 0 if cache is None else cache.get_seq_length(), append_mask)
        hidden = self.bert["encoder"](hidden, *biases, cache, append_mask)
        logits = self.cls["predictions"](hidden[:, -1:] if append_mask else hidden)
        loss = None if labels is None else functional.cross_entropy(logits.transpose(1, 2), labels)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache if use_cache else None})

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, source_length: int, token_type_ids: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Returns the forward's arguments for a step. source_length: the length of the prompt with padding.

        token_type_ids are ignored: BERT's tokenizer returns BERT's, and the segments here are known.
        """
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        cached = input_ids.shape[1] - inputs["input_ids"].shape[1]
        return inputs | {"source_length": max(source_length - cached, 0), "append_mask": True}

    @named_cache
    def create_masks_for_generate(
        self,
        config: UniLMConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        cache: Cache | None,
        is_first_iteration: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """Returns the boolean mask `[rows, 1, length, capacity]`; `generate` calls it for caches of fixed capacity."""
        length = inputs_embeds.shape[1]
        return _seen(inputs_embeds, attention_mask, cache, length if is_first_iteration else 0)

    def _prefill(
        self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        model_kwargs["source_length"] = input_ids.shape[1]  # steps without a cache need it
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)

    def _validate_generated_length(self, generation_config: Any, *args: Any, **kwargs: Any) -> None:
        super()._validate_generated_length(generation_config, *args, **kwargs)
        most = self.config.max_position_embeddings
        if generation_config.max_length > most:
            raise ValueError(
                f"max_length={generation_config.max_length} for source and target together: "
                f"at most {most} (max_position_embeddings)"
            )
        if getattr(generation_config, "prefill_chunk_size", None) is not None:
            raise ValueError(
                f"prefill_chunk_size={generation_config.prefill_chunk_size}: only None, as all of a source sees itself"
            )

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        """Returns the library's processors, but blocks n-grams in the target only, like the published decoder."""
        length = kwargs["input_ids_seq_length"]
        return LogitsProcessorList(
            InTarget(processor, length) if isinstance(processor, NoRepeatNGramLogitsProcessor) else processor
            for processor in super()._get_logits_processor(*args, **kwargs)
        )

    def _positions(self, input_ids: Tensor, attention_mask: Tensor | None, cache: Cache | None) -> Tensor:
        length = input_ids.shape[1]
        if attention_mask is not None and attention_mask.dim() == 2:
            return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)[:, -length:]
        cached = 0 if cache is None else cache.get_seq_length()
        return (torch.arange(length, device=input_ids.device) + cached).expand_as(input_ids)

    def _biases(self, seen: Tensor, cached: int | Tensor, append_mask: bool) -> tuple[Tensor, Tensor | float]:
        """Returns what is added to scores, `[rows, heads, L, N]`, and to the score of `[MASK]` with itself.

        `[MASK]` sees the keys that the token before it sees.
        """
        distances = distances_of(seen, cached, append_mask) if self.config.rel_pos_bins else None
        if append_mask:
            seen = torch.cat([seen, seen[:, :, -1:]], dim=2)
        hidden = torch.zeros_like(seen, dtype=self.dtype).masked_fill(~seen, float("-inf"))
        if distances is None:
            return hidden, 0.0
        relative = self.bert["rel_pos_bias"]
        return hidden + relative(distances), relative(distances.new_zeros(1, 1))

    def get_input_embeddings(self) -> nn.Module:
        return self.bert["embeddings"].word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.bert["embeddings"].word_embeddings = value

    def get_output_embeddings(self) -> nn.Module:
        return self.cls["predictions"].decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.cls["predictions"].decoder = new_embeddings

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resizes the embeddings like the library; new tokens have an output bias of 0."""
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        head = self.cls["predictions"]
        head.bias = nn.Parameter(functional.pad(head.bias.detach(), (0, len(embeddings.weight) - len(head.bias))))
        return embeddings

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, UniLMHead):
            initialization.zeros_(module.bias)


def _append(ids: Tensor, value: int) -> Tensor:
    """Returns ids `[rows, length]` with another column of this value."""
    return functional.pad(ids, (0, 1), value=value)


def _seen(tokens: Tensor, attention_mask: Tensor | None, cache: Cache | None, source_length: int) -> Tensor:
    """Returns the boolean mask `[rows or 1, 1, length, cached + length]`, or with all keys of a fixed capacity.

    Only the length and device of tokens `[rows, length, …]` are used.
    """
    if attention_mask is not None and attention_mask.dim() > 2:
        return (attention_mask if attention_mask.dim() == 4 else attention_mask[:, None]).bool()
    length = tokens.shape[1]
    device = tokens.device
    cached, capacity = (0, length) if cache is None else (cache.get_seq_length(), cache.get_mask_sizes(length, 0)[0])
    queries = torch.arange(length, device=device) + cached
    keys = torch.arange(capacity, device=device)
    seen = visible(queries[:, None], keys, cached + source_length)
    if attention_mask is None:
        return seen[None, None]
    is_token = functional.pad(attention_mask.bool(), (0, capacity - attention_mask.shape[1]))
    return (seen & is_token[:, None])[:, None]


AutoModelForCausalLM.register(UniLMConfig, UniLMForConditionalGeneration, exist_ok=True)

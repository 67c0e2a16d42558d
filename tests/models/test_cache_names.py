"""fastgen's models take and return their KV cache under the library's name, and under the older one."""

import inspect

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from fastgen.models.cache_names import CACHE, named_cache
from fastgen.models.mqa.configuration import MQATransformerConfig
from fastgen.models.mqa.modeling import MQATransformerForCausalLM, MQATransformerForConditionalGeneration
from fastgen.models.unilm.configuration import UniLMConfig
from fastgen.models.unilm.modeling import UniLMForConditionalGeneration

SIZES = {"vocab_size": 40, "num_attention_heads": 2}
MQA = {"d_model": 16, "d_ff": 32, "head_dim": 8, "encoder_layers": 1, "decoder_layers": 1, **SIZES}
UNILM = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "mask_token_id": 4, **SIZES}
INPUT_IDS = torch.tensor([[5, 6, 7]])


def causal():
    return MQATransformerForCausalLM(MQATransformerConfig(**MQA, is_encoder_decoder=False)).eval(), {}, DynamicCache()


def seq2seq():
    model = MQATransformerForConditionalGeneration(MQATransformerConfig(**MQA)).eval()
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    return model, {"decoder_input_ids": INPUT_IDS}, cache


def unilm():
    return UniLMForConditionalGeneration(UniLMConfig(**UNILM)).eval(), {}, DynamicCache()


@pytest.mark.parametrize("make", [causal, seq2seq, unilm])
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.no_grad()
def test_a_cache_is_taken_under_both_names(make, name):
    model, arguments, cache = make()
    output = model(input_ids=INPUT_IDS, **arguments, **{name: cache})
    assert output[CACHE] is cache and cache.get_seq_length() == 3


@pytest.mark.parametrize("make", [causal, seq2seq, unilm])
def test_signatures_have_the_librarys_name_of_the_cache(make):
    parameters = inspect.signature(make()[0].forward).parameters
    assert CACHE in parameters and not {"cache", "past_key_values"} - {CACHE} & parameters.keys()


def test_both_names_of_a_cache_together_are_an_error():
    with pytest.raises(ValueError, match="cache and past_key_values are one argument"):
        named_cache(lambda cache=None: cache)(cache=1, past_key_values=2)

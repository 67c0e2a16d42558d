"""The KV cache has the library's name, which newer versions have changed; fastgen's models also take the older one."""

import inspect
import logging
import warnings
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from tiny_models import tiny, token_ids
from transformers import DynamicCache, EncoderDecoderCache

import fastgen
from fastgen.models.cache_names import CACHE, CACHE_NAMES, cache_name, named_cache
from fastgen.models.mqa.configuration import MQATransformerConfig
from fastgen.models.mqa.modeling import MQATransformerForCausalLM, MQATransformerForConditionalGeneration
from fastgen.models.unilm.configuration import UniLMConfig
from fastgen.models.unilm.modeling import UniLMForConditionalGeneration
from fastgen.optimizer.transformers.kv_layers import cache_of

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


@dataclass
class Newer(OrderedDict):
    """Outputs as in 5.24, where reading an older name warns."""

    cache: object = None

    def __post_init__(self):
        if self.cache is not None:
            self["cache"] = self.cache

    def get(self, key, default=None):
        if key in CACHE_NAMES[1:]:
            warnings.warn(f"`{key}` is deprecated", stacklevel=2)
        return super().get("cache" if key in CACHE_NAMES else key, default)


@dataclass
class Older:
    past_key_values: object = None


def test_the_name_is_that_of_the_fields_or_parameters():
    assert cache_name(Newer.__dataclass_fields__) == "cache"
    assert cache_name(Older.__dataclass_fields__) == "past_key_values"
    parameters = inspect.signature(lambda input_ids, past_key_values=None, cache=None: None).parameters
    assert cache_name(parameters) == "cache" and cache_name(()) == "cache"
    assert CACHE in inspect.signature(tiny("llama").forward).parameters


@pytest.mark.filterwarnings("error")
def test_outputs_are_not_asked_for_an_older_name():
    cache = DynamicCache()
    assert cache_of(Newer(cache)) is cache and cache_of(Newer()) is None
    assert cache_of({"past_key_values": cache}) is cache  # from a program, to `generate`


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_no_call_of_fastgen_uses_an_older_name(name, monkeypatch):
    model, input_ids, messages = tiny(name), token_ids(2, 9), []
    # Without the library's cache: it warns once per process.
    monkeypatch.setattr(logging.Logger, "warning_once", lambda logger, message: messages.append(message))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for options in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}, {}):
            model.generate(input_ids, max_new_tokens=12, **options)
        if name == "llama":
            fastgen.log_likelihoods(model, [[5, 6, 7, 8]] * 2, [[9], [10, 11]])
    messages += [str(warning.message) for warning in warned]
    assert not [message for message in messages if any(old in message for old in CACHE_NAMES[1:])]

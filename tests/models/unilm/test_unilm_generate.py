"""UniLM under transformers' generate has the tokens and logits of its slow definition, and shares sources."""

from functools import partial

import pytest
import torch
from parity import compared, run_both
from reports import capturing, replays
from tiny_models import BEAMS, SAMPLES, padded, token_ids
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.t5.modeling_t5 import T5Attention
from unilm_slow import SlowUniLM, next_logits, tiny_unilm

import fastgen
from fastgen.models.unilm import UniLMConfig, UniLMForConditionalGeneration
from fastgen.models.unilm.relative_positions import bins_of

GREEDY = {"do_sample": False, "max_new_tokens": 8}
WAYS = {
    "greedy": GREEDY,
    "beams": BEAMS,
    "samples": SAMPLES,
    "beams without repeated bigrams": {**BEAMS, "no_repeat_ngram_size": 2},
    "greedy without repeated tokens": {**GREEDY, "no_repeat_ngram_size": 1},
}
VERSIONS = {
    "1": {},
    "1, large": {"type_vocab_size": 6, "source_type_id": 4, "target_type_id": 5},
    "2": {"rel_pos_bins": 8, "max_rel_pos": 12, "type_vocab_size": 0},
}


def sources() -> dict[str, torch.Tensor]:
    return padded(9, 5, 7)


@pytest.fixture(scope="module")
def model():
    return tiny_unilm().double()


@pytest.mark.usefixtures("share_always")
@pytest.mark.parametrize("use_cache", (True, False), ids=("cache", "no cache"))
@pytest.mark.parametrize(("way", "version"), [*((way, "1") for way in WAYS), ("beams", "1, large"), ("beams", "2")])
def test_unilm_generates_as_its_slow_definition(way, version, use_cache):
    model, slow = (
        tiny_unilm(kind, **VERSIONS[version]).double() for kind in (UniLMForConditionalGeneration, SlowUniLM)
    )
    arguments = {**sources(), **WAYS[way], "return_dict_in_generate": True, "output_logits": True}
    with fastgen.disabled():
        torch.manual_seed(7)
        expected = slow.generate(**arguments, use_cache=False)
    torch.manual_seed(7)
    output = model.generate(**arguments, use_cache=use_cache)
    assert torch.equal(output.sequences, expected.sequences)
    for logits, wanted in zip(output.logits, expected.logits, strict=True):
        torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)


def test_padding_and_other_inputs_change_nothing(model):
    inputs = sources()
    output = model.generate(**inputs, **GREEDY, eos_token_id=None)
    for row, length in enumerate((9, 5, 7)):
        source = inputs["input_ids"][row, -length:]
        alone = model.generate(source[None], **GREEDY, eos_token_id=None)
        assert torch.equal(alone[0, length:], output[row, 9:])
        assert output[row, 9] == next_logits(model, source.tolist(), []).argmax()


@pytest.mark.usefixtures("share_always")
def test_the_mask_token_never_enters_the_cache():
    cache = compared(tiny_unilm(), sources(), **GREEDY, eos_token_id=None).fast.past_key_values
    assert cache.get_seq_length() == 9 + 8 - 1  # the last token was not fed


@pytest.mark.parametrize("version", ("1", "2"))
@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES, GREEDY), ids=("beams", "samples", "greedy"))
def test_captured_steps_of_unilm_have_the_same_tokens(arguments, version):
    model = tiny_unilm(**VERSIONS[version])
    arguments = {**arguments, "max_new_tokens": 12, "eos_token_id": None}
    with capturing():
        for inputs in (padded(9, 5, 7), padded(4, 8, 3, seed=2)):
            both = run_both(partial(model.generate, **inputs, **arguments))
            assert torch.equal(both.stock, both.fast)
            assert replays(both.report) > 4


def test_static_caches_of_unilm_have_the_same_tokens(model):
    inputs = sources()
    expected = model.generate(**inputs, **BEAMS)
    assert torch.equal(model.generate(**inputs, **BEAMS, cache_implementation="static"), expected)


def test_segments_of_the_tokenizer_are_ignored():
    model = tiny_unilm(**VERSIONS["1, large"])
    inputs = sources()
    zeros = torch.zeros_like(inputs["input_ids"])
    assert torch.equal(model.generate(**inputs, **BEAMS, token_type_ids=zeros), model.generate(**inputs, **BEAMS))


def test_ngrams_are_blocked_in_the_target_only(model):
    source = torch.arange(4, 44)[None]
    target = model.generate(source, **GREEDY, no_repeat_ngram_size=1, eos_token_id=None)[0, 40:].tolist()
    assert len(set(target)) == len(target) == 8
    assert set(target) & set(source[0].tolist())


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"max_new_tokens": 40}, "max_length=49 .* at most 48"),
        ({"max_new_tokens": 4, "prefill_chunk_size": 2}, "prefill_chunk_size=2"),
        ({"max_new_tokens": 4, "prompt_lookup_num_tokens": 2}, "assisted generation is not supported"),
    ],
)
def test_options_that_do_not_fit_are_refused(model, arguments, words):
    with pytest.raises(ValueError, match=words):
        model.generate(token_ids(1, 9), **arguments)


def test_a_forward_takes_tokens_one_by_one(model):
    source, target = token_ids(1, 7), token_ids(1, 3, seed=2)
    with torch.no_grad():
        output = model(source, append_mask=True)
        for index in range(3):
            expected = next_logits(model, source[0].tolist(), target[0, :index].tolist())
            torch.testing.assert_close(output.logits, expected[None, None])
            output = model(
                target[:, index : index + 1], past_key_values=output.past_key_values, source_length=0, append_mask=True
            )
        whole = model(torch.cat([source, target], dim=1), source_length=7, append_mask=True)
    torch.testing.assert_close(output.logits, whole.logits)


@pytest.mark.parametrize("bins, most", ((32, 128), (8, 12)))
def test_bins_of_relative_positions_are_those_of_t5(bins, most):
    distances = torch.arange(-300, 301)
    expected = T5Attention._relative_position_bucket(distances, True, bins, most)
    assert torch.equal(bins_of(distances, bins, most), expected)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_unilm_in_half_precision_agrees_up_to_rounding(dtype):
    model = tiny_unilm()
    source = token_ids(2, 9)
    with torch.no_grad():
        expected = model(source, append_mask=True).logits
        logits = model.to(dtype)(source, append_mask=True).logits
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.float(), expected, atol=0.3, rtol=0.1)


def test_auto_classes_load_a_saved_unilm_unchanged(model, tmp_path):
    assert type(AutoConfig.for_model("unilm")) is UniLMConfig
    assert type(AutoModelForCausalLM.from_config(model.config)) is UniLMForConditionalGeneration
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    assert torch.equal(loaded.generate(**sources(), **GREEDY), model.generate(**sources(), **GREEDY))


def test_the_vocabulary_can_grow():
    model = tiny_unilm()
    before = model(token_ids(1, 5)).logits
    model.resize_token_embeddings(103)
    after = model(token_ids(1, 5)).logits
    assert after.shape == (1, 5, 103)
    torch.testing.assert_close(after[..., :99], before)


@pytest.mark.parametrize(
    "sizes, words",
    [
        ({"rel_pos_bins": 30}, "rel_pos_bins=30: 0 or a multiple of 4"),
        ({"rel_pos_bins": 32, "max_rel_pos": 8}, "max_rel_pos=8: more than 8"),
        ({"num_attention_heads": 5}, "num_attention_heads=5 does not divide hidden_size=768"),
        ({"mask_token_id": 30522}, "mask_token_id=30522: 0 to 30521"),
        ({"target_type_id": 2}, "target_type_id=2: 0 to 1"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        UniLMConfig(**sizes)

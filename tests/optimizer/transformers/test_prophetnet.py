"""ProphetNet: steps with the cache agree with the library without it; the library's own cached steps do not.

Without its cache the library mixes up positions in the predict streams of more than one token: it reads an array of
[streams, heads, length] as one of [length, streams, heads]. `whole_positions` mends that: these tests compare with the
library without its cache, which has none of the cache's defects.
"""

import copy
from contextlib import nullcontext
from types import FunctionType
from unittest import mock

import pytest
import torch
from architectures import SPECIAL
from hooks import watched
from parity import assert_equal_outputs, assert_same, run_both
from reports import CROSS, PROMPT, is_shared, left_alone_because
from tiny_models import lively, padded, tiny, token_ids, with_prefix
from transformers import (
    EncoderDecoderModel,
    ProphetNetConfig,
    ProphetNetForCausalLM,
    ProphetNetForConditionalGeneration,
)
from transformers.models.prophetnet.modeling_prophetnet import ProphetNetNgramSelfAttention

import fastgen
from fastgen.optimizer.decoding.report import PREFIX
from fastgen.optimizer.transformers.models import prophetnet

PARTS = {"layers": 2, "attention_heads": 4}

pytestmark = pytest.mark.usefixtures("one_thread", "share_always")


def make(kind=ProphetNetForConditionalGeneration, **overrides):
    parts = {f"num_{end}_{what}": number for end in ("encoder", "decoder") for what, number in PARTS.items()}
    widths = {"hidden_size": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64}
    sizes = {"vocab_size": 99, "num_buckets": 6, "relative_max_distance": 12}
    return lively(kind(ProphetNetConfig(**{**parts, **widths, **SPECIAL, **sizes, **overrides}))).eval()


@pytest.fixture
def whole_positions(monkeypatch):
    """Mends the positions with and without fastgen, so that the library's prompts are alike, too."""
    original = ProphetNetNgramSelfAttention.get_predict_relative_pos_embeddings

    def embeddings(self, hidden_states, attn_weights, position_ids, buckets):
        if buckets is None:  # a step with the cache
            return original(self, hidden_states, attn_weights, position_ids, buckets)
        states = self.relative_pos_embeddings(hidden_states)  # [rows, length, streams, buckets * heads]
        states = states.unflatten(3, (self.num_buckets, self.num_attn_heads)).permute(0, 2, 4, 1, 3)
        index = buckets.long()[:, None, None].expand(*states.shape[:3], -1, -1)
        return torch.gather(states, 4, index)

    # Named like the library's own function: user code would be left alone.
    embeddings = FunctionType(embeddings.__code__, original.__globals__, closure=embeddings.__closure__)
    monkeypatch.setattr(ProphetNetNgramSelfAttention, "get_predict_relative_pos_embeddings", embeddings)


def is_by_streams(report):
    return any(kernel.startswith(prophetnet.KERNEL) for kernel in report.kernels)


def compared(model, inputs, **arguments):
    """Compares the library without its cache and fastgen with it; returns fastgen's report."""
    arguments = {"max_new_tokens": 9, "return_dict_in_generate": True, "output_logits": True, **arguments}
    arguments["output_scores"] = True
    cached = iter((False, True))
    both = run_both(lambda: model.generate(**inputs, **arguments, use_cache=next(cached)))
    for name in ("sequences", "logits", "scores", "sequences_scores"):
        assert_equal_outputs(both.stock.get(name), both.fast.get(name), name=name)
    assert is_by_streams(both.report)
    return both.report


WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "five beams": {"num_beams": 5, "no_repeat_ngram_size": 2, "length_penalty": 2.0},
    "samples": {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
    "beam samples": {"do_sample": True, "num_beams": 3},
}


@pytest.mark.parametrize("arguments", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("lengths", [(7,), (9, 4, 6, 8)], ids=["one input", "four inputs"])
@pytest.mark.parametrize("has_encoder", (True, False), ids=("encoder-decoder", "decoder only"))
def test_cached_steps_agree_with_the_library_without_cache(has_encoder, lengths, arguments, whole_positions):
    model = make() if has_encoder else make(ProphetNetForCausalLM, add_cross_attention=False)
    report = compared(model, padded(*lengths, side="right" if has_encoder else "left"), **arguments)
    assert not arguments or is_shared(report, CROSS if has_encoder else PROMPT)


@pytest.mark.parametrize("ngram", [1, 3])
@pytest.mark.parametrize("kind", [ProphetNetForConditionalGeneration, ProphetNetForCausalLM])
def test_other_numbers_of_predict_streams_are_right(ngram, kind, whole_positions):
    model = make(kind, ngram=ngram, add_cross_attention=kind is ProphetNetForConditionalGeneration)
    compared(model, padded(8, 5), num_beams=3)


def test_prophetnet_is_right_in_double_precision(whole_positions):
    inputs = padded(8, 5, side="right")
    inputs["attention_mask"] = inputs["attention_mask"].double()  # with integers the library's encoder gives nan
    compared(make().double(), inputs, num_beams=3)


def test_padded_prompts_of_the_decoder_are_right(whole_positions):
    prompts = {f"decoder_{name}": states for name, states in padded(6, 4, seed=3).items()}
    compared(make(), padded(8, 5, side="right") | prompts, num_beams=3)


def test_finished_inputs_leave_the_batch(whole_positions):
    model, inputs = make(), padded(9, 4, 6, 8, side="right")
    arguments = {"num_beams": 3, "max_new_tokens": 20, "eos_token_id": list(range(60, 99))}
    with fastgen.disabled():
        stock = model.generate(**inputs, **arguments, use_cache=False)
    assert torch.equal(stock, model.generate(**inputs, **arguments))
    assert "finished inputs: removed from the batch" in fastgen.explain().shared


@pytest.mark.parametrize("arguments", [{"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}])
def test_steps_are_the_librarys_if_its_cache_is_right(arguments):
    report = assert_same(make(pad_token_id=0), {"input_ids": token_ids(2, 7)}, max_new_tokens=9, **arguments)
    assert is_shared(report, CROSS)
    assert is_by_streams(report)


def test_a_decoder_of_another_encoder_has_its_streams():
    encoder = tiny("bert-encoder").bert
    decoder = make(ProphetNetForCausalLM, pad_token_id=0, add_cross_attention=True)
    model = EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    model.generation_config.update(pad_token_id=0, eos_token_id=2, decoder_start_token_id=2)
    report = assert_same(model, padded(8, 5, side="right"), num_beams=3, max_new_tokens=9)
    assert is_shared(report, CROSS)
    assert is_by_streams(report)


def test_prompts_that_begin_alike_are_computed_whole():
    model = make(ProphetNetForCausalLM, add_cross_attention=False, pad_token_id=0)
    report = assert_same(model, with_prefix(12, 12), max_new_tokens=4)
    assert not report.prefix_length and "CACHE_NOT_EMPTY" in report.codes(PREFIX)


def second_logits(model, inputs, use_cache):
    options = {"max_new_tokens": 3, "return_dict_in_generate": True, "output_logits": True, "use_cache": use_cache}
    with fastgen.disabled():
        return model.generate(**inputs, **options).logits[1]


def test_the_librarys_cache_sees_the_padding_of_prompts(whole_positions):
    model, inputs = make(ProphetNetForCausalLM, add_cross_attention=False, pad_token_id=0), padded(9, 4)
    cached, whole = (second_logits(model, inputs, use_cache) for use_cache in (True, False))
    torch.testing.assert_close(cached[0], whole[0], rtol=1e-4, atol=1e-4)  # without padding
    assert (cached[1] - whole[1]).abs().max() > 0.01


def test_the_library_mixes_up_positions_without_its_cache():
    model, inputs = make(pad_token_id=0), {"input_ids": token_ids(2, 7)}
    assert (second_logits(model, inputs, True) - second_logits(model, inputs, False)).abs().max() > 0.01


def test_buckets_are_computed_once_per_step():
    with watched("streams of ProphetNet") as buckets:
        make(num_encoder_layers=3).generate(token_ids(2, 7), num_beams=2, min_new_tokens=6, max_new_tokens=6)
    assert len(buckets) == 5  # the first of 6 tokens comes from the prompt


def test_outputs_besides_logits_come_from_the_library():
    model, asked = make(pad_token_id=0), {"output_attentions": True, "output_hidden_states": True}
    report = assert_same(model, {"input_ids": token_ids(2, 7)}, num_beams=3, max_new_tokens=5, **asked)
    assert not is_by_streams(report)


def test_a_hooked_layer_sees_all_streams():
    model, seen = make(pad_token_id=0), []
    model.prophetnet.decoder.layers[0].self_attn.register_forward_hook(
        lambda module, args, output: seen.append(output[0].shape[1])
    )
    model.generate(token_ids(2, 7), num_beams=3, max_new_tokens=4)
    assert seen == [3] * 4  # the prompt and three steps
    assert left_alone_because(fastgen.explain(), "HOOKS")


def test_other_forwards_and_gradients_are_the_librarys():
    model = make(pad_token_id=0, dropout=0.1)
    other = copy.deepcopy(model)
    input_ids, labels = token_ids(2, 7), token_ids(2, 5, seed=2)
    losses = []
    for twin, context in ((model, fastgen.disabled()), (other, nullcontext())):
        with context:
            torch.manual_seed(0)
            outputs = twin.train()(input_ids=input_ids, labels=labels)
            outputs.loss.backward()
            with torch.no_grad():
                cache = twin.eval()(input_ids=input_ids, decoder_input_ids=labels[:, :1]).past_key_values
                step = twin(input_ids=input_ids, decoder_input_ids=labels[:, 1:2], past_key_values=cache)
        losses.append((outputs.loss, step.logits, step.logits_ngram))
    for stock, fast in zip(*losses):
        assert torch.equal(stock, fast)
    for stock, fast in zip(model.parameters(), other.parameters()):
        assert (stock.grad is None and fast.grad is None) or torch.equal(stock.grad, fast.grad)


@pytest.mark.parametrize("place", ("a method of one module", "the forward of a projection"))
def test_user_code_is_called_as_by_the_library(place):
    model, seen = make(pad_token_id=0), []
    decoder = model.prophetnet.decoder
    is_method = place.startswith("a method")
    owner = decoder.position_embeddings if is_method else decoder.layers[1].self_attn.query_proj
    name = "_forward" if is_method else "forward"
    original = getattr(owner, name)

    def steered(states):
        result = original(states)
        seen.append(result.shape)
        return result * torch.linspace(0.7, 1.3, len(result)).view(-1, *[1] * (result.dim() - 1))

    with mock.patch.object(owner, name, steered):
        assert_same(model, {"input_ids": token_ids(2, 7)}, num_beams=3, max_new_tokens=5)
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]

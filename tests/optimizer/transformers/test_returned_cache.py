"""Caches that `generate` returns are the library's own, and caches that a caller passes are left alone."""

import copy
import gc
import pickle
import weakref
from contextlib import nullcontext

import pytest
import torch
from hooks import fresh_trust, watched
from parity import assert_equal_caches, assert_equal_outputs, assert_same, compared, run_both
from reports import CROSS, PREFILL, PROMPT, capturing, is_shared, left_alone_because
from tiny_models import BEAMS, BOTH, SAMPLES, inputs_of, padded, tiny, token_ids, unchanged
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput

import fastgen
from fastgen.optimizer.decoding.graph_cache import MOST_BYTES
from fastgen.optimizer.decoding.report import KV_CACHE

NAMES = ("llama", "gpt2", "bart", "t5")
DECODER_ONLY, SEQ2SEQ = NAMES[:2], NAMES[2:]

pytestmark = pytest.mark.usefixtures("share_always")


def both_caches(model, arguments=BEAMS):
    """Returns the outputs of both sides of a generate that has shared."""
    both = compared(model, padded(9, 5), **arguments)
    assert is_shared(both.report, PROMPT)
    return both.stock, both.fast


@pytest.mark.parametrize("name", NAMES)
@BOTH
def test_a_returned_cache_has_plain_layers_of_equal_content(name, arguments):
    stock, fast = both_caches(unchanged(name), arguments)
    assert_plain_and_equal(stock.past_key_values, fast.past_key_values)


@pytest.mark.parametrize("name", NAMES)
@BOTH
def test_a_returned_cache_of_repeated_keys_is_plain(name, arguments, repeated):
    both = compared(unchanged(name), padded(9, 5), **arguments)
    assert both.report.shared == [PREFILL] and "FEW_KEYS" in both.report.codes(KV_CACHE)
    assert_plain_and_equal(both.stock.past_key_values, both.fast.past_key_values)


def assert_plain_and_equal(stock, fast):
    assert_equal_caches(stock, fast)
    for layer in self_attention(fast).layers:
        assert layer.keys.is_contiguous() and layer.keys.data_ptr() != layer.values.data_ptr()


def self_attention(cache):
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


CHANGES = {
    "crop": lambda cache: cache.crop(-3),
    "reorder_cache": lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0, 5, 3, 3])),
    "batch_select_indices": lambda cache: cache.batch_select_indices(torch.tensor([4, 0])),
    "batch_repeat_interleave": lambda cache: cache.batch_repeat_interleave(2),
    "reset": lambda cache: cache.reset(),
}


WAYS = {"copy": copy.deepcopy, "pickle": lambda cache: pickle.loads(pickle.dumps(cache))}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_returned_cache_can_be_copied_and_changed(name, change, way):
    stock, fast = both_caches(unchanged(name))
    changed = [way(output.past_key_values) for output in (stock, fast)]
    for cache in changed:
        change(cache)
    assert_equal_caches(*changed)
    assert_equal_caches(stock.past_key_values, fast.past_key_values)


@pytest.mark.parametrize("name", DECODER_ONLY)
@pytest.mark.parametrize("arguments", ({}, {"do_sample": True}), ids=("greedy", "sample"))
def test_a_returned_cache_serves_forwards_and_generate(name, arguments):
    model, outputs = unchanged(name), both_caches(unchanged(name), SAMPLES)
    longer = torch.cat([outputs[1].sequences, token_ids(outputs[1].sequences.shape[0], 2, seed=6)], dim=1)
    caches = iter([output.past_key_values for output in outputs])

    def call():
        cache = next(caches)
        options = {"max_new_tokens": 4, "return_dict_in_generate": True, **arguments}
        generated = model.generate(longer, past_key_values=cache, **options)
        with torch.no_grad():
            return generated, model(generated.sequences[:, -1:], past_key_values=cache, use_cache=True).logits

    both = run_both(call)
    assert_equal_outputs(both.stock, both.fast)
    assert left_alone_because(both.report, "ONE_ROW_PER_INPUT")


@BOTH
def test_a_static_cache_of_the_caller_is_left_alone(arguments):
    model, prompt = unchanged("llama"), token_ids(2, 9)
    used = []

    def call():
        used.append(StaticCache(config=model.config, max_cache_len=32))
        return model.generate(prompt, past_key_values=used[-1], **arguments)

    both = run_both(call)
    assert torch.equal(both.stock, both.fast)
    assert left_alone_because(both.report, "USER_CACHE")
    assert_equal_caches(*used)


@pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="the older backends need other packages")
@BOTH
def test_a_quantized_cache_is_left_alone(arguments):
    quantized = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    assert left_alone_because(
        assert_same(unchanged("llama"), padded(9, 5), **arguments, **quantized), "CACHE_TYPE", "QuantizedCache"
    )


@BOTH
@pytest.mark.parametrize(
    ("what", "name"), [("embeddings", name) for name in NAMES] + [("encoder outputs", name) for name in SEQ2SEQ]
)
def test_states_in_place_of_tokens_are_shared(what, name, arguments):
    model, inputs = unchanged(name), inputs_of(name, 9, 5)
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(inputs["input_ids"])
        encoded = model.get_encoder()(**inputs).last_hidden_state if name in SEQ2SEQ else None

    def call():
        states = {"inputs_embeds": embeddings}
        if what == "encoder outputs":  # the library changes them
            states = {"encoder_outputs": BaseModelOutput(encoded.clone())}
        outputs = {"return_dict_in_generate": True, "output_scores": True}
        return model.generate(**states, attention_mask=inputs["attention_mask"], **arguments, **outputs)

    both = run_both(call)
    assert_equal_outputs(both.stock, both.fast)
    assert is_shared(both.report, PROMPT, *[CROSS] * (name in SEQ2SEQ))


@pytest.mark.parametrize("name", NAMES)
@BOTH
def test_a_custom_generate_sees_plain_layers_only(name, arguments):
    seen = []

    def two_steps(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        output = model._prefill(input_ids, generation_config, model_kwargs)
        cache = output.past_key_values
        seen.append({type(layer) for layer in self_attention(cache).layers})
        for layer in self_attention(cache).layers:
            layer.keys.view(-1)[::3] = 0.5
            layer.values = layer.values * 1.5
        return input_ids, output.logits[:, -1], copy.deepcopy(cache), cache

    model, inputs = unchanged(name), inputs_of(name, 9, 5)
    both = run_both(lambda: model.generate(**inputs, **arguments, custom_generate=two_steps))
    assert seen == [{DynamicLayer}, {DynamicLayer}]
    assert is_shared(both.report) and "CUSTOM_GENERATE" in both.report.codes()
    assert_equal_outputs(both.stock, both.fast)


@pytest.mark.parametrize("hold", (copy.deepcopy, lambda cache: cache), ids=("copied", "held"))
def test_a_cache_that_user_code_holds_or_copies_is_plain(hold):
    caches, model = [], tiny("llama")
    library = type(model)

    class Own(library):
        def forward(self, *args, **kwargs):
            outputs = super().forward(*args, **kwargs)
            caches.append(hold(outputs.past_key_values))
            return outputs

    model.__class__ = Own
    with fresh_trust(accepted=True):  # the class is trusted immediately
        assert is_shared(run_both(lambda: model.generate(**padded(9, 5), **BEAMS)).report, PROMPT)
    assert len(caches) == 14
    stock, fast = caches[1:7], caches[8:]  # after the prompt, which fastgen computes once per input
    for caches_of_step in zip(stock, fast, strict=True):
        assert_equal_caches(*caches_of_step)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_keeps_the_cache_alive(name):
    output = unchanged(name).generate(**padded(9, 5), **BEAMS, return_dict_in_generate=True)
    cache = weakref.ref(output.past_key_values)
    del output
    gc.collect()
    assert cache() is None


@pytest.mark.parametrize("steps", ("eager", "captured", "too large to capture"))
@pytest.mark.parametrize("name", NAMES)
@BOTH
def test_a_cache_that_nobody_holds_is_not_copied_at_the_end(name, arguments, steps, monkeypatch):
    if steps == "too large to capture":
        monkeypatch.setitem(MOST_BYTES, "cpu", 0)
    cuda_graphs = "off" if steps == "eager" else "on"
    with capturing(cuda_graphs), watched("copy a layer") as copied, watched("copy a static layer") as static_copied:
        unchanged(name).generate(
            **padded(9, 5), **arguments | {"return_dict_in_generate": False, "output_scores": False}
        )
    assert (fastgen.explain().replays > 0) == (steps == "captured") and not copied + static_copied


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_that_a_hook_holds_has_the_last_order(name):
    caches = []
    for context in (fastgen.disabled(), nullcontext()):
        outputs = []
        hook = unchanged(name).register_forward_hook(lambda *args, outputs=outputs: outputs.append(args[-1]))
        with context:
            unchanged(name).generate(**padded(9, 5), num_beams=4, do_sample=False, max_new_tokens=6)
        hook.remove()
        caches.append(outputs[-1].past_key_values)
    assert_plain_and_equal(*caches)

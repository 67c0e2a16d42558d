"""Caches that come out of `generate` are the library's own, and caches that a caller puts in are left alone."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from contextlib import nullcontext

import pytest
import torch
from capturing import capturing
from parity import (
    BEAMS,
    CROSS,
    PREFILL,
    PROMPT,
    SAMPLES,
    assert_equal_caches,
    assert_equal_outputs,
    assert_same,
    compared,
    filled_cache,
    is_shared,
    left_alone_because,
    padded,
    run_both,
    tiny,
    token_ids,
)
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput

import fastgen
from fastgen.testing import as_tested, watched

NAMES = ("llama", "gpt2", "bart", "t5")
SEQ2SEQ = ("bart", "t5")


@pytest.fixture(scope="module")
def models():
    return {name: tiny(name, "seq2seq" if name in SEQ2SEQ else "causal") for name in NAMES}


pytestmark = pytest.mark.usefixtures("share_always")


def both_caches(model, arguments=BEAMS):
    """The sequences and caches of both sides after a generate that has shared."""
    both = compared(model, padded(9, 5), **arguments)
    assert is_shared(both.report, PROMPT)
    return both.stock, both.fast


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))
def test_returned_cache_has_plain_layers_of_equal_content(models, name, arguments):
    stock, fast = both_caches(models[name], arguments)
    assert_plain_and_equal(stock.past_key_values, fast.past_key_values)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))
def test_returned_cache_of_repeated_keys_is_plain_too(models, name, arguments, repeated):
    both = compared(models[name], padded(9, 5), **arguments)
    assert both.report.shared == [PREFILL]
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
@pytest.mark.parametrize("way", (copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))), ids=WAYS)
def test_returned_cache_can_be_copied_and_changed(models, name, change, way):
    stock, fast = both_caches(models[name])
    changed = [way(output.past_key_values) for output in (stock, fast)]
    for cache in changed:
        change(cache)
    assert_equal_caches(*changed)
    assert_equal_caches(stock.past_key_values, fast.past_key_values)


@pytest.mark.parametrize("name", ("llama", "gpt2"))
def test_returned_cache_takes_the_next_token(models, name):
    logits = []
    for output in both_caches(models[name]):
        cache, next_ids = output.past_key_values, output.sequences[:, -1:]
        with torch.no_grad():
            logits.append(models[name](next_ids, past_key_values=cache, use_cache=True).logits)
        assert cache.get_seq_length() == output.sequences.shape[1]
    assert_equal_outputs(*logits)


@pytest.mark.parametrize("name", ("llama", "gpt2"))
@pytest.mark.parametrize("arguments", ({}, {"do_sample": True}), ids=("greedy", "sample"))
def test_returned_cache_goes_into_another_generate(models, name, arguments):
    stock, fast = both_caches(models[name], SAMPLES)
    caches = iter((stock.past_key_values, fast.past_key_values))
    longer = torch.cat([fast.sequences, token_ids(fast.sequences.shape[0], 2, seed=6)], dim=1)
    both = run_both(
        lambda: models[name].generate(
            longer, past_key_values=next(caches), max_new_tokens=4, return_dict_in_generate=True, **arguments
        )
    )
    assert_equal_outputs(both.stock, both.fast)
    assert left_alone_because(both.report, "ONE_ROW_PER_INPUT")


@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))
@pytest.mark.parametrize("content", ("empty", "filled", "static"))
def test_cache_of_the_caller_is_left_alone(models, arguments, content):
    model, prompt = models["llama"], token_ids(2, 9)
    rows = prompt.repeat_interleave(3 if arguments is BEAMS else 4, dim=0)
    used = []

    def call():
        if content == "static":
            used.append(StaticCache(config=model.config, max_cache_len=32))
        else:
            used.append(DynamicCache() if content == "empty" else filled_cache(model, rows[:, :5]))
        return model.generate(prompt, past_key_values=used[-1], **arguments)

    both = run_both(call)
    assert torch.equal(both.stock, both.fast)
    assert left_alone_because(both.report, "USER_CACHE")
    assert_equal_caches(*used)


@pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="the older backends need other packages")
@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))
def test_quantized_cache_is_left_alone(models, arguments):
    quantized = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    assert left_alone_because(
        assert_same(models["llama"], padded(9, 5), **arguments, **quantized), "CACHE_TYPE", "QuantizedCache"
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))
def test_embeddings_in_the_place_of_tokens(models, name, arguments):
    inputs = padded(9, 5, side="right" if name in SEQ2SEQ else "left")
    embeddings = models[name].get_input_embeddings()(inputs["input_ids"]).detach()
    inputs = {"inputs_embeds": embeddings, "attention_mask": inputs["attention_mask"]}
    assert is_shared(assert_same(models[name], inputs, **arguments), PROMPT)


@pytest.mark.parametrize("name", SEQ2SEQ)
@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))
def test_encoder_outputs_of_the_caller(models, name, arguments):
    inputs = padded(9, 5, side="right")
    states = models[name].get_encoder()(**inputs).last_hidden_state.detach()

    def call():
        given = {"encoder_outputs": BaseModelOutput(states.clone()), "attention_mask": inputs["attention_mask"]}
        return models[name].generate(**given, **arguments, return_dict_in_generate=True, output_scores=True)

    both = run_both(call)
    assert_equal_outputs(both.stock, both.fast)
    assert is_shared(both.report, PROMPT, CROSS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))
def test_decoding_method_of_the_caller_sees_plain_layers_only(models, name, arguments):
    seen = []

    def two_steps(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        output = model._prefill(input_ids, generation_config, model_kwargs)
        cache = output.past_key_values
        seen.append({type(layer) for layer in self_attention(cache).layers})
        for layer in self_attention(cache).layers:
            layer.keys.view(-1)[::3] = 0.5
            layer.values = layer.values * 1.5
        return input_ids, output.logits[:, -1], copy.deepcopy(cache), cache

    inputs = padded(9, 5, side="right" if name in SEQ2SEQ else "left")
    both = run_both(lambda: models[name].generate(**inputs, **arguments, custom_generate=two_steps))
    assert seen == [{DynamicLayer}, {DynamicLayer}]
    assert is_shared(both.report) and "CUSTOM_GENERATE" in both.report.codes()
    assert_equal_outputs(both.stock, both.fast)


@pytest.fixture
def trusted():
    """Takes every model for one of the library's, which are not compared with the original before their first use."""
    with as_tested():
        yield


def give_own_forward(model, forward):
    """Makes the model one of a class of the program's own, whose forward is `forward(original, *args, **kwargs)`."""
    library = type(model)
    own = {"forward": lambda self, *args, **kwargs: forward(functools.partial(library.forward, self), *args, **kwargs)}
    model.__class__ = type("Own", (library,), own | {"__module__": __name__})


def test_cache_that_is_copied_between_steps_is_copied_as_the_library_would(trusted):
    copies = []
    model = tiny("llama")

    def copying(original, *args, **kwargs):
        outputs = original(*args, **kwargs)
        if kwargs["input_ids"].shape[1] == 1:
            copies.append(copy.deepcopy(outputs.past_key_values))
        return outputs

    give_own_forward(model, copying)
    assert is_shared(run_both(lambda: model.generate(**padded(9, 5), **BEAMS)).report, PROMPT)
    half = len(copies) // 2
    for stock, fast in zip(copies[:half], copies[half:], strict=True):
        assert_equal_caches(stock, fast)


def test_cache_that_a_program_has_kept_becomes_plain(trusted):
    kept = []
    model = tiny("llama")

    def keeping(original, *args, **kwargs):
        outputs = original(*args, **kwargs)
        kept.append(outputs.past_key_values)
        return outputs

    give_own_forward(model, keeping)
    both = run_both(lambda: model.generate(**padded(9, 5), **SAMPLES))
    assert is_shared(both.report, PROMPT)
    assert_equal_caches(kept[0], kept[-1])


@pytest.mark.parametrize("name", NAMES)
def test_nothing_keeps_the_cache_alive(models, name):
    caches = []
    generate = models[name].generate
    output = generate(**padded(9, 5), **BEAMS, return_dict_in_generate=True)
    caches.append(weakref.ref(output.past_key_values))
    del output
    gc.collect()
    assert caches[0]() is None


@pytest.mark.parametrize("cuda_graphs", ("off", "on"))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))
def test_a_cache_that_nobody_holds_is_not_copied_when_the_call_ends(models, name, arguments, cuda_graphs):
    with capturing(cuda_graphs), watched("copy a layer") as copied, watched("copy a static layer") as static_copied:
        models[name].generate(**padded(9, 5), **arguments | {"return_dict_in_generate": False, "output_scores": False})
    assert (fastgen.explain().replays > 0) == (cuda_graphs == "on") and not copied + static_copied


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_that_a_hook_keeps_from_beam_search_has_the_last_order_of_its_rows(models, name):
    found = []
    for context in (fastgen.disabled(), nullcontext()):
        kept = []
        hook = models[name].register_forward_hook(lambda module, args, output, kept=kept: kept.append(output))
        with context:
            models[name].generate(**padded(9, 5), num_beams=4, do_sample=False, max_new_tokens=6)
        hook.remove()
        found.append(kept[-1].past_key_values)
    assert_plain_and_equal(*found)

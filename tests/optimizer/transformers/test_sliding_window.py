"""Layers with a sliding window keep the prompt once per input, as long as a row sees some of it."""

import pytest
import torch
from hooks import watched
from parity import assert_equal_caches, assert_equal_outputs, assert_same, compared, run_both, same_tokens
from reports import PROMPT, capturing, is_shared, not_captured_because, replays
from tiny_models import BEAMS, BOTH, padded, tiny, token_ids
from torch import nn
from transformers import DynamicCache

from fastgen.optimizer.decoding.report import KV_CACHE

pytestmark = pytest.mark.usefixtures("share_always")

MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
MODELS = {"mistral": {}, "gemma2": MIXED, "gemma3_text": MIXED, "gpt_oss": MIXED}
LENGTH = 9
# Windows shorter than the prompt, as long, a key longer (as a layer keeps), longer; and one that leaves all of it.
WINDOWS = {"long prompt": 7, "as long": LENGTH, "kept": LENGTH + 1, "crossed": LENGTH + 3, "never": 99, "gone": 3}


def model_of(name: str, window: int) -> nn.Module:
    return tiny(name, **MODELS[name], sliding_window=window)


@BOTH
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("name", MODELS)
def test_windows_and_prompts_of_all_lengths_are_shared(name, window, arguments):
    both = compared(model_of(name, window), padded(LENGTH, 5), **arguments)
    assert is_shared(both.report, PROMPT)
    assert "once per input, 2 layers" in both.report.shared[1] and not both.report.codes(KV_CACHE)
    assert_equal_caches(both.stock.past_key_values, both.fast.past_key_values)


# Of 14 steps: never crossed, crossed by the call, left behind by the prompt, and as long as the call.
CAPTURED = {"never": (99, 14), "crossed": (LENGTH + 5, 13), "long prompt": (15, 14), "short": (16, 14)}


@BOTH
@pytest.mark.parametrize("window, steps", CAPTURED.values(), ids=CAPTURED)
@pytest.mark.parametrize("name", MODELS)
def test_steps_with_windows_are_captured(name, window, steps, arguments):
    model, tokens = model_of(name, window), padded(2 * LENGTH, 11)
    arguments = {**arguments, "max_new_tokens": steps, "eos_token_id": None}
    for again in (False, True):
        with capturing(smallest_capacity=64), watched("capture a step") as captured:
            both = compared(model, tokens, **arguments)
        assert replays(both.report) and bool(captured) != again
        assert_equal_outputs(both.stock.logits, both.fast.logits)
        assert_equal_caches(both.stock.past_key_values, both.fast.past_key_values)


@BOTH
@pytest.mark.parametrize("window", (7, LENGTH + 3))
def test_inputs_leave_captured_steps_with_windows(window, arguments):
    model, tokens = model_of("gemma3_text", window), padded(LENGTH, 5)
    arguments = {**arguments, "return_dict_in_generate": False, "max_new_tokens": window - 1}
    ends = same_tokens(model, tokens, **arguments, eos_token_id=None) and model.generate(**tokens, **arguments)
    with capturing():
        report = same_tokens(model, tokens, **arguments, eos_token_id=int(ends[0, LENGTH + 3]))
    assert replays(report)


def test_calls_longer_than_a_window_are_not_captured():
    model = model_of("mistral", 6)
    with capturing():
        report = same_tokens(model, padded(LENGTH, 5), num_beams=3, do_sample=False, max_new_tokens=8)
    assert not_captured_because(report, "SLIDING_WINDOW", "a sliding window of 6 for up to 8 more positions")


def test_windows_stored_for_each_row_are_not_captured():
    with capturing():
        report = same_tokens(model_of("mistral", 8), padded(LENGTH, 5), do_sample=False, max_new_tokens=6)
    assert not_captured_because(report, "SLIDING_WINDOW", "a window has dropped positions that are stored for each row")


@BOTH
@pytest.mark.parametrize("window", (7, LENGTH + 3))
def test_sliding_windows_are_shared_in_bfloat16(window, arguments):
    model = model_of("mistral", window).bfloat16()
    tokens = token_ids(1, 40, seed=3)[0].tolist()
    forced = {"prefix_allowed_tokens_fn": lambda batch, ids: [tokens[ids.shape[0]]]}
    assert is_shared(assert_same(model, padded(LENGTH, 5), 0.25, **arguments, **forced), PROMPT)


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_the_returned_cache_takes_the_next_token(window):
    model = model_of("mistral", window)
    both = compared(model, padded(LENGTH, 5), **BEAMS)
    logits = []
    for output in (both.stock, both.fast):
        cache = output.past_key_values
        with torch.no_grad():
            logits.append(model(output.sequences[:, -1:], past_key_values=cache, use_cache=True).logits)
    assert_equal_outputs(*logits)
    assert_equal_caches(both.stock.past_key_values, both.fast.past_key_values)


def test_assisted_decoding_with_windows_is_the_librarys():
    model, assistant = model_of("mistral", 7), model_of("mistral", 5)
    assert_same(
        model, {"input_ids": token_ids(1, LENGTH)}, assistant_model=assistant, max_new_tokens=7, do_sample=False
    )


@pytest.mark.parametrize("drafts", ("off", "auto"))
@pytest.mark.parametrize("name", MODELS)
def test_windows_hide_positions_of_plain_layers(name, drafts):
    """The masks have the window of the configuration, although these layers keep everything."""
    model, inputs = model_of(name, 14), {"input_ids": token_ids(1, LENGTH)}
    new = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "return_dict_in_generate": True}
    with capturing(drafts=drafts, smallest_capacity=64):
        both = run_both(lambda: model.generate(**inputs, **new, past_key_values=DynamicCache(), output_logits=True))
    assert replays(both.report)
    assert_equal_outputs(both.stock.logits, both.fast.logits)

"""Layers with a sliding window keep the prompt once per input, as long as a row sees some of it."""

import pytest
import torch
from parity import assert_equal_caches, assert_equal_outputs, assert_same, compared, same_tokens
from reports import PROMPT, capturing, is_shared, not_captured_because, replays
from tiny_models import BEAMS, BOTH, padded, tiny, token_ids
from torch import nn

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


@BOTH
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_captured_if_the_window_holds_everything(name, arguments):
    tokens = padded(LENGTH, 5)
    arguments = {**arguments, "return_dict_in_generate": False}
    for window, fits in ((LENGTH + 7, False), (99, True)):
        model = model_of(name, window)
        with capturing():
            report = same_tokens(model, tokens, **arguments)
        assert bool(replays(report)) == fits
        assert fits or not_captured_because(report, "SLIDING_WINDOW", f"a sliding window of {window} for up to ")


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

"""Model classes and versions of transformers that nobody has compared are compared before they are trusted."""

from __future__ import annotations

import pytest
import torch
from architectures import SPECIAL
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import fastgen
from fastgen.optimizer import PATCH_SET
from fastgen.optimizer.decoding import two_part_states
from fastgen.optimizer.transformers import verification

CONFIG = LlamaConfig(
    vocab_size=99,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    pad_token_id=SPECIAL["pad_token_id"],
)
INPUT_IDS = torch.randint(5, 99, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _share_small_prompts_and_forget_afterwards(monkeypatch, share_always):
    monkeypatch.setattr(verification, "_verified", set())
    monkeypatch.setattr(verification, "_refused", {})


@pytest.fixture
def newer_transformers(monkeypatch):
    monkeypatch.setattr(PATCH_SET, "newer_than_tested", lambda host: host == "transformers")
    failures = []
    monkeypatch.setattr(PATCH_SET, "fail", lambda group, reason: failures.append((group, reason)))
    return failures


@pytest.fixture
def wrong_attention(monkeypatch):
    attention = two_part_states.shared_attention
    monkeypatch.setattr(two_part_states, "shared_attention", lambda *args, **kwargs: attention(*args, **kwargs) * 1.5)


def make(model_class: type = LlamaForCausalLM) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return model_class(CONFIG).eval()


def count_forwards(model: LlamaForCausalLM) -> list[int]:
    """The rows of each forward of the model from here on."""
    rows, forward = [], model.forward

    def counting(*args, **kwargs):
        rows.append(len(kwargs["input_ids"]))
        return forward(*args, **kwargs)

    model.forward = counting
    return rows


def own_class() -> type:
    return type("OwnLlama", (LlamaForCausalLM,), {"__module__": "own_package"})


def test_tested_versions_and_classes_are_trusted_at_once():
    model = make()
    rows = count_forwards(model)
    model.generate(INPUT_IDS, num_beams=3, max_new_tokens=6)
    assert rows == [2, 6, 6, 6, 6, 6]


@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}])
def test_a_newer_version_is_compared_once_per_class_and_mode(mode, newer_transformers):
    model = make()
    with fastgen.disabled():
        torch.manual_seed(1)
        expected = model.generate(INPUT_IDS, **mode, max_new_tokens=6)
    rows = count_forwards(model)
    torch.manual_seed(1)
    first = model.generate(INPUT_IDS, **mode, max_new_tokens=6)
    steps = verification.STEPS
    assert rows == [6] * steps + [2] + [6] * (steps - 1) + [2, 6, 6, 6, 6, 6]
    assert "prefill: one row per input" in fastgen.explain().shared
    rows.clear()
    torch.manual_seed(1)
    second = model.generate(INPUT_IDS, **mode, max_new_tokens=6)
    assert rows == [2, 6, 6, 6, 6, 6]
    assert torch.equal(first, expected) and torch.equal(second, expected)
    assert not newer_transformers


def test_a_difference_on_a_newer_version_switches_the_patches_off_and_says_what_differed(
    newer_transformers, wrong_attention
):
    model = make()
    with fastgen.disabled():
        expected = model.generate(INPUT_IDS, num_beams=3, max_new_tokens=6)
    found = model.generate(INPUT_IDS, num_beams=3, max_new_tokens=6)
    assert torch.equal(found, expected)
    [(group, reason)] = newer_transformers
    assert group == "transformers.shared_caches" and "scores of step 1 differ by" in reason
    assert any("scores of step 1 differ by" in item for item in fastgen.explain().fallbacks)


def test_a_class_outside_transformers_that_differs_is_left_alone_and_others_are_not(wrong_attention):
    model = make(own_class())
    with fastgen.disabled():
        expected = model.generate(INPUT_IDS, num_beams=3, max_new_tokens=6)
    with pytest.warns(RuntimeWarning, match="own_package.OwnLlama"):
        assert torch.equal(model.generate(INPUT_IDS, num_beams=3, max_new_tokens=6), expected)
    rows = count_forwards(model)
    assert torch.equal(model.generate(INPUT_IDS, num_beams=3, max_new_tokens=6), expected)
    assert set(rows) == {6}  # without another comparison
    assert all(state.state == "applied" for state in fastgen.status())


def test_a_class_outside_transformers_is_shared_once_it_was_compared():
    model = make(own_class())
    model.generate(INPUT_IDS, num_beams=3, max_new_tokens=6)
    rows = count_forwards(model)
    model.generate(INPUT_IDS, num_beams=3, max_new_tokens=6)
    assert rows == [2, 6, 6, 6, 6, 6]


def test_a_call_that_cannot_be_repeated_is_left_to_the_original_until_another_was_compared():
    class Streamer(BaseStreamer):
        def put(self, value):
            pass

        def end(self):
            pass

    model = make(own_class())
    sampling = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 4}
    model.generate(INPUT_IDS, **sampling, streamer=Streamer())
    assert fastgen.explain().shared == []
    assert any("a call with streamer cannot be repeated" in item for item in fastgen.explain().fallbacks)
    model.generate(INPUT_IDS, **sampling)
    model.generate(INPUT_IDS, **sampling, streamer=Streamer())
    assert "prefill: one row per input" in fastgen.explain().shared


def test_greedy_decoding_of_one_row_per_input_needs_no_comparison(newer_transformers):
    model = make()
    rows = count_forwards(model)
    model.generate(INPUT_IDS, max_new_tokens=4)
    assert rows == [2, 2, 2, 2]


def test_the_random_state_is_that_of_the_original_after_a_comparison(newer_transformers):
    model = make()
    torch.manual_seed(3)
    with fastgen.disabled():
        model.generate(INPUT_IDS, do_sample=True, num_return_sequences=3, max_new_tokens=4)
    expected = torch.rand(4)
    torch.manual_seed(3)
    model.generate(INPUT_IDS, do_sample=True, num_return_sequences=3, max_new_tokens=4)
    assert torch.equal(torch.rand(4), expected)

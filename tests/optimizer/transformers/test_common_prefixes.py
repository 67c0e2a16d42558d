"""Prompts that begin alike: the prefix goes through the model once and is stored once, with the library's answers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from capturing import capturing
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import compared, padded, tiny, tiny_encoder, token_ids
from sharing import sharing

import fastgen
from fastgen.optimizer.decoding.report import PREFIX
from fastgen.optimizer.transformers import prefixes
from fastgen.testing import costs, replaced, watched

pytestmark = pytest.mark.usefixtures("share_always")

WAYS = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 3, "do_sample": False},
    "samples": {"num_return_sequences": 2, "do_sample": True},
}
TOKENS_ONLY = {"return_dict_in_generate": False, "output_scores": False, "output_logits": False}
NOT_USED = {  # architecture: why
    "mamba": "CACHE_LAYERS",
    "falcon_mamba": "CACHE_LAYERS",
    "jamba": "CACHE_LAYERS",
    "qwen3_next": "CACHE_LAYERS",
    "recurrent_gemma": "CACHE_LAYERS",
    "minimax": "CACHE_TYPE",
    "openai-gpt": "NO_CACHE",
    "unilm": "NOT_CAUSAL",
}
COLUMNS_COUNT = {"roformer", "trocr", "mpt", "gpt_neo"}  # under padding on the left


def prompts(*lengths: int, prefix: int = 7, side: str = "left") -> dict[str, torch.Tensor]:
    """Prompts of these lengths, that begin with `prefix` equal tokens."""
    inputs = padded(*lengths, side=side)
    common, longest = token_ids(1, prefix, seed=9)[0], max(lengths)
    for row, length in enumerate(lengths):
        start = longest - length if side == "left" else 0
        inputs["input_ids"][row, start : start + prefix] = common
        inputs["input_ids"][row, start + prefix] = 10 + row
    return inputs


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "architecture", [one for one in ARCHITECTURES if one.kind == "causal"], ids=lambda architecture: architecture.id
)
def test_every_architecture_gives_its_answers_or_says_why_not(architecture, way):
    model = architecture.model()
    for inputs in (prompts(12, 12, 12), prompts(12, 10, 9), prompts(12, 10, 9, side="right")):
        report = compared(model, inputs, max_new_tokens=6, **WAYS[way], **TOKENS_ONLY).report
        if why := NOT_USED.get(architecture.id):
            assert report.prefix_length == 0 and why in report.codes(PREFIX)
        elif architecture.id in COLUMNS_COUNT and inputs["attention_mask"][1, 0] == 0:
            assert report.prefix_length == 0 and "POSITIONS" in report.codes(PREFIX)
        else:
            assert report.prefix_length == 7 and report.prefix_tokens_saved == 14


@pytest.mark.parametrize("way", WAYS)
def test_scores_and_the_returned_cache_are_those_of_the_library(llama, way):
    report = compared(llama, prompts(12, 12, 12), max_new_tokens=6, **WAYS[way]).report
    assert report.prefix_length == 7


def test_padded_prompts_whose_cache_is_returned_are_left_alone(llama):
    report = compared(llama, prompts(12, 9), max_new_tokens=4, do_sample=False).report
    assert report.prefix_length == 0 and report.codes(PREFIX) == {"RETURN_DICT"}


def test_one_row_goes_through_the_model_for_the_prefix_and_all_rows_for_the_rest(llama):
    prefills = []

    def of_prefix(original: Callable, *args: Any) -> dict[str, Any]:
        prefills.append(original(*args))
        return dict(prefills[-1])

    with replaced("arguments of a prefix", of_prefix):
        report = compared(llama, prompts(12, 9, 11), max_new_tokens=3, do_sample=False, **TOKENS_ONLY).report
    assert prefills[-1]["input_ids"].shape == (1, 7) and prefills[-1]["attention_mask"].all()
    assert "common prefix: 7 tokens of all inputs, 14 not computed" in report.shared
    assert "a prefix of 7 tokens shared" in report.verdict
    assert report.as_dict()["prefix_length"] == 7 and report.as_dict()["prefix_tokens_saved"] == 14


@pytest.mark.parametrize(
    ("way", "copies"), (("greedy", [1, 3]), ("beams", [1, 3, 9]), ("samples", [1, 3, 6])), ids=("two", "three", "3")
)
def test_a_prefix_is_stored_once_a_rest_per_input_and_what_is_generated_per_row(llama, way, copies):
    with watched("read segments") as reads:
        compared(llama, prompts(12, 11, 12), max_new_tokens=4, **WAYS[way], **TOKENS_ONLY)
    assert [keys.shape[0] for keys, _ in reads[-1].result] == copies


@pytest.mark.parametrize("way", WAYS)
def test_embeddings_are_compared_as_tokens_are(llama, way):
    inputs = prompts(12, 10, 12)
    embeds = llama.get_input_embeddings()(inputs.pop("input_ids")).detach()
    inputs["inputs_embeds"] = embeds
    report = compared(llama, inputs, max_new_tokens=5, **WAYS[way], **TOKENS_ONLY).report
    assert report.prefix_length == 7


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lengths", ((12, 12, 12), (12, 9, 10)), ids=("equal lengths", "padded"))
def test_steps_behind_a_prefix_are_captured(llama, way, lengths):
    with capturing():
        for _ in range(2):
            report = compared(llama, prompts(*lengths), max_new_tokens=20, **WAYS[way], **TOKENS_ONLY).report
    assert report.prefix_length == 7
    assert report.replays > 0 or way == "samples"  # whose steps end with the call


@pytest.mark.parametrize("way", ("greedy", "beams"))
def test_finished_inputs_leave_behind_a_prefix(llama, way):
    options = {"eos_token_id": list(range(2, 60)), "max_new_tokens": 30, **WAYS[way], **TOKENS_ONLY}
    report = compared(llama, prompts(12, 10, 9, 12), **options).report
    assert report.prefix_length == 7 and "finished inputs: removed from the batch" in report.shared


def test_repeated_rows_share_a_prefix_with_the_others(llama):
    inputs = {name: value.repeat_interleave(2, dim=0) for name, value in prompts(12, 10).items()}
    report = compared(llama, inputs, max_new_tokens=5, do_sample=True, **TOKENS_ONLY).report
    assert report.prefix_length == 7 and report.inputs == 2 and report.rows == 4


def test_groups_of_equal_rows_of_any_sizes_share_a_prefix(llama):
    inputs = {name: value.repeat_interleave(torch.tensor([3, 1]), dim=0) for name, value in prompts(12, 10).items()}
    report = compared(llama, inputs, max_new_tokens=5, do_sample=True, **TOKENS_ONLY).report
    assert report.prefix_length == 7 and "GROUP_SIZES_DIFFER" in report.codes()


def test_an_encoder_that_decodes_sees_what_follows():
    model = tiny_encoder("bert")
    report = compared(model, prompts(12, 12), max_new_tokens=4, do_sample=False, **TOKENS_ONLY).report
    assert report.prefix_length == 0 and report.codes(PREFIX) == {"NOT_CAUSAL"}


def test_a_model_whose_products_scale_all_rows_alike_is_left_alone():
    model = torch.ao.quantization.quantize_dynamic(tiny("llama"), {torch.nn.Linear})
    report = compared(model, prompts(12, 10, 9), max_new_tokens=4, do_sample=False, **TOKENS_ONLY).report
    assert report.prefix_length == 0 and report.codes(PREFIX) == {"ROWS_COUPLED"}


def test_a_model_is_tried_again_after_its_configuration_has_changed():
    model = tiny_encoder("bert")
    for _ in range(2):
        compared(model, prompts(12, 12), max_new_tokens=4, do_sample=False, **TOKENS_ONLY)
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = True
        if hasattr(module, "is_decoder"):
            module.is_decoder = True
    model.config.is_decoder = True
    report = compared(model, prompts(12, 12), max_new_tokens=4, do_sample=False, **TOKENS_ONLY).report
    assert report.prefix_length == 7


def test_windows_that_a_prefix_leaves_are_the_librarys():
    inputs = prompts(20, 18, prefix=9)
    near, far = tiny("mistral", sliding_window=22), tiny("mistral", sliding_window=60)
    options = {"max_new_tokens": 6, "do_sample": False, **TOKENS_ONLY}
    assert compared(near, inputs, **options).report.codes(PREFIX) == {"SLIDING_WINDOW"}
    assert compared(far, inputs, **options).report.prefix_length == 9


@pytest.mark.parametrize("way", ("greedy", "beams"))
@pytest.mark.parametrize("name", ("q_proj", "k_proj"))
def test_nan_that_torch_hides_in_the_whole_prompt(name, way):
    model = tiny("llama")
    getattr(model.model.layers[0].self_attn, name).weight.data[3, 2] = torch.nan
    report = compared(model, prompts(9, 9, 9, prefix=5), max_new_tokens=4, **WAYS[way]).report
    assert report.prefix_length == 0 and "NAN" in report.codes()


def test_embeddings_count_as_columns_that_a_window_may_leave():
    model, inputs = tiny("mistral", sliding_window=14), prompts(12, 8, 10)
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    options = {"max_new_tokens": 8, "do_sample": False, **TOKENS_ONLY}
    assert compared(model, inputs, **options).report.codes(PREFIX) == {"SLIDING_WINDOW"}


@pytest.mark.parametrize("kind", ("dynamic", "longrope"))
def test_positions_that_depend_on_the_length_of_the_prompt_are_the_librarys(kind):
    parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8}
    if kind == "longrope":
        parameters |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    model = tiny("llama", rope_parameters=parameters, max_position_embeddings=8 if kind == "dynamic" else 32)
    unused = copy.deepcopy(model)  # it remembers the longest prompt
    with fastgen.disabled():
        expected = unused.generate(**prompts(12, 12), max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(**prompts(12, 12), max_new_tokens=6, do_sample=False), expected)
    assert fastgen.explain().prefix_length == 0 and fastgen.explain().codes(PREFIX) == {"POSITIONS"}


@pytest.mark.parametrize(
    ("options", "code"),
    (
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "OUTPUTS"),
        ({"prefill_chunk_size": 4}, "CHUNKED_PREFILL"),
        ({"use_cache": False}, "CACHE_TYPE"),
        ({"cache_implementation": "static", "disable_compile": True}, "CACHE_TYPE"),
    ),
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_calls_that_need_all_columns_are_left_alone(llama, options, code):
    options = {**TOKENS_ONLY, "max_new_tokens": 4, "do_sample": False, **options}
    report = compared(llama, prompts(12, 12), **options).report
    assert report.prefix_length == 0 and code in report.codes(PREFIX)


def test_a_hook_that_would_see_one_row_leaves_the_prefix_to_the_library():
    model, rows = tiny("llama"), []
    model.model.layers[0].register_forward_hook(lambda module, args, output: rows.append(len(args[0])))
    report = compared(model, prompts(12, 12), max_new_tokens=3, do_sample=False, **TOKENS_ONLY).report
    assert report.prefix_length == 0 and set(rows) == {2}


def test_a_short_prefix_of_a_small_model_is_not_worth_a_forward(llama):
    with sharing("auto"):
        report = compared(llama, prompts(12, 12), max_new_tokens=3, do_sample=False, **TOKENS_ONLY).report
        assert report.prefix_length == 0 and not report.codes(PREFIX)
        with costs(prefill_cost=0, prefill_cost_per_module=0, saved_per_module=0):
            short = compared(llama, prompts(40, 40, prefix=2), max_new_tokens=3, do_sample=False, **TOKENS_ONLY).report
            long = compared(llama, prompts(40, 40, prefix=30), max_new_tokens=3, do_sample=False, **TOKENS_ONLY).report
    assert short.codes(PREFIX) == {"PREFIX_SHORT"} and long.prefix_length == 30


def test_a_prefix_of_few_keys_is_stored_for_each_row(llama):
    free = {"prefill_cost": 0, "prefill_cost_per_module": 0, "saved_per_module": 0, "rows_of_one_read": 1}
    for way in WAYS.values():
        with sharing("auto"), costs(**free):
            report = compared(llama, prompts(12, 9, prefix=7), max_new_tokens=6, **way, **TOKENS_ONLY).report
        assert report.prefix_length == 7 and "FEW_KEYS" in report.codes()


def test_sharing_can_be_switched_off(llama):
    with sharing("never"):
        compared(llama, prompts(12, 12), max_new_tokens=3, do_sample=False, **TOKENS_ONLY)
    assert fastgen.explain().prefix_length == 0


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(1, 2), min_size=2, max_size=9), min_size=2, max_size=4),
    side=st.sampled_from(["left", "right"]),
)
def test_the_longest_common_prefix_leaves_a_token_of_each_row(rows, side):
    longest = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), longest).long(), torch.zeros(len(rows), longest).long()
    for row, tokens in enumerate(rows):
        place = slice(longest - len(tokens), None) if side == "left" else slice(len(tokens))
        ids[row, place], mask[row, place] = torch.tensor(tokens), 1
    inputs = {"input_ids": ids, "attention_mask": mask}
    found, padding = prefixes._longest_sync(inputs, None)
    most = min(map(len, rows)) - (side == "left" or min(map(len, rows)) == longest)
    common = next((n for n in range(most) if len({tokens[n] for tokens in rows}) > 1), most)
    assert found == common
    moved = prefixes.CommonPrefix.after(common, longest, padding).of_rests(inputs)
    for row, tokens in enumerate(rows):
        assert moved["input_ids"][row][moved["attention_mask"][row] == 1].tolist() == tokens
        assert moved["input_ids"][row, :common].tolist() == tokens[:common]
        assert moved["attention_mask"][row, :common].all()

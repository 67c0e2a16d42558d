"""Prompts that begin alike: their prefix is computed and stored once, with the outputs of the library."""

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, COLUMNS_COUNT, WITHOUT_PREFIX
from hooks import costs, replaced, watched
from parity import compared
from reports import FREE, LEFT, capturing
from tiny_models import GREEDY, TOKENS_ONLY, WAYS, lively, tiny, unchanged
from tiny_models import with_prefix as prompts
from transformers import CompileConfig

import fastgen
from fastgen.optimizer.decoding.cost_model import CPU
from fastgen.optimizer.decoding.report import PREFIX, Report
from fastgen.testing import configured

pytestmark = pytest.mark.usefixtures("share_always")


@pytest.fixture
def llama():
    return unchanged("llama")


CAUSAL = [each for each in ARCHITECTURES if each.kind == "causal"]


@pytest.mark.parametrize(  # test_auto_classes.py decodes all classes in each way
    ("architecture", "way"), [*zip(CAUSAL, itertools.cycle(WAYS))], ids=[architecture.id for architecture in CAUSAL]
)
def test_every_architecture_shares_prefixes_or_has_a_reason(architecture, way):
    model = lively(architecture.model())
    for inputs in (prompts(12, 12, 12), prompts(12, 10, 9), prompts(12, 10, 9, side="right")):
        report = compared(model, inputs, max_new_tokens=6, **WAYS[way], **TOKENS_ONLY).report
        if why := WITHOUT_PREFIX.get(architecture.id):
            assert report.prefix_length == 0 and why in report.codes(PREFIX)
        elif architecture.id in COLUMNS_COUNT and inputs["attention_mask"][1, 0] == 0:
            assert report.prefix_length == 0 and "POSITIONS" in report.codes(PREFIX)
        else:
            assert report.prefix_length == 7 and report.prefix_tokens_saved == 14


@pytest.mark.parametrize("way", WAYS)
def test_scores_and_the_returned_cache_are_those_of_the_library(llama, way):
    report = compared(llama, prompts(12, 12, 12), max_new_tokens=6, **WAYS[way]).report
    assert report.prefix_length == 7


def test_one_row_goes_through_the_model_for_the_prefix(llama):
    prefills = []

    def noting(original: Callable, *args: Any) -> dict[str, Any]:
        prefills.append(original(*args))
        return dict(prefills[-1])

    with replaced("arguments of a prefix", noting):
        report = reported(llama, prompts(12, 9, 11))
    assert prefills[-1]["input_ids"].shape == (1, 7) and prefills[-1]["attention_mask"].all()
    assert "common prefix: 7 tokens of all inputs, 14 not computed" in report.shared
    assert "a prefix of 7 tokens shared" in report.verdict
    assert report.as_dict()["prefix_length"] == 7 and report.as_dict()["prefix_tokens_saved"] == 14


@pytest.mark.parametrize(
    ("way", "copies"), (("greedy", [1, 3]), ("beams", [1, 3, 9]), ("samples", [1, 3, 6])), ids=("two", "three", "3")
)
def test_a_prefix_is_stored_once_and_the_rest_per_input(llama, way, copies):
    with watched("read segments") as reads:
        compared(llama, prompts(12, 11, 12), max_new_tokens=4, **WAYS[way], **TOKENS_ONLY)
    assert [keys.shape[0] for keys, _ in reads[-1].result] == copies


@pytest.mark.parametrize("way", WAYS)
def test_embeddings_are_compared_like_tokens(llama, way):
    assert reported(llama, as_embeddings(llama, prompts(12, 10, 12)), **WAYS[way]).prefix_length == 7


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lengths", ((12, 12, 12), (12, 9, 10)), ids=("equal lengths", "padded"))
def test_steps_after_a_prefix_are_captured(llama, way, lengths):
    with capturing():
        for _ in range(2):
            report = compared(llama, prompts(*lengths), max_new_tokens=20, **WAYS[way], **TOKENS_ONLY).report
    assert report.prefix_length == 7
    assert report.replays > 0 or way == "samples"  # their steps end with the call


@pytest.mark.parametrize("way", ("greedy", "beams"))
def test_finished_inputs_leave_if_a_prefix_is_shared(llama, way):
    options = {"eos_token_id": list(range(2, 60)), "max_new_tokens": 30, **WAYS[way], **TOKENS_ONLY}
    report = compared(llama, prompts(12, 10, 9, 12), **options).report
    assert report.prefix_length == 7 and LEFT in report.shared


def reported(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> Report:
    return compared(model, inputs, **TOKENS_ONLY | GREEDY | {"max_new_tokens": 4} | options).report


@pytest.mark.parametrize("sizes", ((2, 2), (3, 1)), ids=str)
def test_groups_of_equal_rows_share_a_prefix_with_the_others(llama, sizes):
    inputs = {name: value.repeat_interleave(torch.tensor(sizes), dim=0) for name, value in prompts(12, 10).items()}
    report = reported(llama, inputs, do_sample=True)
    assert report.prefix_length == 7 and report.rows == 4
    assert ("GROUP_SIZES_DIFFER" in report.codes()) == (sizes == (3, 1))


def as_embeddings(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()
    return {"inputs_embeds": embeddings, "attention_mask": inputs["attention_mask"]}


def windowed(window: int) -> Any:
    return tiny("mistral", sliding_window=window)


LLAMA, TWO = partial(unchanged, "llama"), prompts(12, 12)
QUANTIZED = partial(torch.ao.quantization.quantize_dynamic, tiny("llama"), {torch.nn.Linear})
BESIDE_ROWS = {"output_hidden_states": True, "return_dict_in_generate": True}
STATIC = {"cache_implementation": "static", "compile_config": CompileConfig(), "disable_compile": True}
FAR = prompts(20, 18, prefix=9)
LEFT_ALONE: dict[str, tuple[Callable[[], Any], dict[str, torch.Tensor], dict[str, Any], str]] = {
    "an encoder that decodes": (partial(tiny, "bert-encoder"), TWO, {}, "NOT_CAUSAL"),
    "products that scale all rows": (QUANTIZED, prompts(12, 10, 9), {}, "ROWS_COUPLED"),
    "a window that the prefix leaves": (partial(windowed, 22), FAR, {"max_new_tokens": 6}, "SLIDING_WINDOW"),
    "a padded cache that is returned": (LLAMA, prompts(12, 9), {"return_dict_in_generate": True}, "RETURN_DICT"),
    "states of all columns": (LLAMA, TWO, BESIDE_ROWS, "OUTPUTS"),
    "a prefill in chunks": (LLAMA, TWO, {"prefill_chunk_size": 4}, "CHUNKED_PREFILL"),
    "no cache": (LLAMA, TWO, {"use_cache": False}, "CACHE_TYPE"),
    "a static cache": (LLAMA, TWO, STATIC, "CACHE_TYPE"),
}


@pytest.mark.parametrize("why", LEFT_ALONE)
def test_calls_that_need_the_whole_prompt_are_left_alone(why):
    make, inputs, options, code = LEFT_ALONE[why]
    report = reported(make(), inputs, **options)
    assert report.prefix_length == 0 and code in report.codes(PREFIX)


def test_a_prefix_within_the_window_is_shared():
    assert reported(windowed(60), FAR, max_new_tokens=6).prefix_length == 9
    model = windowed(14)
    report = reported(model, as_embeddings(model, prompts(12, 8, 10)), max_new_tokens=8)
    assert report.codes(PREFIX) == {"SLIDING_WINDOW"}  # embeddings count as columns, too


@pytest.mark.parametrize("way", ("greedy", "beams"))
@pytest.mark.parametrize("name", ("q_proj", "k_proj"))
def test_nan_that_torch_hides_in_the_whole_prompt(name, way):
    model = tiny("llama")
    getattr(model.model.layers[0].self_attn, name).weight.data[3, 2] = torch.nan
    report = compared(model, prompts(9, 9, 9, prefix=5), max_new_tokens=4, **WAYS[way]).report
    assert report.prefix_length == 0 and "NAN" in report.codes()


@pytest.mark.parametrize("kind", ("dynamic", "longrope"))
def test_positions_that_depend_on_the_prompt_are_left_alone(kind):
    parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8}
    if kind == "longrope":
        parameters |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    model = tiny("llama", rope_parameters=parameters, max_position_embeddings=8 if kind == "dynamic" else 32)
    unused = copy.deepcopy(model)  # it remembers the longest prompt
    with fastgen.disabled():
        expected = unused.generate(**prompts(12, 12), max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(**prompts(12, 12), max_new_tokens=6, do_sample=False), expected)
    assert fastgen.explain().prefix_length == 0 and fastgen.explain().codes(PREFIX) == {"POSITIONS"}


def test_a_hook_leaves_the_prefix_to_the_library():
    model, rows = tiny("llama"), []
    model.model.layers[0].register_forward_hook(lambda module, args, output: rows.append(len(args[0])))
    report = reported(model, prompts(12, 12))
    assert report.prefix_length == 0 and set(rows) == {2}


def test_a_short_prefix_of_a_small_model_is_not_worth_a_forward(llama):
    with configured(share="auto"):
        report = reported(llama, prompts(12, 12))
        assert report.prefix_length == 0 and not report.codes(PREFIX)
        with costs(rates=replace(CPU, module=0.0)):
            short = reported(llama, prompts(40, 40, prefix=2))
            long = reported(llama, prompts(40, 40, prefix=30))
    assert short.codes(PREFIX) == {"PREFIX_SHORT"} and long.prefix_length == 30


def test_a_prefix_of_few_keys_is_stored_for_each_row(llama):
    for way in WAYS.values():
        with configured(share="auto"), costs(rates=FREE):
            report = compared(llama, prompts(12, 9, prefix=7), max_new_tokens=6, **way, **TOKENS_ONLY).report
        assert report.prefix_length == 7 and "FEW_KEYS" in report.codes()


def test_sharing_can_be_switched_off(llama):
    with configured(share="never"):
        reported(llama, prompts(12, 12))
    assert fastgen.explain().prefix_length == 0

"""`fastgen.reusing_prefix`: keys of the previous call are not computed again if the model is the same."""

import gc
import itertools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from random import Random
from typing import Any
from unittest import mock

import hooks
import pytest
import torch
from architectures import ARCHITECTURES, WITHOUT_PREFIX
from fuzz_changes import CHANGES, attention_scale, weight_in_place
from parity import compared
from peft import LoraConfig, get_peft_model
from reports import capturing
from tiny_models import TOKENS_ONLY, WAYS, tiny, token_ids, unchanged, with_prefix

import fastgen
from fastgen.optimizer.decoding import model_info
from fastgen.optimizer.decoding.report import KEPT, PREFIX, Reason
from fastgen.optimizer.transformers import checks, kept_prefix
from fastgen.testing import configured

pytestmark = pytest.mark.usefixtures("share_always")

SHORT = {"max_new_tokens": 4, "do_sample": False}


def prompts(*lengths: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns rows of so many tokens after the same 9 tokens in every call, padded on the left."""
    return with_prefix(*(9 + length for length in lengths), prefix=9, seed=seed)


def with_longer_prefix() -> dict[str, torch.Tensor]:
    """Returns two rows that begin with 14 equal tokens, of which 9 are those of all calls."""
    together = {name: torch.cat([value, value]) for name, value in prompts(6, seed=7).items()}
    together["input_ids"][1, -1] += 1
    return together


@pytest.fixture
def llama():
    return unchanged("llama")


@pytest.mark.parametrize(
    ("architecture", "way"),
    list(zip([each for each in ARCHITECTURES if each.kind == "causal"], itertools.cycle(WAYS))),
    ids=lambda value: getattr(value, "id", value),
)
def test_every_architecture_continues_from_the_last_call(architecture, way):
    model = architecture.model()
    with fastgen.reusing_prefix(model):
        for seed in range(3):
            report = compared(model, prompts(4, seed=seed), max_new_tokens=4, **WAYS[way]).report
            assert report.prefix_tokens_kept == (9 if seed and architecture.id not in WITHOUT_PREFIX else 0)
        for seed in range(3):
            report = compared(model, prompts(4, 4, seed=seed), max_new_tokens=4, **WAYS[way]).report
            assert report.prefix_tokens_kept == (9 if architecture.id not in WITHOUT_PREFIX else 0)
            assert WITHOUT_PREFIX.get(architecture.id) in {None, *report.codes(PREFIX)}
        report = compared(model, with_longer_prefix(), max_new_tokens=4, **WAYS[way]).report
        lengths = (0, 0) if architecture.id in WITHOUT_PREFIX else (14, 9)
        assert (report.prefix_length, report.prefix_tokens_kept) == lengths


def test_a_report_tells_what_is_kept_and_why_it_is_not_used(llama):
    short, other = Reason("PREFIX_SHORT", "too short to gain", "9 of 13 tokens were kept"), token_ids(1, 14, seed=8)
    with configured(share="auto"), fastgen.reusing_prefix(llama):
        first, second = (compared(llama, prompts(5, seed=seed), **SHORT).report for seed in range(2))
        third = compared(llama, {"input_ids": other, "attention_mask": torch.ones_like(other)}, **SHORT).report
    assert not first.codes(KEPT) and "prefix kept for later calls: 14 tokens" in first.shared
    assert [reason for part, reason in second.not_done if part == KEPT] == [short]
    assert [reason.detail for part, reason in third.not_done if part == KEPT] == ["0 of 13 tokens were kept"]


def test_a_conversation_continues_after_its_last_prompt(llama):
    said = prompts(3)["input_ids"]
    lengths = []
    with fastgen.reusing_prefix(llama):
        for seed in range(4):
            result = compared(llama, {"input_ids": said, "attention_mask": torch.ones_like(said)}, **SHORT)
            lengths.append(result.report.prefix_tokens_kept)
            said = torch.cat([result.fast.sequences, token_ids(1, 3, seed=seed)], dim=1)
    assert lengths == [0, 12, 19, 26]


@pytest.mark.parametrize("way", WAYS)
def test_batches_continue_after_their_common_prefix(llama, way):
    options = {**WAYS[way], **TOKENS_ONLY, "max_new_tokens": 5}
    with fastgen.reusing_prefix(llama):
        reports = [compared(llama, prompts(5, 3, 4, seed=seed), **options).report for seed in range(3)]
    assert [report.prefix_tokens_kept for report in reports] == [0, 9, 9]
    assert [report.prefix_tokens_saved for report in reports] == [18, 27, 27]
    assert "common prefix: 9 tokens of all inputs, 27 not computed, 9 kept from an earlier call" in reports[1].shared
    assert reports[1].as_dict()["prefix_tokens_kept"] == 9


def test_forwards_see_only_tokens_that_were_not_kept(llama):
    seen: list[int] = []
    real = type(llama.model).forward

    def forward(self: Any, input_ids: Any = None, **kwargs: Any) -> Any:
        seen.append(input_ids.shape[1])
        return real(self, input_ids, **kwargs)

    with fastgen.reusing_prefix(llama):
        llama.generate(**prompts(5), **SHORT)
        with (
            hooks.replaced("reasons of rows", lambda *args: []),
            mock.patch.object(type(llama.model), "forward", forward),
        ):
            for seed in (1, 2, 3):  # this forward makes the model another one, which is computed once more
                del seen[:]
                llama.generate(**prompts(5, seed=seed), **SHORT)
    assert seen == [5, 1, 1, 1]


@pytest.mark.parametrize("lengths", ((5,), (5, 5)), ids=("one row", "two rows"))
def test_steps_after_a_kept_prefix_are_captured(llama, lengths):
    with capturing(), fastgen.reusing_prefix(llama):
        for seed in range(3):
            report = compared(llama, prompts(*lengths, seed=seed), max_new_tokens=20, **TOKENS_ONLY).report
    assert report.prefix_tokens_kept == 9 and report.replays > 0


def test_embeddings_are_kept_like_tokens(llama):
    with fastgen.reusing_prefix(llama):
        for seed in range(2):
            inputs = prompts(4, seed=seed)
            inputs["inputs_embeds"] = llama.get_input_embeddings()(inputs.pop("input_ids")).detach()
            report = compared(llama, inputs, **SHORT).report
    assert report.prefix_tokens_kept == 9


# The model must be the same.


def buffer(random: Random, model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def attention(random: Random, model: Any) -> None:
    model.set_attn_implementation("eager")


@pytest.mark.parametrize("change", [*CHANGES, buffer, attention])
def test_a_model_that_has_changed_is_computed_anew(change):
    model = tiny("llama")
    with fastgen.reusing_prefix(model):
        compared(model, prompts(5), **SHORT)
        change(Random(1), model)
        report = compared(model, prompts(5, seed=1), **SHORT).report
        assert report.prefix_tokens_kept == 0 and "PREFIX_OUTDATED" in report.codes(KEPT)
        report = compared(model, prompts(5, seed=2), **SHORT).report
        assert report.prefix_tokens_kept in (0, 9)
        assert change not in (weight_in_place, attention_scale, buffer, attention) or report.prefix_tokens_kept


def test_adapters_that_are_switched_are_computed_anew():
    model = get_peft_model(tiny("llama"), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    with torch.no_grad(), fastgen.reusing_prefix(model):
        for expected in (0, 9):
            model.generate(**prompts(5, seed=expected), **SHORT)
            assert fastgen.explain().prefix_tokens_kept == expected
        for seed, context in ((2, model.disable_adapter()), (3, nullcontext())):
            with context:
                ours = model.generate(**prompts(5, seed=seed), **SHORT)
                assert fastgen.explain().prefix_tokens_kept == 0
                with fastgen.disabled():
                    assert torch.equal(ours, model.generate(**prompts(5, seed=seed), **SHORT))


def test_weights_are_not_read_if_the_caller_says_so():
    model = tiny("llama")
    with hooks.watched("read weights") as checksums, fastgen.reusing_prefix(model, check_weights=False):
        compared(model, prompts(5), **SHORT)
        report = compared(model, prompts(5, seed=1), **SHORT).report
    assert report.prefix_tokens_kept == 9 and not checksums


def test_models_with_unreadable_weights_keep_no_prefix(llama):
    model = tiny("llama")

    class Other(torch.nn.Parameter):
        pass

    model.model.norm.weight = Other(model.model.norm.weight.data)
    assert kept_prefix.weights_of(model_info.facts_of(model, checks.KNOWN)) is None
    with fastgen.reusing_prefix(model):
        for seed in range(2):
            report = compared(model, prompts(5, seed=seed), **SHORT).report
            assert report.prefix_tokens_kept == 0 and report.codes(KEPT) == {"WEIGHTS_UNREADABLE"}


# What else must be the same.


def test_settings_of_torch_are_part_of_the_state(llama):
    with fastgen.reusing_prefix(llama):
        compared(llama, prompts(5), **SHORT)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            llama.generate(**prompts(5, seed=1), **SHORT)
            assert fastgen.explain().prefix_tokens_kept == 0
        assert compared(llama, prompts(5, seed=2), **SHORT).report.prefix_tokens_kept == 0


def test_a_cache_of_the_callers_is_not_kept(llama):
    with fastgen.reusing_prefix(llama):
        first = llama.generate(**prompts(5), **SHORT, return_dict_in_generate=True)
        longer = torch.cat([first.sequences, token_ids(1, 3, seed=4)], dim=1)
        with hooks.watched("keep a prefix") as calls:
            llama.generate(input_ids=longer, past_key_values=first.past_key_values, **SHORT)
        assert all(call.args[1].host.user_cache for call in calls)
        assert compared(llama, prompts(5, seed=1), **SHORT).report.prefix_tokens_kept == 9


def test_returned_caches_may_be_written_into(llama):
    with fastgen.reusing_prefix(llama):
        first = llama.generate(**prompts(5), **(SHORT | {"max_new_tokens": 1}), return_dict_in_generate=True)
        for layer in first.past_key_values.layers:
            layer.keys.zero_()
        second = llama.generate(**prompts(5, seed=1), **SHORT, return_dict_in_generate=True)
        for layer in second.past_key_values.layers:
            layer.values.zero_()
        assert compared(llama, prompts(5, seed=2), **SHORT).report.prefix_tokens_kept == 9


def test_another_thread_may_keep_another_prefix_meanwhile(llama):
    """The context of a thread may be copied to others, as `asyncio.to_thread` does."""

    def find_then_drop(original: Callable, reuse: Any, *args: Any) -> Any:
        prefix = original(reuse, *args)
        reuse.stored = reuse._state = None
        return prefix

    with fastgen.reusing_prefix(llama):
        compared(llama, prompts(5), **SHORT)
        with hooks.replaced("find a prefix", find_then_drop):
            assert compared(llama, prompts(5, seed=1), **SHORT).report.prefix_tokens_kept == 9


def test_a_window_leaves_the_prefix_and_padding_is_not_kept(llama):
    padding = prompts(5)
    padding["attention_mask"][0, :2] = 0
    for model, inputs in ((tiny("mistral", sliding_window=8), prompts(4)), (llama, padding)):
        with fastgen.reusing_prefix(model):
            for _ in range(2):
                assert compared(model, inputs, **SHORT, **TOKENS_ONLY).report.prefix_tokens_kept == 0


def test_one_equal_token_is_no_prefix(llama):
    inputs = prompts(5)
    with fastgen.reusing_prefix(llama):
        compared(llama, inputs, **SHORT)
        inputs["input_ids"][:, 1] += 1
        assert compared(llama, inputs, **SHORT).report.prefix_length == 0


# The block.


def test_nothing_is_kept_outside_of_the_block(llama):
    uses = []

    def keep(original: Callable, reuse: Any, *args: Any) -> None:
        original(reuse, *args)
        uses.append(weakref.ref(reuse))

    with hooks.replaced("keep a prefix", keep), fastgen.reusing_prefix(llama):
        compared(llama, prompts(5), **SHORT)
    gc.collect()
    assert uses and all(reuse() is None for reuse in uses)
    assert compared(llama, prompts(5), **SHORT).report.prefix_tokens_kept == 0


def test_each_block_serves_one_model(llama):
    other = tiny("llama")
    with fastgen.reusing_prefix(llama):
        for seed in range(2):
            assert compared(other, prompts(5, seed=seed), **SHORT).report.prefix_tokens_kept == 0
        with fastgen.reusing_prefix(other):
            for seed in range(2):
                compared(llama, prompts(5, seed=seed), **SHORT)
                report = compared(other, prompts(5, seed=seed), **SHORT).report
    assert report.prefix_tokens_kept == 9


def test_encoder_decoders_and_tiny_models_keep_no_prefix(llama):
    bart = tiny("bart")
    inputs = {"input_ids": token_ids(2, 9), "attention_mask": torch.ones(2, 9).long()}
    with fastgen.reusing_prefix(bart):
        assert compared(bart, inputs, **SHORT).report.prefix_length == 0
    with configured(share="auto"), fastgen.reusing_prefix(llama):
        for seed in range(2):
            assert compared(llama, prompts(5, seed=seed), **SHORT).report.prefix_tokens_kept == 0

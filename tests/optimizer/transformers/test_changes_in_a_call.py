"""User code that runs in each step may change the model: the following steps are those of the library."""

import itertools
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from fuzz_changes import CHANGES, USER_CODE, adapter, forward_hook, weight_in_place
from parity import run_both
from reports import capturing, replays
from tiny_models import tiny, token_ids
from torch import nn
from transformers import LogitsProcessor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import fastgen

STEPS = 36
AT = 18  # steps after which the model is changed
ROTATION, rotation = "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb
LOOPS = {"greedy": {}, "beams": {"num_beams": 3}, "samples": {"do_sample": True, "num_return_sequences": 3}}


def hook_of_all_modules(random: Random, model: Any) -> None:
    def flip(module: nn.Module, args: Any, output: Any) -> Any:
        return output.flip(-1) if isinstance(module, nn.Linear) and module.out_features == 99 else output

    model.handle = nn.modules.module.register_module_forward_hook(flip)


def nothing(random: Random, model: Any) -> None:
    pass


def generate(model: Any, change: Any, kind: str = "processor", **arguments: Any) -> torch.Tensor:
    changing = USER_CODE[kind](lambda: change(Random(1), model), AT)
    length = {"max_new_tokens": STEPS, "min_new_tokens": STEPS}
    return model.generate(token_ids(2, 9), **changing, **length, **arguments)


def generated(change: Any, *kind: str, name: str = "llama", **arguments: Any) -> list[torch.Tensor]:
    """Returns the outputs of four calls on one model, which is changed within the third."""
    model = tiny(name, attention_dropout=0.3)
    if change is adapter:
        change(Random(1), model.eval())
        model.eval()
    try:
        outputs = [generate(model, each, *kind, **arguments) for each in (nothing, nothing, change)]
        model.eval()
        return [*outputs, generate(model, nothing, *kind, **arguments)]
    finally:
        if hasattr(model, "handle"):
            model.handle.remove()


KINDS = {name: ("processor", arguments) for name, arguments in LOOPS.items()}
KINDS |= {kind: (kind, {}) for kind in ("criterion", "streamer")} | {
    "prefix function": ("prefix function", {"num_beams": 2}),
    "ProphetNet": ("processor", {"name": "prophetnet"}),
}
# All changes by a processor of greedy decoding; in the others one that a step reads, and two that a step must call.
CASES = [(change, "greedy") for change in [*CHANGES, hook_of_all_modules]]
CASES += itertools.product((weight_in_place, forward_hook, hook_of_all_modules), [*KINDS][1:])


@pytest.mark.parametrize(("change", "kind"), CASES)
def test_a_change_by_user_code_within_a_call_counts(change, kind):
    kind, arguments = KINDS[kind]
    both = run_both(lambda: generated(change, kind, **arguments))
    for stock, fast in zip(both.stock, both.fast, strict=True):
        assert torch.equal(stock, fast)
    assert kind != "processor" or "name" in arguments or not torch.equal(both.stock[1], both.stock[2])


def test_steps_are_captured_until_user_code_changes_the_model():
    model = tiny("llama")
    for _ in range(2):
        generate(model, nothing)
    assert replays(fastgen.explain()) > STEPS - 10
    generate(model, forward_hook)
    report = fastgen.explain()
    assert "MODEL_CHANGED" in report.codes() and 0 < replays(report) < AT


def steered(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return sdpa_attention_forward(module, query * 0.3, *args, **kwargs)


def other_attention(random: Random, model: Any) -> None:
    ALL_ATTENTION_FUNCTIONS["sdpa"] = steered


def other_rotation(random: Random, model: Any) -> None:
    modeling_llama.apply_rotary_pos_emb = lambda query, key, *args, **kwargs: (query * 0.3, key)


def outputs_and_reasons(change: Any) -> tuple[list[torch.Tensor], str]:
    """Returns the outputs of calls without a change, with it, and after it, and what the second call reported."""
    model = tiny("llama")
    with mock.patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping), mock.patch.object(modeling_llama, ROTATION, rotation):
        outputs = [generate(model, nothing) for _ in range(2)] + [generate(model, change)]
        reasons = str(fastgen.explain())
        return [*outputs, generate(model, nothing)], reasons


def test_a_registered_function_replaced_in_a_call_counts():
    both = run_both(lambda: outputs_and_reasons(other_attention))
    assert all(map(torch.equal, both.stock[0], both.fast[0])) and not torch.equal(*both.stock[0][1:3])
    assert "AttentionInterface.sdpa was replaced" in both.fast[1]


def test_a_function_of_a_file_counts_from_the_next_call_on():
    both = run_both(lambda: outputs_and_reasons(other_rotation))
    equal = list(map(torch.equal, both.stock[0], both.fast[0]))
    assert equal == [True, True, False, True]


class ReplacesSilu(LogitsProcessor):
    """A processor that replaces a function of torch when rows have so many tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == self.length:
            silu = nn.functional.silu
            nn.functional.silu = lambda values, inplace=False: silu(values) * 0.7
        return scores


def test_a_function_replaced_before_a_proof_causes_no_warning(monkeypatch, recwarn):
    """Buffers that grow are captured and proven at two steps: the function is replaced between them."""
    monkeypatch.setattr(nn.functional, "silu", silu := nn.functional.silu)  # restores it
    replayed = []
    for length in (20, 21):
        with capturing("on"):
            processor = ReplacesSilu(length)
            tiny("llama").generate(token_ids(1, 9), logits_processor=[processor], max_new_tokens=40, eos_token_id=None)
        nn.functional.silu = silu
        replayed.append(replays(fastgen.explain()))
    assert 0 < replayed[1] < replayed[0]  # the replay that differed was the last
    assert [str(each.message) for each in recwarn if "fastgen" in str(each.message)] == []

"""The inputs of a forward with drafted tokens: those that the library would give these tokens one after the other."""

from types import MethodType
from typing import Any

import pytest
import torch
from architectures import SPECIAL
from copied_text import Forced
from drafted_calls import NEW, PROMPT, forced_call
from hooks import watched
from parity import run_both
from reports import capturing
from tiny_models import inputs_of, tiny, token_ids
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import GenerationMixin

import fastgen
from fastgen.optimizer.decoding.call import undo_of_tensors
from fastgen.optimizer.decoding.drafts import Drafts, Text
from fastgen.optimizer.decoding.report import DRAFTS, LeaveAlone
from fastgen.optimizer.transformers import drafts
from fastgen.optimizer.transformers.decode_step import TransformersDecodeStep
from fastgen.optimizer.transformers.drafts import inputs_ahead

GRAPHS = pytest.mark.parametrize("cuda_graphs", ("off", "on"))


@pytest.fixture(autouse=True)
def drafts_are_tried(monkeypatch):
    """Lets no test depend on what another has proven, nor on what a forward costs."""
    monkeypatch.setattr(drafts.DraftedSteps, "_cost", lambda self, rows, size: 1.0)


def prepared(model: Any, tokens: Tensor, arguments: dict[str, Any], count: int) -> dict[str, Any]:
    """Returns the inputs that GenerationMixin prepares for the last `count` tokens."""
    return GenerationMixin.prepare_inputs_for_generation(
        model, tokens, next_sequence_length=count, use_cache=True, **arguments
    )


@pytest.mark.parametrize("name", ("llama", "gpt2", "bart"))
def test_inputs_are_those_of_the_library(name):
    model, tokens = tiny(name), token_ids(2, 14)
    is_cross = model.config.is_encoder_decoder
    positions, mask = torch.arange(11).repeat(2, 1), torch.ones(2, 11, dtype=torch.long)
    names = ("decoder_position_ids", "decoder_attention_mask") if is_cross else ("position_ids", "attention_mask")
    arguments: dict[str, Any] = dict(zip(names, (positions, mask)))
    if is_cross:
        arguments |= {"encoder_outputs": (torch.randn(2, 5, 32),), "attention_mask": torch.ones(2, 5)}
    longer = GenerationMixin._update_model_kwargs_for_generation(model, {}, dict(arguments), is_cross, 3)
    expected = prepared(model, tokens, longer, 4)
    ahead = inputs_ahead(prepared(model, tokens[:, :-3], arguments, 1), tokens[:, -3:], 0)
    assert ahead.keys() == expected.keys() and {"input_ids", "decoder_input_ids"} & ahead.keys()
    for key, value in expected.items():
        assert torch.equal(ahead[key], value) if isinstance(value, Tensor) else ahead[key] is value


@pytest.mark.parametrize("hidden", (False, torch.finfo(torch.float32).min), ids=("bool", "added"))
def test_a_token_sees_the_drafted_ones_before_it(hidden):
    visible = True if hidden is False else 0.0
    mask = torch.tensor([[hidden, visible, visible, hidden, hidden, hidden]])[:, None, None]
    inputs = {"input_ids": token_ids(1, 1), "attention_mask": {"full_attention": mask}}
    ahead = inputs_ahead(inputs, token_ids(1, 2), 3)["attention_mask"]["full_attention"]
    seen = (ahead == visible)[0, 0].int().tolist()
    assert seen == [[0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0]]


def test_an_argument_with_unknown_columns_is_named():
    inputs = {"input_ids": token_ids(1, 1), "use_cache": True, "speaker_states": torch.zeros(1, 1, 8)}
    with pytest.raises(LeaveAlone) as error:
        inputs_ahead(inputs, token_ids(1, 2), 0)
    (reason,) = error.value.reasons
    assert reason.code == "ARGUMENT_COLUMNS" and "speaker_states" in reason.text


def test_all_tokens_at_once_are_no_step_of_one():
    with pytest.raises(LeaveAlone, match="input_ids"):
        inputs_ahead({"input_ids": token_ids(1, 9)}, token_ids(1, 2), 0)


@GRAPHS
def test_drafted_tokens_have_the_type_of_the_newest(cuda_graphs):
    model, inputs = tiny("gpt2", tie_word_embeddings=False), inputs_of("gpt2", PROMPT)
    types = torch.full((1, PROMPT), 6)
    with capturing(cuda_graphs, drafts="auto"):
        for last in (6, 7, 7):  # one speaker; then another one answers
            types[0, -1] = last
            report, difference = forced_call(model, inputs, token_type_ids=types)
            assert difference < 1e-4
    assert report.accepted


class Fields(LogitsProcessor):
    """Repeats a text of seven tokens, one of which is a separator, and leaves the last one to the model."""

    def __init__(self, separator: int) -> None:
        self.separator, self.seen = separator, []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(scores.clone())
        if (position := (input_ids.shape[1] - 1) % 7) != 6:
            scores[:, self.separator if position == 3 else 20 + position] = 1e4
        return scores


@GRAPHS
@pytest.mark.parametrize("separator", (4, SPECIAL["pad_token_id"]), ids=("text", "padding"))
def test_no_forward_of_several_tokens_has_padding(separator, cuda_graphs, monkeypatch):
    model, inputs, several = tiny("m2m_100"), inputs_of("m2m_100", PROMPT), []
    processors: list[Fields] = []

    def noting(model: Any, inputs: dict[str, Any], view: Any) -> Any:
        if (tokens := inputs["decoder_input_ids"]).shape[1] > 1:
            several.extend(tokens.flatten().tolist())
        return forward(model, inputs, view)

    def call() -> Tensor:
        processors.append(Fields(separator))
        return model.generate(
            **inputs, max_new_tokens=56, do_sample=False, num_beams=1, eos_token_id=None,
            logits_processor=[processors[-1]],
        )  # fmt: skip

    forward = TransformersDecodeStep.forward
    monkeypatch.setattr(TransformersDecodeStep, "forward", staticmethod(noting))
    with capturing(cuda_graphs, drafts="auto"):
        both = run_both(call)
    assert torch.equal(both.stock, both.fast) and both.report.accepted and several
    assert (separator in several) == (separator == 4)
    for stock, fast in zip(*(processor.seen for processor in processors)):
        torch.testing.assert_close(fast, stock, atol=1e-4, rtol=1e-4)


def test_drafts_end_before_padding():
    text = Text([5, 6, 7, 1, 8, 9, 5])
    lengths = {}
    for padding in ((), (1,), (7,), (5,)):
        guesses = Drafts([text], lambda rows, size: 1.0, frozenset(padding))
        guesses._right, guesses._seen = [9] * len(guesses._right), [9] * len(guesses._seen)
        tokens = guesses.propose(12)
        lengths[padding] = len(tokens[0]) if tokens else 0
    assert lengths == {(): 11, (1,): 1, (7,): 1, (5,): 0}


@GRAPHS
def test_a_preparation_of_the_programs_gets_no_drafts(cuda_graphs):
    model, inputs, asked = tiny("llama"), inputs_of("llama", PROMPT), []

    def prepare(self: Any, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        asked.append(kwargs["next_sequence_length"])
        return type(self).prepare_inputs_for_generation(self, input_ids, **kwargs)

    model.prepare_inputs_for_generation = MethodType(prepare, model)
    with capturing(cuda_graphs, drafts="auto"):
        report, _ = forced_call(model, inputs)
    assert "PREPARES_INPUTS" in report.codes(DRAFTS) and not report.drafted
    assert set(asked) == {1, PROMPT}


@GRAPHS
def test_phi3_drafts_across_its_original_length(cuda_graphs):
    model = tiny("phi3", original_max_position_embeddings=PROMPT + 12)
    with capturing(cuda_graphs, drafts="auto"):
        for _ in range(2):
            report, difference = forced_call(model, inputs_of("phi3", PROMPT))
    assert difference < 1e-4 and report.accepted


def test_prefix_tuning_is_left_alone():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny("llama"), peft.PrefixTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM")
    ).eval()
    prompt = token_ids(1, PROMPT)
    processor = Forced([prompt[0].tolist() * 2], PROMPT)
    with capturing("off", drafts="auto"):
        both = run_both(
            lambda: model.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False,
                eos_token_id=None, logits_processor=[processor],
            )
        )  # fmt: skip
    assert torch.equal(both.stock, both.fast) and both.report.codes(DRAFTS) == {"PREPARES_INPUTS"}


def test_drafts_are_proven_again_for_other_arguments():
    model, inputs, trials = tiny("gpt2"), inputs_of("gpt2", PROMPT), []
    with capturing("off", drafts="auto"):
        for arguments in ({}, {}, {"token_type_ids": torch.full((1, PROMPT), 6)}):
            with watched("forward of a draft") as forwards:
                forced_call(model, inputs, **arguments)
            trials.append(any(call.kwargs.get("is_trial") for call in forwards))
    assert trials == [True, False, True]


@GRAPHS
@pytest.mark.parametrize("kind", ("buffer", "attribute"))
def test_tensors_written_in_place_count_at_once(kind, cuda_graphs):
    model, inputs = tiny("bart"), inputs_of("bart", PROMPT)
    bias = model.final_logits_bias
    if kind == "attribute":
        del model.final_logits_bias
        model.final_logits_bias = bias

    class Topic(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if input_ids.shape[1] in (20, 31, 42):
                bias[0, 10 * input_ids.shape[1] % 97 :] += 8.0
            return scores

    def call() -> Tensor:
        bias.zero_()
        return model.generate(
            **inputs, max_new_tokens=50, do_sample=False, num_beams=1, eos_token_id=None, logits_processor=[Topic()]
        )

    with capturing(cuda_graphs, drafts="auto"):
        for _ in range(2):
            both = run_both(call)
            assert torch.equal(both.stock, both.fast)
    assert both.report.drafted


def test_windows_count_embedded_prompts():
    model = tiny("mistral", sliding_window=50)
    prompt = token_ids(1, 30)
    embeds = model.get_input_embeddings()(prompt).detach()
    processor = Forced([prompt[0].tolist() * 2], 0)
    with capturing("off", drafts="auto"):
        both = run_both(
            lambda: model.generate(
                inputs_embeds=embeds, max_new_tokens=NEW, do_sample=False, eos_token_id=None,
                logits_processor=[processor],
            )
        )  # fmt: skip
    assert torch.equal(both.stock, both.fast) and both.report.codes(DRAFTS) == {"SLIDING_WINDOW"}


def test_padding_is_what_the_modules_were_made_with():
    model = tiny("m2m_100")
    made_with = model.config.pad_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = SPECIAL["eos_token_id"]
    text = [5, 6, 7, made_with, 8, 9, 10, 11] * 6
    inputs = {"input_ids": torch.tensor([text[:PROMPT]])}
    with capturing("off", drafts="auto"):
        for _ in range(2):
            report, difference = forced_call(model, inputs)
    assert difference < 1e-4 and report.accepted


@pytest.mark.parametrize(
    ("name", "overrides", "code"),
    [
        ("switch_transformers", {"expert_capacity": 4, "num_sparse_decoder_layers": 2}, "TOKENS_COUPLED"),
        ("switch_transformers", {"expert_capacity": 64, "num_sparse_decoder_layers": 2}, None),
    ],
    ids=("small experts", "large experts"),
)
def test_forwards_of_several_that_are_not_several_of_one(name, overrides, code):
    with capturing("off", drafts="auto"):
        for _ in range(2):
            report, difference = forced_call(tiny(name, **overrides), inputs_of(name, PROMPT))
    assert difference < 1e-4 and report.codes(DRAFTS) == ({code} if code else set())


@pytest.mark.parametrize(("name", "positions"), [("m2m_100", 31), ("xglm", 54)])
def test_a_table_of_positions_does_not_grow_for_drafts(name, positions):
    lengths, inputs = [], inputs_of(name, PROMPT)
    start = 1 if name == "m2m_100" else PROMPT
    processor = Forced([[*(inputs["input_ids"][0].tolist() * 2)[:27], *[2] * 60]], start)
    for context in (fastgen.disabled(), capturing("off", drafts="auto")):
        model = tiny(name, max_position_embeddings=positions)
        with context:
            model.generate(**inputs, max_new_tokens=60, num_beams=1, eos_token_id=2, logits_processor=[processor])
        lengths.append(len(model.get_decoder().embed_positions.weights))
    assert lengths[0] == lengths[1] and fastgen.explain().codes(DRAFTS) == {"POSITIONS"}


def test_a_trial_restores_the_buffers_of_modules():
    module = torch.nn.Module()
    table, other = torch.zeros(2), torch.ones(2)
    module.register_buffer("table", table)
    restore = undo_of_tensors([module])
    module.register_buffer("table", torch.zeros(4))
    module.register_buffer("further", other)
    restore()
    assert module.table is table and dict(module.named_buffers()).keys() == {"table"}

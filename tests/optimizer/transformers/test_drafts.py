"""Steps that check several tokens: the answer, the random numbers and what user code sees stay those of the library."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from architectures import DROP, architecture_of
from copied_text import Forced, Noting, copying
from hooks import broken, costs, fresh_trust, replaced, watched
from parity import outcome, run_both
from reports import capturing
from tiny_models import inputs_of, tiny, token_ids
from transformers import LogitsProcessor

import fastgen
from fastgen.models.cache_names import CACHE
from fastgen.optimizer.decoding.cost_model import CPU_CAPTURES, ForwardTimes
from fastgen.optimizer.decoding.model_info import last_facts_of
from fastgen.optimizer.decoding.report import DRAFTS, Report
from fastgen.optimizer.decoding.static_kv_cache import MOST_TOKENS, KVContent, StaticKVCache
from fastgen.optimizer.transformers import drafts
from fastgen.optimizer.transformers.decode_step import TransformersDecodeStep
from fastgen.testing import configured

NAMES = ("gpt2", "llama", "bart", "t5")  # test_auto_classes.py has drafts of all classes
NEW = 40
COST = drafts.DraftedSteps._cost
GRAPHS = pytest.mark.parametrize("cuda_graphs", ("off", "on"))


@pytest.fixture(autouse=True)
def forgets_models(monkeypatch):
    """Lets no test depend on what another has proven, on times, or on the size of a model."""
    drafts._times.clear()
    monkeypatch.setattr(drafts.DraftedSteps, "_cost", lambda self, rows, size: 1.0)
    with costs(min_computed=0.0):
        yield


def forced(model: Any, inputs: dict[str, torch.Tensor], **arguments: Any) -> Report:
    """Generates texts that copy their inputs, with and without fastgen, and compares tokens; returns the report."""
    source = inputs["input_ids"]
    start = 1 if model.config.is_encoder_decoder else source.shape[1]
    rows = arguments.get("num_return_sequences", 1)
    processor = Forced(copying(source.repeat_interleave(rows, dim=0), NEW), start)
    arguments = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, **arguments}
    both = run_both(lambda: model.generate(**inputs, logits_processor=[processor], **arguments))
    assert torch.equal(both.stock, both.fast)
    return both.report


def greedy(model: Any, inputs: dict[str, torch.Tensor], **arguments: Any) -> Report:
    arguments = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, **arguments}
    both = run_both(lambda: model.generate(**inputs, **arguments))
    assert torch.equal(both.stock, both.fast)
    return both.report


@GRAPHS
@pytest.mark.parametrize("lengths", [(30,), (30, 21)], ids=("one row", "two rows"))
@pytest.mark.parametrize("name", NAMES)
def test_texts_that_copy_their_input_need_fewer_steps(name, lengths, cuda_graphs):
    with capturing(cuda_graphs, drafts="auto"):
        forced(tiny(name), inputs_of(name, *lengths))  # proves drafts: then captures begin at one
        report = forced(tiny(name), inputs_of(name, *lengths))
    assert report.accepted > 0 and report.steps_saved > 0, report
    assert f"{report.steps_saved} steps saved" in str(report) and report.as_dict()["drafted"] == report.drafted
    assert report.verdict.startswith(f"drafts saved {report.steps_saved} steps; decode steps ")


def test_a_configuration_may_have_no_padding_token():
    model = tiny("codegen")
    del model.config.pad_token_id
    assert not hasattr(model.config, "pad_token_id")
    assert forced(model, inputs_of("codegen", 30)).accepted > 0


def test_a_cache_without_layers_gets_no_drafts():
    with fresh_trust(accepted=True):
        report = forced(tiny("xlnet", max_position_embeddings=DROP), inputs_of("xlnet", 30))
    assert "CACHE_TYPE" in report.codes(DRAFTS) and not report.drafted


@GRAPHS
@pytest.mark.parametrize("way", [{}, {"do_sample": True, "top_k": 2, "temperature": 0.3}], ids=("greedy", "sampled"))
@pytest.mark.parametrize("name", ("llama", "t5"))
def test_texts_of_the_model_itself_stay_the_same(name, way, cuda_graphs):
    model = architecture_of(name).model()  # with weights as usual, it repeats itself
    with capturing(cuda_graphs, drafts="auto"):
        reports = [
            greedy(model, {"input_ids": token_ids(1, 9, seed=seed)}, max_new_tokens=60, **way) for seed in range(6)
        ]
    assert sum(report.accepted for report in reports) > 0


def test_samples_draw_the_numbers_of_the_library():
    report = forced(tiny("llama"), inputs_of("llama", 30, 21), do_sample=True, num_return_sequences=2)
    assert report.accepted > 0


@GRAPHS
def test_finished_rows_leave_between_drafts(cuda_graphs):
    model, inputs = tiny("llama"), inputs_of("llama", 30, 21, 25)
    texts = copying(inputs["input_ids"], NEW)
    texts[1][12:] = [2] * (NEW - 12)
    processor = Forced(texts, inputs["input_ids"].shape[1])
    with capturing(cuda_graphs, drafts="auto"), configured(share="always"):
        both = run_both(
            lambda: model.generate(
                **inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=2, logits_processor=[processor]
            )
        )
    assert torch.equal(both.stock, both.fast) and both.report.accepted > 0


@GRAPHS
@pytest.mark.parametrize("rows", (1, 3))
def test_user_code_of_a_drafted_call_is_called_as_usual(rows, cuda_graphs):
    model, input_ids = tiny("llama"), token_ids(rows, 20)
    notes = []

    def call() -> torch.Tensor:
        noting = Noting(stops_at=50)
        notes.append(noting.calls)
        processors = [Forced(copying(input_ids, NEW), 20), noting]
        streams = {"streamer": noting} if rows == 1 else {}
        return model.generate(
            input_ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None,
            logits_processor=processors, stopping_criteria=[noting], **streams,
        )  # fmt: skip

    with capturing(cuda_graphs, drafts="auto"):
        both = run_both(call)
    assert torch.equal(both.stock, both.fast) and both.report.accepted > 0
    stock, fast = notes
    assert len(stock) == len(fast)
    for expected, got in zip(stock, fast):
        assert torch.equal(expected[0], got[0]) and (expected[1] is None) == (got[1] is None)
        if expected[1] is not None:
            torch.testing.assert_close(got[1], expected[1], atol=1e-4, rtol=1e-4)


def test_stop_strings_end_a_row():
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    from fastgen.models.demo import demo_path, sample_path

    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(demo_path()), AutoTokenizer.from_pretrained(demo_path())
    drafted = 0
    for line in sample_path().read_text(encoding="utf-8").splitlines()[:12]:
        inputs = tokenizer(line, return_tensors="pt")
        arguments = {"stop_strings": ["and", " to "], "tokenizer": tokenizer, "num_beams": 1}
        both = run_both(partial(model.generate, **inputs, **arguments))
        assert torch.equal(both.stock, both.fast)
        drafted += both.report.drafted
    assert drafted


def wrong(original: Callable, *args: Any) -> Any:
    checked = original(*args)
    checked.logits = checked.logits + torch.linspace(0, 9, checked.logits.shape[-1])
    return checked


def test_a_first_forward_with_other_logits_ends_drafts():
    model, inputs = tiny("llama"), inputs_of("llama", 30)
    with replaced("forward of a draft", wrong), watched("check a draft") as checked:
        report = forced(model, inputs)
        assert report.codes(DRAFTS) == {"DRAFTS_REFUSED"} and not report.drafted
        model.gradient_checkpointing_enable()  # a refusal outlives a change
        model.gradient_checkpointing_disable()
        report = forced(model, inputs)
    assert report.codes(DRAFTS) == {"DRAFTS_REFUSED"} and not checked


def test_a_first_forward_that_fails_ends_drafts():
    with broken("forward of a draft", RuntimeError("no")):
        report = forced(tiny("llama"), inputs_of("llama", 30))
    assert report.codes(DRAFTS) == {"DRAFTS_REFUSED"}


@GRAPHS
@pytest.mark.parametrize("after", (0, 2), ids=("the first draft", "a later draft"))
@pytest.mark.parametrize("share", ("never", "always"))
def test_single_steps_follow_a_draft_that_fails(after, share, cuda_graphs, monkeypatch):
    (model, source, processor), sizes = repeating(), []

    def failing(model: Any, inputs: dict[str, Any], view: Any) -> Any:
        if (size := inputs["input_ids"].shape[1]) > 1:
            sizes.append(size)
            if len(sizes) > after:  # in the first layer, as with keys and values of other lengths
                cache = view if view is not None else inputs[CACHE]
                cache.layers[0].update(*torch.full((2, 1, 2, size, 8), 9.0))
                raise IndexError("in the second layer")
        return forward(model, inputs, view)

    forward = TransformersDecodeStep.forward
    monkeypatch.setattr(TransformersDecodeStep, "forward", staticmethod(failing))
    with capturing(cuda_graphs, drafts="auto"), configured(share=share), costs(min_computed=0.0):
        report = greedy(model, {"input_ids": source}, logits_processor=[processor])
    assert len(sizes) > after and report.codes(DRAFTS) == {"DRAFTS_REFUSED"} and fastgen.enabled()


def test_one_token_is_never_verified_twice():
    model, inputs = tiny("llama"), inputs_of("llama", 30)
    forced(model, inputs)
    with watched("forward of a draft") as forwards, watched("check a draft") as checked:
        forced(model, inputs)
    assert len(forwards) == len(checked) > 0


def test_repeatable_calls_prove_their_drafts_themselves():
    model, inputs = tiny("llama"), inputs_of("llama", 30)
    with configured(repeatable=True):
        first, second = forced(model, inputs), forced(model, inputs)
    assert (first.drafted, first.accepted) == (second.drafted, second.accepted) and first.drafted


@pytest.mark.parametrize(
    ("name", "overrides", "arguments", "code"),
    [
        ("mistral", {"sliding_window": 8}, {}, "SLIDING_WINDOW"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, {}, "POSITIONS"),
        ("llama", {}, {"use_cache": False}, None),
        ("llama", {}, {"num_beams": 2}, None),
        ("mamba", {}, {}, None),
    ],
    ids=("window", "rope", "no cache", "beams", "states"),
)
def test_left_alone(name, overrides, arguments, code):
    model = tiny(name, **overrides)
    inputs, start = inputs_of(name, 30), 30
    processor = Forced(copying(inputs["input_ids"], NEW), start)
    both = run_both(
        lambda: model.generate(
            **inputs, logits_processor=[processor],
            **{"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, **arguments},
        )
    )  # fmt: skip
    assert not both.report.drafted and (code is None or code in both.report.codes(DRAFTS))


@GRAPHS
def test_forwards_far_slower_than_estimated_are_measured(cuda_graphs, monkeypatch):
    model, inputs = tiny("llama"), inputs_of("llama", 30)
    monkeypatch.setattr(drafts.DraftedSteps, "_cost", COST)
    with capturing(cuda_graphs, drafts="auto"):
        assert forced(model, inputs).drafted
        (proven,) = [kind for kind, reasons in last_facts_of(model).proofs.items() if kind[0] == DRAFTS and not reasons]
        of_kind = drafts._times[model][proven]
        monkeypatch.setattr(drafts.DraftedSteps, "_timed", lambda self, size, run, *arguments: run(*arguments))
        of_kind.seconds = times(eager=20.0, replayed=20.0)
        assert not forced(model, inputs).drafted
        of_kind.seconds = times(eager=1.0 if cuda_graphs == "off" else 20.0, replayed=1.0)
        assert forced(model, inputs).drafted, "slow forwards without a replay say nothing of replays"


def test_after_a_change_of_the_model_drafts_are_proven_again():
    model, inputs = tiny("llama"), inputs_of("llama", 30)
    with capturing("off", drafts="auto"):
        assert forced(model, inputs).drafted
        with watched("forward of a draft") as forwards:
            forced(model, inputs)
        model.train().eval()  # nothing is replaced
        model.gradient_checkpointing_enable()
        model.gradient_checkpointing_disable()
        with watched("forward of a draft") as after_change:
            assert forced(model, inputs).drafted
    assert not any(call.kwargs.get("is_trial") for call in forwards)
    assert sum(call.kwargs.get("is_trial", False) for call in after_change) == 1


def times(eager: float, replayed: float) -> dict[tuple[int, int, str], tuple[float, float]]:
    """Returns measured times of forwards of several tokens, in steps of one token."""
    kinds = ("eager", eager), ("replay", replayed)
    return {
        (1, size, path): (ForwardTimes.LEAST, seconds if size > 1 else 1.0)
        for size in range(1, MOST_TOKENS + 1)
        for path, seconds in kinds
    }


CAPTURES = {"min_computed": 0.0, "cpu_captures": CPU_CAPTURES._replace(eager_forwards=1)}


def repeating() -> tuple[Any, torch.Tensor, Forced]:
    """Returns a model, a prompt, and a processor whose text goes on as the prompt did."""
    tokens = token_ids(1, 30)
    source, text = torch.cat([tokens, tokens[:, :2]], dim=1), (tokens[0].tolist() * 2)[2 : NEW + 2]
    return tiny("llama"), source, Forced([text], source.shape[1])


def test_earlier_captures_are_used_after_the_first_forward(monkeypatch):
    (model, source, processor), forwards = repeating(), []

    def counted(model: Any, inputs: dict[str, Any], view: Any) -> Any:
        forwards.append(inputs["input_ids"].shape[1])
        return forward(model, inputs, view)

    forward = TransformersDecodeStep.forward
    monkeypatch.setattr(TransformersDecodeStep, "forward", staticmethod(counted))
    with capturing("on", drafts="auto"), costs(**CAPTURES):
        for _ in range(3):
            forwards.clear()
            report = greedy(model, {"input_ids": source}, logits_processor=[processor])
    assert report.steps_saved > NEW / 2
    assert forwards[0] == MOST_TOKENS and forwards.count(MOST_TOKENS) == 1, "the others are replays"
    assert 1 in forwards, "the first replay of a single step is compared"


def test_a_wrong_static_cache_is_refused_at_a_draft(monkeypatch):
    model, source, processor = repeating()

    def wrong(cache: StaticKVCache, content: KVContent) -> None:
        load(cache, content)
        for states in (*cache.buffers, *(states for prompt in cache.prompts for pair in prompt for states in pair)):
            states.neg_()

    load = StaticKVCache.load
    with capturing("on", drafts="auto"), costs(**CAPTURES):
        for _ in range(2):
            greedy(model, {"input_ids": source}, logits_processor=[processor])
        monkeypatch.setattr(StaticKVCache, "load", wrong)
        with pytest.warns(RuntimeWarning, match="static buffers"):
            report = greedy(model, {"input_ids": source}, logits_processor=[processor])
    assert report.steps_saved > NEW / 2 and "CAPTURE_REFUSED" in report.codes()


def test_the_switch_is_reported():
    with configured(drafts="off"):
        report = forced(tiny("llama"), inputs_of("llama", 30))
    assert not report.drafted and report.codes(DRAFTS) == {"DRAFTS_OFF"}


@pytest.mark.parametrize(
    ("rows", "arguments", "min_computed", "code"),
    ((1, {"max_new_tokens": 7}, 0.0, "FEW_STEPS"), (9, {}, 0.0, "MANY_ROWS"), (1, {}, 1e9, "TOO_SMALL")),
)
def test_a_call_that_looks_for_no_drafts_says_why(rows, arguments, min_computed, code):
    with costs(min_computed=min_computed):
        report = forced(tiny("llama"), inputs_of("llama", *[30] * rows), **arguments)
    assert not report.drafted and report.codes(DRAFTS) == {code}
    assert any(item.startswith(f"{DRAFTS}: ") for item in report.decisions)


def test_a_text_without_repetitions_says_so():
    source = inputs_of("llama", 30)["input_ids"]
    text = torch.tensor([[token for token in range(10, 60) if token not in source][:8]])
    processor = Forced(text, source.shape[1])
    report = greedy(tiny("llama"), {"input_ids": source}, logits_processor=[processor], max_new_tokens=8)
    assert not report.drafted and report.codes(DRAFTS) == {"NOTHING_REPEATED"}
    assert forced(tiny("llama"), inputs_of("llama", 30)).codes(DRAFTS) == set()


class Changing(LogitsProcessor):
    """Changes the model after a number of tokens."""

    def __init__(self, model: Any, at: int) -> None:
        self.model, self.at = model, at

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == self.at:
            head = self.model.lm_head
            self.model.lm_head = torch.nn.Linear(head.in_features, head.out_features, bias=False)
            with torch.no_grad():
                self.model.lm_head.weight.copy_(head.weight.roll(1, dims=0))
        return scores


@GRAPHS
def test_no_logits_of_changed_weights_are_used(cuda_graphs):
    model, input_ids = tiny("llama"), token_ids(1, 9, seed=4)
    weight, before = model.lm_head.weight, model.lm_head.weight.detach().clone()

    class Rolling(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] in (30, 33):
                with torch.no_grad():
                    weight.copy_(weight.roll(1, dims=0))
            return scores

    def call() -> torch.Tensor:
        with torch.no_grad():
            weight.copy_(before)
        processors = [Rolling(), Until(Forced([[7] * 20], 9), 9 + 20)]
        return model.generate(
            input_ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, logits_processor=processors
        )

    with capturing(cuda_graphs, drafts="auto"):
        both = run_both(call)
    assert torch.equal(both.stock, both.fast) and both.report.drafted


@GRAPHS
@pytest.mark.parametrize("steps", (10, 11, 12, 22), ids="after {} steps".format)
def test_no_logits_of_a_changed_model_are_used(steps, cuda_graphs):
    """Whether the text follows the draft at that step or has left it."""
    outputs = []
    for context in (fastgen.disabled(), capturing(cuda_graphs, drafts="auto")):
        model, input_ids = tiny("llama"), token_ids(1, 9, seed=4)
        with context:
            tokens = [7] * 20
            processors = [Changing(model, 9 + steps), Until(Forced([tokens], 9), 9 + 20)]
            outputs.append(
                model.generate(
                    input_ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, logits_processor=processors
                )
            )
    assert torch.equal(*outputs) and fastgen.explain().drafted and "MODEL_CHANGED" in fastgen.explain().codes(DRAFTS)


class Until(LogitsProcessor):
    def __init__(self, processor: LogitsProcessor, length: int) -> None:
        self.processor, self.length = processor, length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.processor(input_ids, scores) if input_ids.shape[1] < self.length else scores


def test_an_error_of_user_code_is_raised_once():
    class Failing(Noting):
        def __call__(self, input_ids: torch.Tensor, scores: Any) -> Any:
            if input_ids.shape[1] == 30:
                raise KeyError("mine")
            return super().__call__(input_ids, scores)

    model, input_ids, failings = tiny("llama"), token_ids(1, 20), []

    def call() -> Any:
        failings.append(Failing(stops_at=99))
        processors = [Forced(copying(input_ids, NEW), 20), failings[-1]]
        return model.generate(input_ids, max_new_tokens=NEW, do_sample=False, logits_processor=processors)

    with fastgen.disabled():
        assert outcome(call) == ("KeyError", "'mine'")
    assert outcome(call) == ("KeyError", "'mine'")
    assert len(failings[0].calls) == len(failings[1].calls)

"""`explain()` reports of a call which kernels ran and why others did not; as text, as JSON and in the log."""

import json
import logging
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from hooks import watched
from python_process import REPOSITORY
from reports import PREFILL, capturing
from tiny_models import BEAMS, padded, tiny, token_ids
from versions import needs

import fastgen
from fastgen import ops
from fastgen.ops.kernel import Kernel
from fastgen.ops.no_repeat_ngram.kernels import KERNELS, kernel_for
from fastgen.optimizer.decoding.call import GenerateCall, generate_call
from fastgen.optimizer.decoding.report import Reason, Report
from fastgen.testing import configured

LOOPS = needs("transformers", "5.3", "loops prepare their steps in another way")
CAPTURES = needs("transformers", "5.17", "steps are not captured")

pytestmark = pytest.mark.usefixtures("share_always")

NGRAMS = BEAMS | {"max_new_tokens": 6, "min_new_tokens": 6, "no_repeat_ngram_size": 2}


def test_the_kernel_of_ngram_blocking_is_named():
    model, chosen = tiny("gpt2"), kernel_for("cpu")
    for arguments in ({}, {"output_logits": True, "return_dict_in_generate": True}):  # in place, and in a copy
        model.generate(**padded(9, 5), **NGRAMS, **arguments)
        report = fastgen.explain()
        assert report.kernels[f"no_repeat_ngram ({chosen.name})"] == 6
        others = {f"no-repeat n-gram ({kernel.name})" for kernel in KERNELS if kernel is not chosen}
        assert {name for name in report.unused_kernels if name.startswith("no-repeat")} == others


def test_an_operation_without_calls_names_its_task():
    tiny("gpt2").generate(**padded(9, 5), **BEAMS)
    assert fastgen.explain().unused_kernels["no-repeat n-gram"] == "nothing to do (n-gram blocking)"


def test_a_kernel_that_did_not_run_has_a_reason(monkeypatch):
    reasons = {"a": ["no GPU", "no compiler"], "oneDNN": ["old CPU"]}

    def kernel(name):
        return Kernel(name, lambda: reasons.get(name, []), print, task=f"work of {name}", counted_as=(f"op ({name})",))

    kernels = {"op": map(kernel, "abcd"), "other": [kernel("oneDNN")], "third": [kernel("torch")]}
    monkeypatch.setattr(ops, "kernels", lambda: kernels | {"not counted": [Kernel("torch", list, print)]})
    call = Report("Model")
    call.kernels["op (c)"] = 2
    assert call.unused_kernels == {
        "op (a)": "no GPU; no compiler",
        "op (b)": "nothing to do (work of b)",
        "op (d)": "c comes first",
        "other": "old CPU",
        "third": "nothing to do (work of torch)",
    }


def test_a_report_is_the_same_as_text_and_as_json():
    tiny("gpt2").generate(**padded(9, 5), **NGRAMS)
    report = fastgen.explain()
    read = json.loads(json.dumps(report.as_dict()))
    assert (read["model"], read["inputs"], read["rows"]) == ("GPT2LMHeadModel", 2, 6)
    assert PREFILL in read["shared"] and read["kernels"] == report.kernels and read["unused_kernels"]
    text = repr(report)
    assert text == str(report)
    assert text.splitlines() == [
        read["verdict"],
        f"  GPT2LMHeadModel: 2 inputs, 6 rows, {read['seconds']:.3f} s",
        *(f"  {item}" for item in read["shared"]),
        *(f"  {name}: {calls} calls" for name, calls in read["kernels"].items()),
        *(f"  left to the library: {item}" for item in read["fallbacks"]),
        *(f"  not worthwhile: {item}" for item in read["decisions"]),
    ]


@CAPTURES
def test_a_report_begins_with_a_verdict_in_words():
    model = tiny("gpt2")
    model.generate(**padded(9, 5), **BEAMS)
    few = "decode steps not captured: the call has fewer than 24 steps"
    assert repr(fastgen.explain()).startswith(f"{few}; prompts shared\n")
    with configured(share="auto"):
        model.generate(**padded(9, 5), **BEAMS)
    assert fastgen.explain().verdict == f"{few}; prompts not shared: the model is too small to gain"
    with capturing():
        model.generate(**padded(9, 5), **BEAMS | {"max_new_tokens": 20})
    assert fastgen.explain().verdict == "decode steps captured; prompts shared"
    assert fastgen.explain().as_dict()["replayed_steps"] == fastgen.explain().replays > 0


def test_a_verdict_gives_one_reason_for_both_once():
    report = Report("Model", inputs=1, rows=2)
    hooks = Reason("HOOKS", "the model has a forward hook")
    report.add_reasons("decode steps", [hooks])
    assert report.verdict == "decode steps not captured: the model has a forward hook; prompts shared"
    report.add_reasons("prompt sharing", [hooks])
    assert report.verdict == "decode steps not captured, prompts not shared: the model has a forward hook"
    report.add_reasons("prompt sharing", [Reason("ROWS_DIFFER", "rows differ")])
    report.set_prefix(9, 9)
    assert report.verdict == "decode steps not captured: the model has a forward hook; a prefix of 9 tokens shared"


def test_a_call_without_generation_has_no_steps_in_its_verdict():
    with GenerateCall(Report("Model", has_steps=False)) as call:
        call.set_rows(1, 2)
    assert call.report.verdict == "prompts shared" and not call.report.not_done
    assert str(call.report).splitlines()[1].startswith("  Model: 1 input, 2 rows, ")


def test_the_last_rollout_and_the_last_scoring_have_reports():
    model = tiny("gpt2")
    model.generate(**padded(9, 5), **BEAMS)
    rollout = fastgen.explain()
    fastgen.token_log_probs(model, token_ids(2, 9), None, completion_length=3)
    scoring = fastgen.explain()
    assert fastgen.explain("scoring") is scoring and not scoring.has_steps
    assert fastgen.explain("generate") is rollout and rollout.has_steps
    model.generate(**padded(9, 5), **BEAMS)
    assert fastgen.explain() is fastgen.explain("generate") is not rollout and fastgen.explain("scoring") is scoring


def test_without_a_scoring_the_report_says_that_there_was_none():
    def reports():
        tiny("gpt2").generate(**padded(9, 5), **BEAMS)
        return fastgen.explain(), fastgen.explain("scoring")

    with ThreadPoolExecutor(1) as pool:  # a thread without calls
        generated, scored = pool.submit(reports).result()
    assert generated.rows and scored.codes() >= {"NO_CALL"}
    assert "no scoring of texts in this thread has gone through fastgen" in str(scored)


def test_a_report_says_that_patches_were_reverted_after_its_call():
    tiny("gpt2").generate(**padded(9, 5), **BEAMS)
    try:
        fastgen.disable()
        report = fastgen.explain()
        assert "NO_PATCH" in report.codes()
        assert "calls after this one do not use fastgen: fastgen.disable()" in str(report)
    finally:
        fastgen.enable()
    assert "NO_PATCH" not in fastgen.explain().codes()


def test_an_unknown_kind_of_report_is_named():
    with pytest.raises(ValueError, match=r"^kind is 'rollout' \(accepted: None, 'generate', 'scoring'\)$"):
        fastgen.explain("rollout")


@LOOPS
def test_a_decision_is_no_fallback():
    model = tiny("gpt2")
    with configured(share="auto"):
        model.generate(**padded(9, 5), **BEAMS)
    report = fastgen.explain()
    assert not report.fallbacks and report.codes() == {"FEW_STEPS", "TOO_SMALL"}
    assert [item.partition(":")[0] for item in report.decisions] == ["decode steps", "prompt sharing"]
    model.generate(**padded(9, 5), **BEAMS, return_dict_in_generate=True, output_attentions=True)
    report = fastgen.explain()
    assert report.codes("decoding loop") == {"OUTPUTS"}
    assert report.fallbacks == ["decoding loop: output_attentions is set"]


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}, {"do_sample": True}], ids=("greedy", "beams", "sampled"))
@pytest.mark.parametrize("length", [4, 12, 40])
@pytest.mark.parametrize("ends", [True, False], ids=("ends", "full length"))
def test_steps_that_were_not_captured_always_have_a_reason(arguments, length, ends):
    """eos_token_id: so many tokens end a row that calls of every length also end early."""
    ending = {"eos_token_id": list(range(5, 30))} if ends else {"min_new_tokens": length}
    tiny("gpt2").generate(**padded(9, 5), **arguments, **ending, max_new_tokens=length)
    report = fastgen.explain()
    assert bool(report.replays) != bool(report.codes("decode steps") | report.codes("decoding loop"))


def test_a_call_without_rows_has_none_in_its_text():
    assert str(Report("Model")).splitlines() == ["nothing done", "  Model"]


def test_reasons_are_noted_once_with_their_parts():
    report = Report("Model", inputs=2, rows=4)
    cannot, chose_not = (Reason("USER_CACHE", "the caller passed a cache"), Reason("TOO_SMALL", "small", "1 of 2"))
    for _ in range(2):
        report.add_reasons("decoding loop", [cannot, cannot])
        report.add_reasons("prompt sharing", [chose_not])
    assert report.not_done == [("decoding loop", cannot), ("prompt sharing", chose_not)]
    assert report.fallbacks == ["decoding loop: the caller passed a cache"]
    assert report.decisions == ["prompt sharing: small (1 of 2)"]
    assert report.as_dict()["reasons"][1] == {
        "part": "prompt sharing",
        "code": "TOO_SMALL",
        "text": "small",
        "detail": "1 of 2",
        "decision": True,
    }
    assert report.verdict == "decode steps not captured: the caller passed a cache; prompts not shared: small"


def test_the_documentation_lists_the_codes_of_the_source():
    """Each code stands once in the table of docs/reasons.md, and none that no code returns."""
    sources = [path.read_text(encoding="utf-8") for path in (REPOSITORY / "fastgen").rglob("*.py")]
    code_of = r'(?:(?:Reason|with_code|refused|that_hold\()\(\s*|^ +\()"([A-Z0-9_]+)",'  # cases: tuples
    used = {code for source in sources for code in re.findall(code_of, source, re.MULTILINE)}
    page = (REPOSITORY / "docs" / "reasons.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `([A-Z0-9_]+)` \|", page, re.MULTILINE)
    assert sorted(documented) == sorted(used)


def test_under_debug_each_call_is_one_line(caplog):
    caplog.set_level(logging.DEBUG, logger="fastgen")
    model = tiny("gpt2")
    model.generate(**padded(9, 5), **NGRAMS)
    model.generate(**padded(9, 5), max_new_tokens=3)
    with fastgen.disabled():
        model.generate(**padded(9, 5), max_new_tokens=3)
    first, second = [message for message in caplog.messages if message.startswith("generate: ")]
    assert first.startswith("generate: GPT2LMHeadModel: 2 inputs, 6 rows: decode steps not captured: ")
    assert PREFILL in first and f"no_repeat_ngram ({kernel_for('cpu').name}): 6 calls" in first
    assert second == (
        "generate: GPT2LMHeadModel: 2 inputs, 2 rows: decode steps not captured: the call has fewer than 24 steps; "
        "prompts not shared: one row per input"
    )


def test_without_debug_no_line_is_made():
    with watched("line of a report") as lines, generate_call("Model"):
        pass
    assert not lines


def test_fairseq_has_reports_of_the_same_kind():
    pytest.importorskip("fairseq")
    from fairseq_generation import generate
    from fairseq_models import CASES

    generate(CASES["transformer"](), no_repeat_ngram_size=2, min_len=4)
    kernels = fastgen.explain().kernels
    assert kernels[f"no_repeat_ngram ({kernel_for('cpu').name})"] >= 4
    assert kernels["shared_attention"] >= 4 and kernels["scaled_dot_product_attention"] >= 4

"""What `explain()` tells of a call: the kernels that ran, why others did not; as text, as JSON and in the log."""

from __future__ import annotations

import json
import logging

import pytest
from parity import BEAMS, PREFILL, padded, tiny
from versions import needs

import fastgen
from fastgen import ops
from fastgen.ops import Kernel
from fastgen.ops.no_repeat_ngram.implementations import IMPLEMENTATIONS, implementation_for
from fastgen.optimizer.decoding import model_facts
from fastgen.optimizer.decoding.call import count, current_call, fell_back, generate_call, last_report
from fastgen.optimizer.report import Report

pytestmark = pytest.mark.usefixtures("share_always")

NGRAMS = BEAMS | {"max_new_tokens": 6, "min_new_tokens": 6, "no_repeat_ngram_size": 2}


def test_the_implementation_of_ngram_blocking_is_named_and_why_the_others_did_not_run():
    model, chosen = tiny("gpt2"), implementation_for("cpu")
    for arguments in ({}, {"output_logits": True, "return_dict_in_generate": True}):  # in place, and in a copy
        model.generate(**padded(9, 5), **NGRAMS, **arguments)
        found = fastgen.explain()
        assert found.kernels[f"no_repeat_ngram ({chosen.name})"] == 6
        others = {f"no-repeat n-gram ({one.name})" for one in IMPLEMENTATIONS if one is not chosen}
        assert {name for name in found.unused_kernels if name.startswith("no-repeat")} == others


def test_the_fused_activation_is_named(monkeypatch):
    monkeypatch.setattr(model_facts.ModelSize, "is_large", True)
    for name, ran in (("gpt2", True), ("llama", False)):
        tiny(name).generate(**padded(9, 5), **BEAMS)
        assert ("fused activation" in fastgen.explain().kernels) == ran
        assert ("fused activation" in fastgen.explain().unused_kernels) != ran


def test_an_operation_without_calls_is_one_item_that_says_what_it_is_for():
    tiny("gpt2").generate(**padded(9, 5), **BEAMS)
    assert fastgen.explain().unused_kernels["no-repeat n-gram"] == "nothing to do (n-gram blocking)"


def test_a_kernel_that_did_not_run_is_missing_or_comes_later_or_has_nothing_to_do(monkeypatch):
    names = ("a", "b", "c", "d")
    reasons = {"a": ("no GPU", "no compiler")}
    kernels = [Kernel("op", name, reasons.get(name, ()), f"work of {name}", (f"op ({name})",)) for name in names]
    alone = [Kernel("other", "oneDNN", ("old CPU",), "work", ("other",)), Kernel("third", "torch", (), "work", ("t",))]
    monkeypatch.setattr(ops, "kernels", lambda: kernels + alone)
    call = Report("Model")
    call.usages[0]["op (c)"] = 2
    assert call.unused_kernels == {
        "op (a)": "no GPU; no compiler",
        "op (b)": "nothing to do (work of b)",
        "op (d)": "c comes first",
        "other": "old CPU",
        "third": "nothing to do (work)",
    }


def test_a_report_is_the_same_as_text_and_as_json():
    tiny("gpt2").generate(**padded(9, 5), **NGRAMS)
    found = fastgen.explain()
    read = json.loads(json.dumps(found.as_dict()))
    assert (read["model"], read["inputs"], read["rows"]) == ("GPT2LMHeadModel", 2, 6)
    assert PREFILL in read["shared"] and read["kernels"] == found.kernels
    text = repr(found)
    assert text == str(found)
    assert text.splitlines() == [
        f"GPT2LMHeadModel: 2 inputs, 6 rows, {read['seconds']:.3f} s",
        *(f"  shared: {item}" for item in read["shared"]),
        *(f"  kernel: {name}, {calls} calls" for name, calls in read["kernels"].items()),
        *(f"  not used: {name}: {reason}" for name, reason in read["unused_kernels"].items()),
        *(f"  fell back: {item}" for item in read["fallbacks"]),
    ]


def test_a_call_of_which_fastgen_saw_no_rows_has_none_in_its_text():
    assert str(Report("Model")).splitlines()[:2] == ["Model", "  shared: nothing"]


@needs("transformers", "5.6", "the loop is the library's, which is one more reason")
def test_under_debug_each_call_is_one_line(caplog):
    caplog.set_level(logging.DEBUG, logger="fastgen")
    model = tiny("gpt2")
    model.generate(**padded(9, 5), **NGRAMS)
    model.generate(**padded(9, 5), max_new_tokens=3)
    with fastgen.disabled():
        model.generate(**padded(9, 5), max_new_tokens=3)
    first, second = [message for message in caplog.messages if message.startswith("generate: ")]
    assert first.startswith(f"generate: GPT2LMHeadModel: 2 inputs, 6 rows; shared: {PREFILL}")
    assert f"no_repeat_ngram ({implementation_for('cpu').name}) 6" in first
    assert second == (
        "generate: GPT2LMHeadModel: 2 inputs, 2 rows; shared: nothing; kernels: none; "
        "fell back: prefill and caches: one row per input, nothing to share"
    )


def test_further_reasons_are_counted():
    call = Report("Model", fallbacks=["one", "two", "three"])
    assert call.summary().endswith("; fell back: one (and 2 more)")


def test_without_debug_no_line_is_made(monkeypatch):
    def fail(self):
        raise AssertionError

    monkeypatch.setattr(Report, "summary", fail)
    with generate_call("Model"):
        pass


def test_nothing_is_counted_outside_of_a_call():
    before = last_report()
    count("kernel")
    fell_back(["reason"])
    assert current_call() is None and last_report() is before


def test_fairseq_has_reports_of_the_same_kind():
    pytest.importorskip("fairseq")
    from fairseq_models import CASES
    from fairseq_parity import generate

    generate(CASES["transformer"](), no_repeat_ngram_size=2, min_len=4)
    found = fastgen.explain().kernels
    assert found[f"no_repeat_ngram ({implementation_for('cpu').name})"] >= 4
    assert found["shared_attention"] >= 4 and found["scaled_dot_product_attention"] >= 4

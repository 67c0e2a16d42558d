"""Inputs that begin alike meet in batches, and their common head is kept from batch to batch."""

import random
from typing import Any

import numpy as np
import pytest
from cli_loop import command, generate, interrupted_after, plain_loop, write_lines
from cli_models import WORDS, sentences

import fastgen
from fastgen.batch.files import Line
from fastgen.batch.planner import Item, Planner, common_head
from fastgen.optimizer.transformers import prefixes

pytestmark = pytest.mark.usefixtures("share_always")

SYSTEM = " ".join(random.Random(3).choices(WORDS, k=42))
OTHER = " ".join(random.Random(4).choices(WORDS, k=44))
LINES = [f"{SYSTEM} {line}" for line in sentences(22, longest=9)]
MIXED = [f"{OTHER if number % 2 else SYSTEM} {line}" for number, line in enumerate(sentences(24, longest=9))]


@pytest.fixture
def filled(monkeypatch):
    """Counts the tokens that each call reuses."""
    lengths: list[int] = []
    real = prefixes.fill_sync

    def fill(call: Any, model: Any, forward: Any, prefix: prefixes.CommonPrefix, arguments: dict[str, Any]) -> None:
        lengths.append(prefix.reused)
        real(call, model, forward, prefix, arguments)

    monkeypatch.setattr(prefixes, "fill_sync", fill)
    return lengths


def items(*beginnings: tuple[int, int], seed: int = 0) -> list[Item]:
    """Returns an item for each pair: that number of tokens of one value, then some others."""
    draw = np.random.default_rng(seed)
    rows = [np.r_[np.full(length, value), draw.integers(100, 999, 1 + number)] for number, (value, length) in
            enumerate(beginnings)]  # fmt: skip
    return [Item(Line(number, b""), {"input_ids": row}, len(row)) for number, row in enumerate(rows, start=1)]


@pytest.mark.parametrize(("common", "head"), ((31, 0), (32, 32), (39, 32), (40, 40), (49, 40), (50, 50), (200, 190)))
def test_a_head_is_rounded_down(common, head):
    assert common_head(items(*[(7, common)] * 3)) == head


def test_the_head_leaves_a_token_of_each_input():
    inputs = items((7, 60), (7, 60))
    inputs[1].arrays = {"input_ids": np.full(40, 7)}
    assert common_head(inputs) == 32  # not 40
    assert common_head([]) == 0


def test_inputs_that_begin_alike_share_batches_if_they_fill_one():
    planner = Planner(4, None, 99, by_head=True)
    beginnings = [(7, 40), (8, 64)] * 5 + [(9, 50)] * 3 + [(1, 3)] * 2
    batches = [*planner(items(*beginnings))]
    heads = [({int(item.arrays["input_ids"][0]) for item in batch.items}, batch.head) for batch in batches]
    assert heads == [({7}, 40), ({7}, 40), ({8}, 62), ({8}, 62), ({1, 9}, 0), ({1}, 0)]
    assert [batch.number for batch in batches] == list(range(6))
    assert [batch.ends_window for batch in batches] == [False] * 5 + [True]


def test_in_file_order_a_head_is_common_to_two_batches():
    planner = Planner(2, None, 99, sorts=False, by_head=True)
    batches = [*planner(items(*[(7, 40)] * 4, *[(8, 64)] * 4))]
    assert [batch.head for batch in batches] == [40, 40, 0, 62]


@pytest.mark.parametrize("sorts", (True, False))
def test_heads_do_not_depend_on_what_is_written(sorts):
    """A written item has no arrays: the batch after it may be planned before or after that."""
    planner = Planner(2, None, 99, sorts=sorts, by_head=True)
    beginnings = [(7, 40)] * 4 + [(8, 64)] * 4
    heads = []
    for batch in planner(items(*beginnings)):
        heads.append(batch.head)
        for item in batch.items:
            item.arrays, item.is_written = None, True
    assert heads == [batch.head for batch in planner(items(*beginnings))]


@pytest.mark.parametrize(
    ("lines", "prefix", "rows", "beams", "heads"),
    [
        (LINES, "", 5, 1, [0, 40, 40, 40, 40]),
        (LINES, "", 5, 3, [0, 40, 40, 40, 40]),
        (LINES, f"{SYSTEM} ", 5, 1, [0, 40, 40, 40, 40]),
        (MIXED, "", 6, 1, [0, 40, 0, 40]),
    ],
    ids=("greedy", "beams", "prefix", "alternating"),
)
def test_outputs_with_kept_heads_are_those_of_a_plain_loop(tmp_path, gpt2, filled, lines, prefix, rows, beams, heads):
    expected = plain_loop(gpt2, lines, rows, causal_lm=True, num_beams=beams, max_new_tokens=6)
    flags = ("--causal_lm", "--bs", rows, "--beam", beams, "--max_new_tokens", 6, "--prefix", prefix)
    assert generate(tmp_path, gpt2, [line.removeprefix(prefix) for line in lines], *flags) == expected
    assert filled == heads


@pytest.mark.parametrize(
    ("lines", "sampling", "batches"),
    [(LINES, (), 1), (LINES, (), 4), (MIXED, (), 2), (MIXED, ("--do_sample", "--seed", "3"), 2)],
)
def test_resumed_scores_do_not_depend_on_kept_heads(tmp_path, gpt2, lines, sampling, batches):
    source, whole, output = write_lines(tmp_path / "in", lines), tmp_path / "whole", tmp_path / "out"
    flags = ("--causal_lm", "--bs", 4, "--beam", 2, "--max_new_tokens", 6, "--output_format", "jsonl", *sampling)
    assert command(gpt2, source, whole, *flags) == 0
    with interrupted_after(batches):
        assert command(gpt2, source, output, *flags) == 130
    assert command(gpt2, source, output, *flags, "--resume") == 0
    assert output.read_bytes() == whole.read_bytes() and b'"score": ' in whole.read_bytes()


def test_weights_changed_between_two_lists_are_used(gpt2, filled):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(gpt2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gpt2)
    generator = fastgen.TextGenerator(model, tokenizer=tokenizer, causal_lm=True, bs=4, max_new_tokens=6)
    first = generator(LINES)
    model.transformer.h[0].mlp.c_fc.weight.data.neg_()
    second = generator(LINES)
    del filled[:]
    assert second != first and generator(LINES) == second
    assert 0 not in filled

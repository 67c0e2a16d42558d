"""Batches keep the order of the file only if sorting lines by length would change an output."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from cli_models import WORDS, save_bart, save_gpt2, save_t5, sentences, small
from tiny_models import tiny

import fastgen
from fastgen.batch import settings
from fastgen.batch.model import Loaded
from fastgen.batch.task import task_for
from fastgen.cli.transformers.args import parse_arguments

# Some have one word, and a batch in file order has short and long ones.
LINES = [line for pair in zip(sentences(12, longest=4), sentences(12, longest=55, seed=1)) for line in pair]
LINES[::6] = ["word1", "word2", "word3", "word4"]
LINES[3] = " ".join(WORDS[:50])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_gpt2(folder / "gpt2")
    save_bart(folder / "bart")
    save_t5(folder / "t5")
    save_decoder(folder / "decoder", tokenizer=folder / "gpt2")
    return folder


def save_decoder(folder: Path, tokenizer: Path) -> None:
    """Saves BART's decoder, which numbers its positions from the first column."""
    torch.manual_seed(0)
    sizes = {**small(16), "vocab_size": 64, "max_position_embeddings": 64}
    config = transformers.BartConfig(**sizes, is_encoder_decoder=False, forced_eos_token_id=None)
    transformers.BartForCausalLM(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


def load(models: Path, model: str, flags: str) -> tuple[Loaded, list[str]]:
    """Returns the model with its settings, and the reasons for file order."""
    task = task_for(parse_arguments([str(models / model), "input", "output", *flags.split()]))
    task.load()
    return task.loaded, settings.reasons_to_keep_file_order(task.loaded)


def padded(model: Any, side: str, *flags: str) -> Loaded:
    """Returns a model as if it were loaded, with a tokenizer that pads on this side."""
    return Loaded(parse_arguments(["model", "input", "output", *flags]), model, SimpleNamespace(padding_side=side))


def outputs(loaded: Loaded, order: list[int]) -> list[list[int]]:
    """Returns the tokens of the unpatched library for all LINES, in batches of four in this order."""
    tokens: list[list[int]] = [[] for _ in LINES]
    end = loaded.value("eos_token_id")
    torch.manual_seed(0)
    with fastgen.disabled():
        for start in range(0, len(order), 4):
            rows = order[start : start + 4]
            batch = loaded.tokenizer([LINES[row] for row in rows], padding=True, return_tensors="pt")
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
            sequences = loaded.model.generate(**inputs, **loaded.settings).tolist()
            skipped = batch["input_ids"].shape[1] if loaded.args.causal_lm else 1
            for row, ids in zip(rows, sequences, strict=True):
                ids = [*ids[skipped:], end]
                tokens[row] = ids[: ids.index(end)]
    return tokens


def differ(loaded: Loaded) -> int:
    """Returns how many outputs change if lines are sorted by length."""
    in_file_order = outputs(loaded, list(range(len(LINES))))
    by_length = sorted(range(len(LINES)), key=lambda row: len(LINES[row].split()))
    return sum(a != b for a, b in zip(in_file_order, outputs(loaded, by_length), strict=True))


# Token 2 ends outputs and pads the inputs of GPT-2; token 1 pads those of BART.
LIKELY_END = "--gen sequence_bias=[[[2],6.0]]"
LIKELY_PAD = "--gen sequence_bias=[[[1],6.0]]"
LIKELY_PAD_AND_WORDS = "--gen sequence_bias=[[[2],12.0],[[5],10.0],[[6],10.0],[[7],10.0],[[8],10.0]]"

INDEPENDENT = [
    ("gpt2", "--causal_lm"),
    ("gpt2", "--causal_lm --beam 3 --no_repeat_ngram_size 2 --length_penalty 2"),
    ("gpt2", "--causal_lm --max_new_tokens 8 --gen min_new_tokens=8"),
    ("gpt2", "--causal_lm --gen exponential_decay_length_penalty=[2,1.5]"),
    ("gpt2", "--causal_lm --gen bad_words_ids=[[7],[9]]"),
    ("gpt2", "--causal_lm --gen guidance_scale=1.5"),
    ("bart", "--max_gen_length 9 --min_gen_length 4 --repetition_penalty 1.7"),
    ("bart", "--beam 3 --no_repeat_ngram_size 1 --early_stopping true"),
    ("bart", "--gen bad_words_ids=[[1,5],[5,6]] --gen forced_bos_token_id=9"),
    ("t5", "--beam 2"),
]


@pytest.mark.parametrize(("model", "flags"), INDEPENDENT)
def test_without_outputs_that_depend_on_batches_no_reason_exists(models, model, flags):
    loaded, reasons = load(models, model, flags)
    assert (reasons, differ(loaded)) == ([], 0)


ENDLESS = "without a length, outputs end at MODEL's last position, padding counted"
NGRAMS = "encoder_no_repeat_ngram_size counts padding"
SEQUENCES = "sequences of several tokens are looked for in padding"
DEPENDENT = [
    ("gpt2", "--causal_lm --max_gen_length 60", "max_length counts padding"),
    ("gpt2", "--causal_lm --gen max_new_tokens=null", ENDLESS),
    ("gpt2", f"--causal_lm --min_gen_length 40 {LIKELY_END}", "min_length counts padding"),
    ("gpt2", "--causal_lm --padding_side right", "outputs of MODEL depend on padding"),
    ("gpt2", f"--causal_lm --no_repeat_ngram_size 1 {LIKELY_END}", "no_repeat_ngram_size counts padding"),
    (
        "gpt2",
        f"--causal_lm --no_repeat_ngram_size 2 --eos_token_id 9 {LIKELY_PAD_AND_WORDS}",
        "no_repeat_ngram_size counts padding",
    ),
    ("gpt2", "--causal_lm --gen sequence_bias=[[[2,5,30],50.0]]", SEQUENCES),
    ("gpt2", "--causal_lm --gen forced_bos_token_id=9", "forced_bos_token_id looks at the longest prompt of a batch"),
    ("gpt2", '--causal_lm --gen watermarking_config={"context_width":4}', "the watermark reads padding"),
    (
        "gpt2",
        f"--causal_lm --gen encoder_no_repeat_ngram_size=1 {LIKELY_END}",
        "encoder_no_repeat_ngram_size counts padding",
    ),
    ("bart", f"--gen encoder_no_repeat_ngram_size=1 {LIKELY_PAD}", NGRAMS),
    ("gpt2", "--causal_lm --gen encoder_repetition_penalty=3", "encoder_repetition_penalty counts padding"),
    ("bart", f"--gen encoder_repetition_penalty=3 {LIKELY_PAD}", "encoder_repetition_penalty counts padding"),
    ("bart", "--padding_side left", "outputs of MODEL depend on padding"),
    ("decoder", "--causal_lm --max_new_tokens 6", "outputs of MODEL depend on padding"),
    ("bart", "--gen max_time=5", "max_time ends whole batches"),
    ("gpt2", "--causal_lm --gen token_healing=true", "token_healing pads the prompts again"),
]


@pytest.mark.parametrize(("model", "flags", "reason"), DEPENDENT)
def test_each_reason_changes_an_output(models, model, flags, reason):
    loaded, reasons = load(models, model, flags)
    assert reasons == [reason]
    if "max_time" not in flags and "token_healing" not in flags:  # other prompts than those of `outputs`
        assert differ(loaded) > 0


@pytest.mark.parametrize(
    ("kind", "config", "reasons"),
    [
        ("bigbird_pegasus", {}, ["MODEL's attention depends on the longest input of a batch"]),
        ("bigbird_pegasus", {"attention_type": "original_full"}, []),
        ("switch_transformers", {}, ["MODEL's experts take a part of each batch only"]),
        ("nllb-moe", {"moe_eval_capacity_token_fraction": 0.5}, ["MODEL's experts take a part of each batch only"]),
        ("nllb-moe", {"moe_eval_capacity_token_fraction": 1.0}, []),
    ],
)
def test_rows_that_share_attention_or_experts_are_a_reason(kind, config, reasons):
    config = transformers.AutoConfig.for_model(kind, **config)
    model = SimpleNamespace(config=config, generation_config=transformers.GenerationConfig())
    assert settings.reasons_to_keep_file_order(padded(model, "right")) == reasons


def test_a_recurrent_state_passes_through_padding():
    for kind, depends in (("llama", False), ("jamba", True)):
        assert settings.depends_on_padding(padded(tiny(kind), "left", "--causal_lm")) is depends


def test_the_models_own_settings_and_those_of_a_file_count(models, tmp_path):
    (tmp_path / "settings.json").write_text('{"do_sample": true}')
    flags = f"--generation_config {tmp_path / 'settings.json'}"
    assert load(models, "bart", flags)[1] == []  # each line has its own random numbers
    assert load(models, "bart", flags + " --beam 2")[1] == []
    flags += " --gen encoder_no_repeat_ngram_size=1"
    assert load(models, "bart", flags)[1] == [NGRAMS]


def test_sampling_of_a_models_own_is_a_reason():
    model = SimpleNamespace(config=transformers.WhisperConfig(), generation_config=transformers.GenerationConfig())
    model.generation_config.update(do_sample=True)
    loaded = padded(model, "right")
    assert settings.reasons_to_keep_file_order(loaded) == ["sampling draws all random numbers of a batch in a row"]


def test_repetition_penalty_is_a_reason_if_it_changes_outputs(models, monkeypatch):
    flags = f"--causal_lm --repetition_penalty 3 {LIKELY_END}"
    loaded, reasons = load(models, "gpt2", flags)
    assert bool(reasons) == bool(differ(loaded))
    monkeypatch.setattr(settings, "REPETITION_PENALTY_COUNTS_PADDING", True)
    assert load(models, "gpt2", flags)[1] == ["repetition_penalty counts padding"]

"""The demo model has right data, fits in the package, and does what its card says."""

import re
from random import Random

import pytest
import torch

from fastgen.models.demo import DEMO, demo_path, sample_path
from tools.demo_model.number_words import cardinal, decimal, digits, ordinal, ordinal_suffix, roman, year
from tools.demo_model.spoken_english import MAX_SPOKEN_WORDS, held_out_pairs, make_pair

MAX_BYTES = 4_000_000


def sample() -> list[tuple[str, str]]:
    lines = sample_path().read_text(encoding="utf-8").splitlines()
    references = sample_path().with_name("sample.ref.txt").read_text(encoding="utf-8").splitlines()
    return list(zip(lines, references, strict=True))


@pytest.fixture(scope="module")
def tokenizer():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(demo_path(), local_files_only=True)


@pytest.fixture(scope="module")
def model():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForSeq2SeqLM.from_pretrained(demo_path(), local_files_only=True).eval()


def outputs(model, tokenizer, lines: list[str]) -> list[str]:
    inputs = tokenizer(lines, padding=True, return_tensors="pt")
    with torch.inference_mode():
        return tokenizer.batch_decode(model.generate(**inputs, num_beams=4), skip_special_tokens=True)


def test_numbers_are_spoken_in_plain_words():
    assert cardinal(345_678) == "three hundred forty five thousand six hundred seventy eight"
    assert cardinal(-29) == "minus twenty nine"
    assert [ordinal(number) for number in (1, 12, 20, 101)] == ["first", "twelfth", "twentieth", "one hundred first"]
    assert [ordinal_suffix(number) for number in (1, 2, 3, 11, 22, 113)] == ["st", "nd", "rd", "th", "nd", "th"]
    years = ["nineteen hundred", "nineteen oh five", "two thousand seven", "twenty twenty one"]
    assert [year(number) for number in (1900, 1905, 2007, 2021)] == years
    assert decimal("1,250.05") == "one thousand two hundred fifty point zero five"
    assert digits("555-0142") == "five five five zero one four two"
    assert [roman(number) for number in (1, 4, 9, 14, 20, 39)] == ["I", "IV", "IX", "XIV", "XX", "XXXIX"]


def test_spoken_lines_are_lower_case_words():
    rng = Random(3)
    pairs = [make_pair(rng) for _ in range(3000)]
    assert all(re.fullmatch("[a-z]+( [a-z]+)*", spoken) for _, spoken in pairs)
    lengths = [len(spoken.split()) for _, spoken in pairs]
    assert min(lengths) <= 3
    assert 70 <= max(lengths) <= MAX_SPOKEN_WORDS


def test_sample_is_the_first_500_held_out_pairs():
    assert sample() == held_out_pairs()[:500]


def test_demo_folder_is_small_enough_for_the_package():
    assert DEMO == "demo"
    names = {path.name for path in demo_path().iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert sum(path.stat().st_size for path in demo_path().rglob("*")) <= MAX_BYTES


def test_tokenizer_restores_every_line(tokenizer):
    for line in [text for pair in sample() for text in pair] + ["  Zoë,  café — 3½ €\tx ", "日本 2021"]:
        ids = tokenizer(line)["input_ids"]
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == line


def test_tokenizer_splits_numbers_into_digits(tokenizer):
    assert [token for token in tokenizer.tokenize("in 2021") if token.strip("Ġ").isdigit()] == ["2", "0", "2", "1"]


def test_training_batches_leave_out_the_excluded_lines(tokenizer):
    from tools.demo_model.train import batches

    rng = Random(5)
    drawn = [make_pair(rng)[0] for _ in range(4096)]
    excluded = {line for line in drawn if "the" in line}
    stream = batches(Random(5), tokenizer, excluded, batch_tokens=1600)
    seen: set[str] = set()
    # The stream draws 4096 lines at a time, of which many more are left.
    while len(seen) < 300:
        batch = next(stream)
        assert batch["input_ids"].shape == batch["attention_mask"].shape
        assert batch["labels"].numel() <= 1600
        seen.update(tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True))
    assert seen <= set(drawn) - excluded


def test_untrained_first_layer_looks_at_the_neighbors(tokenizer):
    from tools.demo_model.train import build_model

    torch.manual_seed(0)
    untrained = build_model(tokenizer).eval()
    untrained.set_attn_implementation("eager")
    input_ids = tokenizer([sample()[2][0]], return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        attention = untrained.model.encoder(input_ids, output_attentions=True).attentions[0][0]  # [H, S, S]
    for head, offset in enumerate((-2, -1, 1, 2)):
        assert attention[head].diagonal(offset).mean() > 0.4


def test_model_is_stored_in_half_and_loaded_in_full_precision(model):
    from safetensors import safe_open

    assert model.dtype == torch.float32
    with safe_open(demo_path() / "model.safetensors", framework="pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.float16}  # noqa: SIM118
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_generation_config_names_every_token(model, tokenizer):
    config = model.generation_config
    assert config.eos_token_id == config.decoder_start_token_id == tokenizer.eos_token_id
    assert (config.bos_token_id, config.pad_token_id) == (tokenizer.bos_token_id, tokenizer.pad_token_id)
    assert (config.max_length, config.num_beams) == (160, 4)
    assert config.forced_bos_token_id is None
    assert config.forced_eos_token_id is None


def test_model_says_the_example_of_its_card(model, tokenizer):
    line = "Dr. Smith paid $1,250.50 on 3 May 2021 at 4:15 p.m."
    spoken = (
        "doctor smith paid one thousand two hundred fifty dollars and fifty cents on the third of may twenty twenty "
        "one at four fifteen p m"
    )
    assert outputs(model, tokenizer, [line]) == [spoken]


def test_model_is_right_on_95_percent_of_the_sample(model, tokenizer):
    pairs = sorted(sample()[:200], key=lambda pair: len(pair[0]))
    right = 0
    for start in range(0, len(pairs), 50):
        lines, references = zip(*pairs[start : start + 50], strict=True)
        right += sum(map(str.__eq__, outputs(model, tokenizer, list(lines)), references))
    assert right / len(pairs) >= 0.95

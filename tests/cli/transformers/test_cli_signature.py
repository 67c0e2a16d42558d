"""The signature of a run changes with everything that can change what it writes, and with nothing else."""

import json
import shutil
from dataclasses import make_dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from cli_models import save_bart
from tokenizers import Tokenizer, models

from fastgen.cli.transformers.files.lines import Survey
from fastgen.cli.transformers.flags.run_config import RunConfig
from fastgen.cli.transformers.resume.differences import differences
from fastgen.cli.transformers.resume.signature import fingerprint_sync, signature

SURVEY = Survey(3, "0" * 64)
FLAGS = RunConfig(model="bart", input=Path("in.txt"), output=Path("out.txt"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bart(tmp_path_factory.mktemp("models") / "bart")


def load(folder: Path, **options: object) -> SimpleNamespace:
    return SimpleNamespace(
        model=transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, **options),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        feature_extractor=None,
        causal_lm=False,
    )


def sign(loaded: SimpleNamespace, survey: Survey | None = SURVEY, **flags: object) -> dict:
    return signature(replace(FLAGS, **flags), loaded, survey)


def changes(before: dict, now: dict) -> list[str]:
    """As --resume would name them, of the signature that it has read from its file."""
    return differences(json.loads(json.dumps(before)), now)


def test_the_same_model_in_another_folder_and_after_it_was_used_has_the_same_signature(
    folder: Path, tmp_path: Path
) -> None:
    before = sign(load(folder))
    loaded = load(shutil.copytree(folder, tmp_path / "copy"))
    assert changes(before, sign(loaded)) == []
    inputs = loaded.tokenizer(["word1 word2"] * 2, return_tensors="pt", truncation=True, max_length=3, padding=True)
    loaded.model.generate(input_ids=inputs["input_ids"], num_beams=2)
    assert changes(before, sign(loaded)) == []


def test_flags_that_only_say_how_it_is_run_do_not_count(folder: Path) -> None:
    loaded = load(folder)
    other = {
        "model": "./bart",
        "input": Path("copy.txt"),
        "output": Path("other.txt"),
        "resume": True,
        "quiet": True,
        "preprocess_workers": 4,
        "postprocess_workers": 4,
        "reference_path": Path("references.txt"),
        "reference_field": "good",
        "padding": "longest",
        "return_tensors": "pt",
        "score_path": Path("scores.json"),
    }
    assert changes(sign(loaded), sign(loaded, **other)) == []


def test_every_other_flag_counts_also_one_that_nobody_has_thought_of(folder: Path) -> None:
    loaded = load(folder)
    before = sign(loaded, beam=4)
    assert changes(before, sign(loaded, beam=5)) == ["--beam was 4, is 5"]
    assert changes(before, sign(loaded, beam=4, causal_lm=True)) == ["--causal_lm was not given, is given"]
    assert changes(before, sign(loaded, beam=4, gen=[("top_k", 5)])) == ['--gen was not given, is [["top_k", 5]]']
    assert changes(before, sign(loaded, beam=4, dtype="float16")) == ['--dtype was not given, is "float16"']
    later = make_dataclass("Later", [("thought_of_later", int, 1)], bases=(RunConfig,), frozen=True)
    assert "--thought_of_later was not given, is 1" in changes(before, signature(later("m", "i", "o"), loaded, SURVEY))


def test_the_input_counts_by_what_is_in_it(folder: Path) -> None:
    loaded = load(folder)
    expected = ["INPUT's content changed", "INPUT's number of lines was 3, is 4"]
    assert changes(sign(loaded), sign(loaded, Survey(4, "1" * 64))) == expected
    assert changes(sign(loaded, None), sign(loaded, None)) == []


@pytest.mark.parametrize("part", ["config", "generation_config", "weights", "dtype", "architecture"])
def test_a_change_of_the_model_is_named(folder: Path, part: str) -> None:
    before, loaded = sign(load(folder)), load(folder)
    expected = f"MODEL's {part} changed"
    if part == "config":
        loaded.model.config.scale_embedding = True
    elif part == "generation_config":
        loaded.model.generation_config.num_beams = 3
    elif part == "weights":
        with torch.no_grad():
            loaded.model.model.decoder.layers[0].fc2.bias += 1e-3
    elif part == "dtype":
        loaded = load(folder, dtype=torch.bfloat16)
        expected = "MODEL's weights changed"
    else:
        loaded.model = loaded.model.model
        loaded.model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        expected = 'MODEL\'s architecture was "BartForConditionalGeneration", is "BartModel"'
    assert expected in changes(before, sign(loaded))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool])
def test_weights_of_any_dtype_and_layout_have_a_fingerprint(dtype: torch.dtype) -> None:
    def model(last: int) -> torch.nn.Module:
        weights = torch.arange(12).remainder(2).reshape(3, 4)
        weights[-1, -1] = last
        module = torch.nn.Module()
        module.register_buffer("weights", weights.to(dtype).T)
        module.register_buffer("one", torch.ones((), dtype=dtype))
        module.register_buffer("none", torch.ones(0, dtype=dtype))
        return module

    assert fingerprint_sync(model(0)) == fingerprint_sync(model(0)) != fingerprint_sync(model(1))


def test_names_and_shapes_of_weights_count() -> None:
    linear, turned = torch.nn.Linear(2, 3, bias=False), torch.nn.Linear(3, 2, bias=False)
    for layer in (linear, turned):
        torch.nn.init.ones_(layer.weight)
    digests = {fingerprint_sync(module) for module in (linear, turned, torch.nn.Sequential(linear))}
    assert len(digests) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_weights_have_the_same_fingerprint_on_a_gpu(folder: Path) -> None:
    loaded = load(folder, dtype=torch.bfloat16)
    assert fingerprint_sync(loaded.model) == fingerprint_sync(loaded.model.cuda())


def test_a_change_of_the_tokenizer_is_named(folder: Path) -> None:
    before = sign(load(folder))

    def with_more_words(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        tokenizer.add_tokens(["word60"])

    def with_chat_template(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        tokenizer.chat_template = "{{ messages }}"

    def with_other_padding(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        tokenizer.padding_side = "left"

    def with_other_special_token(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        tokenizer.pad_token = "word1"

    def with_other_rules(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        tokenizer.backend_tokenizer.normalizer = None
        tokenizer.backend_tokenizer.post_processor = Tokenizer(models.WordLevel()).post_processor
        tokenizer.backend_tokenizer.pre_tokenizer = transformers.GPT2Tokenizer().backend_tokenizer.pre_tokenizer

    for change in (
        with_more_words,
        with_chat_template,
        with_other_padding,
        with_other_special_token,
        with_other_rules,
    ):
        loaded = load(folder)
        change(loaded.tokenizer)
        assert changes(before, sign(loaded)) == ["MODEL's tokenizer changed"], change


def test_a_tokenizer_in_python_counts_with_its_files(folder: Path, tmp_path: Path) -> None:
    """The merges of a tokenizer are not among its tokens."""

    def ctrl(merges: str) -> transformers.PreTrainedTokenizerBase:
        words = {"<unk>": 0, "a": 1, "b": 2, "a@@": 3, "ab": 4, "ba": 5}
        (tmp_path / "vocab.json").write_text(json.dumps(words))
        (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
        return transformers.CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))

    loaded = load(folder)
    loaded.tokenizer = ctrl("a b</w>")
    assert not loaded.tokenizer.is_fast
    before = sign(loaded)
    loaded.tokenizer = ctrl("a b</w>")
    assert changes(before, sign(loaded)) == []
    loaded.tokenizer = ctrl("b a</w>")
    assert changes(before, sign(loaded)) == ["MODEL's tokenizer changed"]
    loaded.tokenizer = transformers.ByT5Tokenizer()  # has no files
    before = sign(loaded)
    loaded.tokenizer = transformers.ByT5Tokenizer(extra_ids=3)
    assert changes(before, sign(loaded)) == ["MODEL's tokenizer changed"]


def test_the_settings_of_a_feature_extractor_count(folder: Path) -> None:
    loaded = load(folder)
    loaded.feature_extractor = transformers.WhisperFeatureExtractor()
    before = sign(loaded)
    loaded.feature_extractor = transformers.WhisperFeatureExtractor()
    assert changes(before, sign(loaded)) == []
    loaded.feature_extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    assert changes(before, sign(loaded)) == ["MODEL's feature extractor changed"]

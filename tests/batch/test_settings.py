"""Flags become settings of the library: which model is loaded, and the arguments of generate."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from cli_language_models import save_m2m100, save_mbart, save_mbart50, save_nllb, save_whisper
from cli_loop import command, write_lines
from cli_models import POSITIONS, copy_with_template, save_bart, save_gpt2, sentences

import fastgen
from fastgen.batch import errors
from fastgen.batch.config import BatchConfig
from fastgen.batch.errors import InputError
from fastgen.batch.model import Loaded, input_limit, lengths_of_inputs
from fastgen.batch.task import task_for
from fastgen.cli.transformers.args import parse_arguments

SPEECH = ("--task", "automatic-speech-recognition")
SAVE = {
    "bart": save_bart,
    "gpt2": save_gpt2,
    "nllb": save_nllb,
    "mbart": save_mbart,
    "mbart50": save_mbart50,
    "m2m100": save_m2m100,
    "whisper": save_whisper,
}


def has_languages(models: Path, model: str) -> bool:
    """Skips before transformers 5.6, where AutoTokenizer returns a tokenizer with a fixed language."""
    return hasattr(type(transformers.AutoTokenizer.from_pretrained(models / model)), "src_lang")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, save in SAVE.items():
        save(folder / name)
    return folder


def parse(*flags: object, model: object = "model", source: str = "input", output: str = "output") -> BatchConfig:
    return parse_arguments([str(model), source, output, *map(str, flags)])


def load(models: Path, model: str, *flags: object) -> Loaded:
    """Loads with these flags; the settings are the arguments of generate."""
    task = task_for(parse(*flags, model=models / model))
    task.load()
    return task.loaded


def refused(models: Path, model: str, *flags: object) -> str:
    with pytest.raises(InputError) as error:
        load(models, model, *flags)
    return str(error.value)


def test_gen_wins_over_the_settings_of_model_and_file(models, tmp_path):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"num_beams": 3, "length_penalty": 0.5}))
    flags = ("--generation_config", file, "--gen", "num_beams=2", "--gen", "renormalize_logits=true")
    loaded = load(models, "bart", *flags, "--max_gen_length", 7)
    assert loaded.settings == {"num_beams": 2, "renormalize_logits": True, "max_length": 7}
    assert [loaded.value(name) for name in ("num_beams", "length_penalty")] == [2, 0.5]


def test_a_file_of_settings_has_the_meaning_it_has_to_generate(models, tmp_path):
    values = {"num_beams": 3, "max_length": 6, "no_repeat_ngram_size": 2, "eos_token_id": [2, 30], "use_cache": None}
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(values))
    plain = load(models, "gpt2", "--causal_lm")
    loaded = load(models, "gpt2", "--causal_lm", "--generation_config", file)
    batch = plain.tokenizer(sentences(5), padding=True, return_tensors="pt")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with fastgen.disabled():
        config = transformers.GenerationConfig(**values, pad_token_id=plain.tokenizer.pad_token_id)
        expected = plain.model.generate(**inputs, generation_config=config)
        own = plain.model.generate(**inputs, pad_token_id=plain.tokenizer.pad_token_id)
        tokens = loaded.model.generate(**inputs, **loaded.settings)
    assert torch.equal(tokens, expected)
    assert tokens.shape != own.shape or not torch.equal(tokens, own)


def test_an_unknown_key_of_a_file_is_a_note(models, tmp_path):
    (tmp_path / "settings.json").write_text('{"num_beam": 3, "transformers_version": "5.0"}')
    loaded = load(models, "bart", "--generation_config", tmp_path / "settings.json")
    assert loaded.notes == ["note: --generation_config: num_beam changes nothing (did you mean num_beams?)"]


@pytest.mark.parametrize(
    ("flags", "scores"),
    [
        ((), False),
        (("--beam", 2), False),
        (("--output_format", "jsonl"), False),
        (("--output_format", "jsonl", "--beam", 2), True),
        (("--output_format", "jsonl", "--gen", "num_beams=2"), True),
        (("--output_sequence_scores", "--beam", 2), True),
    ],
)
def test_scores_are_computed_only_if_they_are_read(models, flags, scores):
    settings = load(models, "bart", *flags).settings
    assert (settings.get("output_scores"), settings.get("return_dict_in_generate")) == (
        (True, True) if scores else (None, None)
    )


def test_stop_strings_pass_the_tokenizer_too(models):
    loaded = load(models, "bart", "--gen", "stop_strings=word5")
    assert loaded.settings["tokenizer"] is loaded.tokenizer


@pytest.mark.parametrize(
    ("model", "source", "target", "languages", "begins"),
    [
        ("nllb", "deu_Latn", "fra_Latn", slice(0, 1), "forced_bos_token_id"),
        ("mbart50", "de_DE", "fr_XX", slice(0, 1), "forced_bos_token_id"),
        ("m2m100", "de", "fr", slice(0, 1), "forced_bos_token_id"),
        ("mbart", "de_DE", "fr_XX", slice(-1, None), "decoder_start_token_id"),
    ],
)
def test_languages_mark_inputs_and_begin_outputs(models, model, source, target, languages, begins):
    if not has_languages(models, model):
        assert "no languages" in refused(models, model, "--src_lang", source)
        return

    def spelled(code: str) -> str:
        return f"__{code}__" if model == "m2m100" else code

    loaded = load(models, model, "--src_lang", source, "--tgt_lang", target)
    settings = loaded.settings
    tokenizer = loaded.tokenizer
    ids = tokenizer("word1 word2")["input_ids"]
    assert ids[languages] == [tokenizer.convert_tokens_to_ids(spelled(source))] != [tokenizer.unk_token_id]
    assert settings == {begins: tokenizer.convert_tokens_to_ids(spelled(target))}
    # As the library's documentation says for this tokenizer.
    plain = transformers.AutoTokenizer.from_pretrained(models / model)
    plain.src_lang = source
    assert plain("word1 word2")["input_ids"] == ids
    by_name = load(models, model, "--forced_bos_token", spelled(target)).settings
    assert by_name == {"forced_bos_token_id": settings[begins]}


def test_whisper_gets_the_language_by_name(models):
    for language in ("german", "de"):
        loaded = load(models, "whisper", *SPEECH, "--src_lang", language)
        assert loaded.settings == {"language": language}
    assert input_limit(loaded) is None
    sound = [torch.randn(8000).numpy()]
    features = loaded.feature_extractor(sound, sampling_rate=16000, return_tensors="pt").input_features
    with fastgen.disabled():
        assert loaded.model.generate(features, **loaded.settings).shape[0] == 1


def test_dtype_is_that_of_the_weights(bart, tmp_path):
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(bart, dtype=torch.bfloat16)
    model.save_pretrained(shutil.copytree(bart, tmp_path / "bart"))
    for flags in ((), ("--dtype", "auto"), ("--bf16",)):
        assert load(tmp_path, "bart", *flags).model.dtype == torch.bfloat16
    assert load(tmp_path, "bart", "--dtype", "float32").model.dtype == torch.float32
    assert load(tmp_path, "bart", "--fp16").model.dtype == torch.float16


def test_attn_implementation_is_the_librarys(models):
    for name in ("eager", "sdpa"):
        loaded = load(models, "bart", "--attn_implementation", name)
        assert loaded.model.config._attn_implementation == name


@pytest.mark.parametrize(("memory", "places"), [("20KB", {"cpu", "disk"}), ("6KB", {"disk"})])
def test_device_map_auto_offloads_to_disk(memory, places, gpt2, tmp_path, monkeypatch, capsys):
    """The records are those of a run without it."""
    pytest.importorskip("accelerate")
    source, flags = write_lines(tmp_path / "in.txt", sentences(9)), ("--causal_lm", "--bs", 4, "--beam", 4)
    assert command(gpt2, source, tmp_path / "whole", *flags) == 0, capsys.readouterr().err
    kind, maps = transformers.AutoModelForCausalLM, []
    from_pretrained = kind.from_pretrained

    def little_memory(*args: object, **options: object) -> object:
        loaded = from_pretrained(*args, **options, max_memory={"cpu": memory}, offload_folder=tmp_path / "weights")
        maps.append(loaded[0].hf_device_map)
        return loaded

    monkeypatch.setattr(kind, "from_pretrained", little_memory)
    assert command(gpt2, source, tmp_path / "parts", *flags, "--device_map", "auto") == 0, capsys.readouterr().err
    assert places == set(maps[0].values())
    assert (tmp_path / "parts").read_text() == (tmp_path / "whole").read_text()


def test_the_tokenizers_own_limit_counts(models, tmp_path):
    folder = shutil.copytree(models / "bart", tmp_path / "bart")
    transformers.AutoTokenizer.from_pretrained(folder, model_max_length=50).save_pretrained(folder)
    assert input_limit(load(tmp_path, "bart"))[0] == 50


@pytest.mark.parametrize(
    ("model", "flags", "truncate_to", "limit"),
    [
        ("bart", (), None, (POSITIONS, "positions")),
        ("bart", ("--max_tokenizer_length", 9), 9, (POSITIONS, "positions")),
        ("bart", ("--truncation",), POSITIONS, (POSITIONS, "positions")),
        ("bart", ("--truncation", "--max_tokenizer_length", 9), 9, (POSITIONS, "positions")),
        ("bart", ("--no_truncation",), None, (POSITIONS, "positions")),
        ("bart", ("--no_truncation", "--max_tokenizer_length", 9), None, (9, "--max_tokenizer_length")),
        ("bart", ("--max_new_tokens", 60), None, (POSITIONS, "positions")),
        ("gpt2", ("--causal_lm", "--max_new_tokens", 20), None, (POSITIONS - 20, "20 for generated tokens")),
        ("gpt2", ("--causal_lm", "--max_gen_length", 20), None, (19, "--max_gen_length 20")),
        ("gpt2", ("--causal_lm", "--gen", "max_length=20"), None, (19, "max_gen_length 20")),
        ("gpt2", ("--causal_lm", "--truncation"), POSITIONS - 6, (POSITIONS - 6, "6 for generated tokens")),
        ("gpt2", ("--causal_lm", "--truncation", "--max_tokenizer_length", 60), POSITIONS - 6, (POSITIONS - 6, "")),
    ],
)
def test_inputs_are_truncated_only_on_request(models, model, flags, truncate_to, limit):
    length, (number, why) = lengths_of_inputs(load(models, model, *flags))
    assert (length, number) == (truncate_to, limit[0])
    assert limit[1] in why


def test_flags_of_fastseq_without_effect_are_accepted(models, capsys):
    flags = ("--padding", "max_length", "--return_tensors=pt", "--no-truncation", "--output-summaries-only")
    assert load(models, "bart", *flags).settings == load(models, "bart").settings
    notes = [f"note: --{name} changes nothing" for name in ("padding", "return_tensors", "output_summaries_only")]
    assert capsys.readouterr().err.splitlines() == notes


CHAT = ("--causal_lm", "--chat")
UNFIT = [
    ("bart", ("--gen", "num_beam=4"), "--gen num_beam=4", "did you mean num_beams?"),
    *(("bart", (flag, 65), f"{flag} 65", "up to 64") for flag in ("--max_new_tokens", "--max_tokenizer_length")),
    *(("bart", (flag, 64), f"{flag} 64", "up to 63") for flag in ("--decoder_start_token_id", "--eos_token_id")),
    ("bart", ("--gen", "language=de"), "--gen language=de", "no such setting"),
    ("bart", ("--gen", "cache_implementation=none"), "--cache_implementation none"),
    ("bart", ("--gen", 'watermarking_config={"hue": 4}'), "--watermarking_config", "hue"),
    ("bart", ("--gen", "cache_implementation=paged"), "--cache_implementation paged", "pages"),
    ("bart", ("--gen", "penalty_alpha=0.5", "--top_k", 4, "--gen", "do_sample=false"), "--top_k 4"),
    ("bart", ("--gen", "penalty_alpha=0.5", "--gen", "top_k=4"), "--top_k 4", "--do_sample"),
    ("bart", ("--gen", "num_beam_groups=2", "--gen", "num_beams=4"), "group beam search", "hub"),
    ("bart", ("--gen", "forced_bos_token_id=64"), "--forced_bos_token_id 64", "up to 63"),
    ("bart", ("--gen", "max_length=65"), "--max_gen_length 65", "up to 64"),
    ("bart", ("--gen", "num_return_sequences=2", "--join_outputs"), "--num_return_sequences 2", "without beam"),
    ("bart", ("--beam", 2, "--num_return_sequences", 3, "--join_outputs"), "--beam 2, --num_return_sequences 3"),
    ("bart", ("--forced_bos_token", "word1 word2"), "--forced_bos_token word1 word2", "one token"),
    *(("bart", (flag, "en"), f"{flag} en", "no languages") for flag in ("--src_lang", "--tgt_lang")),
    ("nllb", ("--tgt_lang", "fr"), "--tgt_lang fr", "fra_Latn"),
    ("m2m100", ("--src_lang", "eng"), "--src_lang eng", "en, "),
    ("mbart", ("--tgt_lang", "ro_RO", "--decoder_start_token_id", 5), "--decoder_start_token_id 5", "--tgt_lang ro_RO"),
    ("whisper", (*SPEECH, "--src_lang", "englisch"), "--src_lang englisch", "english"),
    ("whisper", (*SPEECH, "--tgt_lang", "de"), "--tgt_lang de", "task=translate"),
    ("whisper", (), "whisper", "--task automatic-speech-recognition"),
    ("bart", SPEECH, "bart", "accepted without --causal_lm"),
    *(("bart", ("--device", device), f"--device {device}") for device in ("toaster 3", "cuda:99", "meta")),
    ("bart", ("--attn_implementation", "tea_ceremony"), "--attn_implementation tea_ceremony"),
    ("gpt2", CHAT, "--chat", "no chat template"),
    ("gpt2", ("--causal_lm", "--max_gen_length", 1), "--max_gen_length 1", "no input fits"),
    ("gpt2", ("--causal_lm", "--max_new_tokens", 64), "64 positions", "no input fits"),
]


@pytest.mark.parametrize(("model", "flags", "named"), [(model, flags, named) for model, flags, *named in UNFIT])
def test_settings_that_the_model_cannot_follow_are_refused(models, model, flags, named):
    message = refused(models, model, *flags)
    if model == "nllb" and not has_languages(models, model):
        named = ["--tgt_lang fr", "no languages"]
    for text in named:
        assert text in message


def test_several_outputs_are_refused_from_any_source(models, tmp_path):
    (tmp_path / "settings.json").write_text('{"num_return_sequences": 2, "num_beams": 2}')
    flags = ("--generation_config", tmp_path / "settings.json")
    for named in ("--num_return_sequences 2", "--output_format jsonl", "--join_outputs"):
        assert named in refused(models, "bart", *flags)
    for way in (("--join_outputs",), ("--output_format", "jsonl")):
        load(models, "bart", *flags, *way)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"max_new_tokens": -1}', "max_new_tokens"),
        ('{"early_stopping": "perhaps"}', "early_stopping"),
        ('{"streamer": 1}', "streamer"),
        ('{"output_scores": true}', "output_scores"),
        ("[1]", "no JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_bad_files_of_settings_are_refused(models, tmp_path, content, named):
    file = tmp_path / "settings.json"
    file.write_text(content)
    message = refused(models, "bart", "--generation_config", file)
    assert "--generation_config" in message and named in message


def test_a_chat_template_is_tried_before_input_is_read(gpt2, tmp_path):
    template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    copy_with_template(gpt2, tmp_path / "any", template)
    load(tmp_path, "any", *CHAT, "--system", "word1")
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    copy_with_template(gpt2, tmp_path / "users", refusal + template)
    load(tmp_path, "users", *CHAT)
    message = refused(tmp_path, "users", *CHAT, "--system", "word1")
    assert "--system word1" in message and "no system" in message


def test_models_that_label_sound_do_not_generate(tmp_path):
    transformers.Wav2Vec2Config().save_pretrained(tmp_path / "wav2vec2")
    assert "cannot generate with --task" in refused(tmp_path, "wav2vec2", *SPEECH)


def test_missing_packages_for_audio_are_named_first(monkeypatch):
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "soxr" else object())
    message = refused(Path("/no"), "such/model", *SPEECH)
    assert "needs the package soxr: pip install soxr" in message and "soundfile" not in message

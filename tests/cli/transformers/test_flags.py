"""Flags and their settings; wrong ones are one line and status 2, before any file or model is opened."""

import runpy

import pytest
import torch
import transformers
from python_process import run_python

import fastgen
from fastgen.batch.config import ALL, OUTPUTS, BatchConfig, generation_fields, setting, settings_of_run
from fastgen.batch.errors import InputError, check_device
from fastgen.cli.transformers.args import PROG, build_parser, parse_arguments
from fastgen.cli.transformers.command import main


def parse(*flags: object, source: str = "input", output: str = "output") -> BatchConfig:
    return parse_arguments(["model", source, output, *map(str, flags)])


def test_defaults_are_those_of_the_library():
    args = parse()
    assert (args.input_format, args.output_format, args.text_field, args.id_field) == ("text", "text", "text", None)
    assert (args.preprocess_workers, args.postprocess_workers, args.window, args.batch_tokens) == (1, 1, None, None)
    assert not any((args.resume, args.quiet, args.chat, args.join_outputs, args.gen, args.generation_config))


@pytest.mark.parametrize(
    ("source", "output", "flags", "formats"),
    [
        ("a.jsonl", "b.txt", (), ("jsonl", "jsonl")),
        ("a.JSONL.gz", "b.txt", (), ("jsonl", "jsonl")),
        ("a.txt", "b.jsonl.gz", (), ("text", "jsonl")),
        ("a.jsonl.txt", "b", (), ("text", "text")),
        ("jsonl", "csv", (), ("text", "text")),
        ("a.NDJSON", "b.txt", (), ("jsonl", "jsonl")),
        ("a.txt", "b.json", (), ("text", "jsonl")),
        ("b.csv.gz", "b.txt", (), ("jsonl", "jsonl")),
        ("b.parquet", "b.txt", (), ("jsonl", "jsonl")),
        ("a.jsonl", "b.jsonl", ("--input_format", "text", "--output_format", "text"), ("text", "text")),
        ("-", "b.jsonl", ("--input_format", "jsonl", "--output_format", "text"), ("jsonl", "text")),
        ("-", "b", ("--input_format", "jsonl"), ("jsonl", "jsonl")),
        ("a", "b", ("--output-format", "jsonl"), ("text", "jsonl")),
    ],
)
def test_formats_follow_file_names_unless_a_flag_names_them(capsys, source, output, flags, formats):
    args = parse(*flags, source=source, output=output)
    assert (args.input_format, args.output_format) == formats
    kind = {"b.csv.gz": "CSV", "b.parquet": "Parquet"}.get(source, "JSON")
    said = f"note: INPUT {source} is read as {kind} records (--input_format text reads it as text)\n"
    assert capsys.readouterr().err == (said if formats[0] == "jsonl" and not flags else "")
    parse(*flags, "--quiet", source=source, output=output)
    assert capsys.readouterr().err == ""


def test_a_dash_is_a_stream_and_a_file_of_that_name_is_a_file():
    args = parse(source="-", output="./-")
    assert (args.input, args.output) == ("-", "./-")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("num_beams=4", 4),
        ("repetition_penalty=2", 2.0),  # the library takes floats only
        ("do_sample=True", True),
        ("early_stopping=never", "never"),
        ("eos_token_id=[2, 3]", [2, 3]),
        ("language=de", "de"),
        ('language="de"', "de"),
        ("max_length=null", None),
        ("stop_strings=a=b", "a=b"),
    ],
)
def test_values_of_gen_are_json_or_text(text, value):
    [(key, parsed)] = parse("--gen", text).gen
    assert (key, parsed, type(parsed)) == (text.partition("=")[0], value, type(value))


def test_fields_of_generation_config_and_its_names_are_flags():
    args = parse("--num_beams", 3, "--batch-size=5", "--max_length", 9, "--min-length", 2)
    assert (args.bs, args.gen) == (5, [("num_beams", 3), ("max_length", 9), ("min_length", 2)])
    assert parse("--beam", 3, "--bs", 5, "--max_gen_length", 9, "--min_gen_length", 2) == args
    assert parse("--min_gen_length", -1).gen == []  # FastSeq's number for "not given"
    assert parse("--typical-p", "0.9", "--renormalize_logits", "--gen", "use_cache=false").gen == [
        ("typical_p", 0.9),
        ("renormalize_logits", True),
        ("use_cache", False),
    ]
    unsettable = ("constraints", "transformers_version")
    fields = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")} - set(unsettable)
    assert fields <= set(generation_fields()), fields - set(generation_fields())


def test_help_is_a_screen_and_help_all_two():
    short, everything = (build_parser(everything=each).format_help().splitlines() for each in (False, True))
    for name, lines, most in (("--help", short, 60), ("--help-all", everything, 120)):
        assert len(lines) <= most, f"{name} has {len(lines)} lines: at most {most}, so each flag's help fits one line"
        wide = [line for line in lines if len(line) > 80]
        assert not wide, f"{name} has lines of more than 80 characters, shorten the help of {wide}"
    listed = {word for line in everything for word in line.split()[:1] if word.startswith("--")}
    missing = {f"--{each.name}" for each in settings_of_run()[3:]} - listed
    assert not missing, f"--help-all does not list {missing}: a flag has a help"
    assert "--beam" in listed
    assert everything.index("common flags:") < everything.index("scores:") and "scores:" not in short


@pytest.mark.parametrize("missing", ["group", "affects", "tasks", "python", "per_shard"])
def test_a_flag_without_a_decision_fails_at_import(missing):
    decisions = {"group": "model", "affects": OUTPUTS, "tasks": ALL, "python": True, "per_shard": False}
    assert setting("what it does", **decisions).metadata.items() >= decisions.items()
    del decisions[missing]
    with pytest.raises(TypeError, match=missing):
        setting("what it does", **decisions)


def test_help_and_version_end_with_0(capsys):
    for flag, shown in (("--help", "--max_gen_length N"), ("--version", f"fastgen {fastgen.__version__}\n")):
        with pytest.raises(SystemExit) as ended:
            main([flag])
        assert ended.value.code == 0 and shown in capsys.readouterr().out


ABOVE_0 = "bs beam n_obs max_new_tokens max_tokenizer_length repetition_penalty num_return_sequences".split()
ABOVE_0 += ["batch_tokens", "preprocess_workers", "postprocess_workers"]
SAMPLING = {"temperature": ("0", "nan"), "top_p": ("1.2", "0"), "top_k": ("-1",)}
OF_DECODERS = ("--decoder_start_token_id 1", "--tgt_lang de", "--forced_bos_token x")
OF_TEXT = ("--causal_lm", "--prefix x", "--max_tokenizer_length 9")
BAD_FLAGS = [
    *((f"--{name} 0", f"--{name}: 0") for name in ABOVE_0),
    *((f"--{name} -3", f"--{name}: -3") for name in (*ABOVE_0, "min_gen_length", "seed", "window")),
    *((f"--do_sample --{name} {value}", f"--{name}: {value}") for name, values in SAMPLING.items() for value in values),
    *((f"--{name} 0.5", f"--{name} 0.5", "--do_sample") for name in ("temperature", "top_p")),
    ("--top_k 5", "--top_k 5", "--do_sample"),
    *((f"--causal_lm {flag}", flag, "--causal_lm") for flag in OF_DECODERS),
    *((f"--task automatic-speech-recognition {flag}", flag, "audio") for flag in OF_TEXT),
    ("--length_penalty inf", "--length_penalty: inf"),
    ("--bs 1000000000000000000000000000000", "--bs: 1000"),
    ("--bs many", "--bs: 'many'"),
    ("--n-obs -2", "--n_obs: -2"),
    ("--max-gen-length 1.5", "--max_gen_length: 1.5 is not a number"),
    ("--do_sample --temperature hot", "--temperature: 'hot'"),
    ("--early_stopping perhaps", "--early_stopping: 'perhaps'"),
    ("--padding_side top", "--padding_side"),
    ("--bs", "--bs"),
    ("--no_such_flag", "--no_such_flag"),
    ("--max_gen_length 9 --max_new_tokens 8", "--max_gen_length 9", "--max_new_tokens 8"),
    ("--min_gen_length 9 --max_gen_length 8", "--min_gen_length 9", "--max_gen_length 8"),
    ("--min_gen_length 9 --max_new_tokens 8", "--min_gen_length 9", "--max_new_tokens 8"),
    ("--fp16 --bf16", "--fp16", "--bf16"),
    ("--score_path scores.json", "--score_path scores.json", "--reference_path"),
    ("--score_path scores.json", "--score_path scores.json", "--reference_field"),
    ("--reference_field good", "--reference_field good", "--input_format jsonl"),
    ("--reference_path good.jsonl", "--reference_path good.jsonl", "--reference_field NAME"),
    ("--truncation --no_truncation", "--truncation", "--no_truncation"),
    ("--truncation --chat --causal_lm", "--truncation", "--chat"),
    ("--task automatic-speech-recognition --truncation", "--truncation", "audio"),
    ("--compare", "--compare is not known"),
    ("--num_beamz 3", "--num_beamz is not known (did you mean --num_beams?)"),
    ("--typical_q=0.9", "--typical_q is not known (did you mean --typical_p?)"),
    ("--typical-p 1.5", "--typical_p: 1.5 is out of range"),
    ("--num_beams 2 --gen num_beams=3", "--beam 2", "--beam 3"),
    ("--output_format openai", "--output_format openai", "--input_format jsonl"),
    ("--num_beam 0", "--num_beam is not known", "--num_beams"),
    ("--workers 0", "--workers: 0", "1 to", "or auto"),
    ("--num_shards two", "--num_shards: 'two'", "or auto"),
    ("--shard_id -1", "--shard_id: -1", "0 to", "or auto"),
    ("--input_format xml", "--input_format", "'xml'", "jsonl"),
    ("--output_format xml", "--output_format", "'xml'", "jsonl"),
    ("--text_field article", "--text_field article", "--input_format jsonl"),
    ("--id_field id", "--id_field id", "--input_format jsonl"),
    ("--join_outputs --output_format jsonl", "--join_outputs", "JSONL"),
    ("--join_outputs --input_format jsonl", "--join_outputs", "JSONL"),
    ("--beam 2 --num_return_sequences 2", "--num_return_sequences 2", "--output_format jsonl"),
    ("--chat", "--chat", "--causal_lm"),
    ("--system kind --causal_lm", "--system kind", "--chat"),
    ("--date 2026-10-05 --causal_lm", "--date 2026-10-05", "--chat"),
    ("--date yesterday", "--date: 'yesterday' is not a date", "today, or a date such as 2026-10-05"),
    ("--dtype float64", "--dtype", "'float64'", "bfloat16"),
    ("--dtype float32 --bf16", "--dtype", "--bf16"),
    ("--generation_config none.json", "--generation_config: none.json", "No such file"),
    ("--gen num_beams", "--gen: 'num_beams'", "key=value"),
    ("--gen num_beams=0", "--beam: 0", "1 to"),
    ("--gen num_beams=two", "--beam: 'two'", "whole number"),
    ("--gen num_beams=[2]", "--beam: [2]", "whole number"),
    ("--gen do_sample=perhaps", "--do_sample: 'perhaps'", "true, false"),
    ("--gen num_beams=5 --beam 4", "--beam 5", "--beam 4", "one of them"),
    ("--gen top_p=0.5 --gen top_p=0.6", "--top_p 0.5", "--top_p 0.6"),
    ("--gen max_length=9 --max_new_tokens 8", "--max_gen_length 9", "--max_new_tokens 8"),
    ("--gen max_length=9 --min_gen_length 10", "--min_gen_length 10", "--max_gen_length 9"),
    ("--gen forced_bos_token_id=5 --forced_bos_token x", "--forced_bos_token_id 5", "--forced_bos_token x"),
    ("--tgt_lang de --forced_bos_token x", "--tgt_lang de", "--forced_bos_token x"),
    ("--gen return_dict_in_generate=true", "--return_dict_in_generate True cannot be set"),
    ("--gen output_attentions=true", "--output_attentions True cannot be set", "--output_format jsonl"),
    ("--gen streamer=x", "--gen streamer=x cannot be set"),
]

BAD_STREAMS = [
    ("-", "output.txt", "--resume", "--resume", "INPUT -"),
    ("input.txt", "-", "--resume", "--resume", "OUTPUT -"),
    ("input.txt", "-", "--reference_path input.txt", "--reference_path input.txt", "OUTPUT -"),
    ("input.jsonl", "-", "--reference_field good --quiet", "--reference_field good", "OUTPUT -"),
    ("/dev/null", "output.txt", "--input_format jsonl --reference_field good", "--reference_field good", "file"),
]


@pytest.mark.parametrize(("flags", "named"), [(flags, named) for flags, *named in BAD_FLAGS])
def test_bad_flags_are_refused(capsys, tmp_path, flags, named):
    check_refused(capsys, ["/no/such/model", "no-such-input", str(tmp_path / "output"), *flags.split()], named)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("source", "output", "flags", "named"), [(a, b, c, named) for a, b, c, *named in BAD_STREAMS])
def test_flags_that_need_a_file_are_refused_for_a_stream(capsys, source, output, flags, named):
    check_refused(capsys, ["/no/such/model", source, output, *flags.split()], named)


WITHOUT_TORCH = """
import sys
from fastgen.cli.transformers.command import main
status = main(["demo", *sys.argv[1:], "--device", "cuda"])
print(status, sorted({"torch", "transformers"} & sys.modules.keys()))
"""


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
def test_without_cuda_a_gpu_is_refused_before_any_import(tmp_path):
    (tmp_path / "in.txt").write_text("a\n")
    done = run_python("-c", WITHOUT_TORCH, str(tmp_path / "in.txt"), str(tmp_path / "out.txt"))
    assert done.stdout == "2 []\n"
    why = f"torch {torch.__version__} is built without CUDA (accepted: cpu, or a torch with CUDA)"
    assert done.stderr.splitlines()[-1] == f"{PROG}: error: --device cuda: {why}"
    assert not list(tmp_path.glob("out.txt*"))


def test_a_torch_with_cuda_but_no_gpu_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(runpy, "run_path", lambda path: {"cuda": "13.0"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"^--device cuda:1: torch finds no GPU \(accepted: cpu\)$"):
        check_device("--device cuda:1", "cuda:1")
    check_device("--device cpu", "cpu")


def check_refused(capsys: pytest.CaptureFixture, command: list[str], named: list[str]) -> None:
    assert main(command) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"{PROG}: error: ") and captured.err.count("\n") == 1, captured.err
    for text in named:
        assert text in captured.err

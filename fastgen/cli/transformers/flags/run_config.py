"""The flags of fastgen-generate-for-transformers: FastSeq's names and meanings, so that its command lines keep working.

Each is a field of RunConfig with its type, its default and its help; arguments.py makes the parser of them. A flag of
generate that is not given is None and leaves the model's own generation_config alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fastgen.cli.transformers.flags.argument_types import (
    SETTINGS,
    device_name,
    file_or_stream,
    json_file,
    setting,
    whole_number,
)

# What --task may be besides a name of MODEL's own settings.
HEARING = ("automatic-speech-recognition", "speech-to-text", "speech-to-speech")  # INPUT names audio files
SPEAKING = ("text-to-speech", "speech-to-speech")  # OUTPUT does
TRANSLATION = "translation"

# The groups of --help, by the first flag of each.
GROUPS = {
    "bs": "run",
    "causal_lm": "model",
    "input_format": "formats of INPUT and OUTPUT",
    "prefix": "text and tokens",
    "beam": "generation",
    "do_sample": "sampling",
    "reference_path": "scores",
}

# Of these only one is accepted at a time.
EXCLUSIVE = (
    ("quiet", "verbose"),
    ("without_fastgen_opt", "compare"),
    ("dtype", "fp16", "bf16"),
    ("truncation", "no_truncation"),
)


def flag(help: str, default: Any = None, **options: Any) -> Any:
    """A field that is a flag; `options` are those of argparse's add_argument, with `also` for a second name."""
    metadata = {"help": help, **options}
    if default == []:
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


def setting_flag(name: str, metavar: str, help: str, **options: Any) -> Any:
    """A flag that gives the setting `name` of generate."""
    return flag(help, **{"setting": name, "type": SETTINGS[name], "metavar": metavar, **options})


def switch(help: str, **options: Any) -> Any:
    """A flag without a value."""
    return flag(help, False, action="store_true", **options)


_NUMBER = whole_number(1)


@dataclass(frozen=True)
class RunConfig:
    """What the command line asks for. Names and meanings are those of the flags; `--help` says what each does."""

    model: str = flag("local folder, hub name, or demo for the model inside fastgen")
    input: Path = flag("UTF-8 text, one input per line; .gz is unpacked; - for standard input", type=file_or_stream)
    output: Path = flag("file to write; .gz is packed; - for standard output", type=file_or_stream)

    bs: int | None = flag("most inputs per batch (default: see --batch_tokens)", type=_NUMBER, metavar="N")
    batch_tokens: int | None = flag(
        "most source tokens per batch, padding and beams counted; without --bs nothing else limits a batch. "
        "Default, where neither is given: both, from the model's size and the machine's memory; the summary has them",
        type=_NUMBER,
        metavar="N",
    )
    window: int | None = flag(
        "lines that are read ahead and sorted by length, so that a batch has little padding (default: 16 batches; "
        "0: batches of lines as they stand in INPUT)",
        type=whole_number(0),
        metavar="N",
    )
    preprocess_workers: int = flag("workers that tokenise ahead (default: 1)", 1, type=_NUMBER, metavar="N")
    postprocess_workers: int = flag("workers that detokenise (default: 1)", 1, type=_NUMBER, metavar="N")
    n_obs: int | None = flag("only the first N lines (default: -1, all)", type=whole_number(1, unset=-1), metavar="N")
    resume: bool = switch("go on after the records that an earlier run left in OUTPUT.part")
    overwrite: bool = switch(
        "replace an OUTPUT, and a --score_path, that is there already (an OUTPUT.part never is: remove it)"
    )
    quiet: bool = switch("no progress on stderr, only what went wrong")
    verbose: bool = switch("also say how long each stage had nothing to do")
    without_fastgen_opt: bool = switch(
        "run the unchanged library, without fastgen's speed-ups", also="--without_fastseq_opt"
    )
    compare: bool = switch(
        "also run the unchanged library on every batch; print both speeds and how many outputs are equal"
    )

    causal_lm: bool = switch("MODEL is a decoder-only model (GPT-2, Llama, …)")
    task: str | None = flag(
        f"{', '.join(HEARING)}: each line of INPUT is the path of an audio file, for Whisper of any length (JSON has "
        f"times of segments, of short ones with --gen return_timestamps=true). {', '.join(SPEAKING)}: WAV files are "
        "written to the folder OUTPUT.audio, and OUTPUT lists them as JSON (audio: pip install soundfile soxr). "
        f"{TRANSLATION}: as without --task. Any other name: use the settings the model's config keeps for this task "
        "(task_specific_params), such as summarization or translation_en_to_de; flags given here win over them "
        "(default: none, unlike FastSeq, as in the library)",
        metavar="NAME",
    )
    device: str | None = flag("cpu, cuda, cuda:1, … (default: cuda where there is one, else cpu)", type=device_name)
    dtype: str | None = flag(
        "type of the weights (default: auto, as they are saved); float16 not on the CPU",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    fp16: bool = switch("the same as --dtype float16")
    bf16: bool = switch("the same as --dtype bfloat16")
    attn_implementation: str | None = flag(
        "how attention is computed: eager, sdpa, … (default: the library's choice)", metavar="NAME"
    )

    input_format: str | None = flag(
        "one text or one JSON object per line (default: jsonl where INPUT is a .jsonl or .jsonl.gz, else text)",
        choices=("text", "jsonl"),
    )
    text_field: str | None = flag(
        'field of a JSON object that holds the input (default: "text"); a.b is the field b of the object a, '
        "outputs.0.text the first output of an earlier run, outputs_1.0.text that of the run before",
        metavar="NAME",
    )
    id_field: str | None = flag("field of a JSON object that names it, for messages", metavar="NAME")
    output_format: str | None = flag(
        "one text per line, or one JSON object with the input's further fields, every output, its number of "
        "tokens and its score (default: jsonl where OUTPUT is a .jsonl or .jsonl.gz, else as --input_format)",
        choices=("text", "jsonl"),
    )
    join_outputs: bool = switch("several outputs per input on one line of text, joined with ####")
    output_sequence_scores: bool = switch(
        "in text, write SCORE<tab>TEXT: the beam's score (log-probability with length penalty) with six decimals, "
        "NA without beam search and for empty lines; several are joined with ####, like the texts",
    )

    prefix: str | None = flag("text put before every line that is not empty, such as 'summarize: '", metavar="TEXT")
    chat: bool = switch("put every line as a user's message into the tokenizer's chat template")
    system: str | None = flag("system message before each chat; needs --chat", metavar="TEXT")
    src_lang: str | None = flag("language of INPUT, as the model calls it: eng_Latn, en_XX, en, …", metavar="LANG")
    tgt_lang: str | None = flag("language of OUTPUT, as the model calls it", metavar="LANG")
    speaker_id: int | None = flag(
        "number of the voice that speaks, from 0 on, where MODEL has several", type=whole_number(0), metavar="N"
    )
    max_tokenizer_length: int | None = flag(
        "truncate inputs to N tokens; without it a line longer than the model's limit is a failed input. Of text "
        "of more than 262,144 characters (16 N, where that is more) only so many are read; without N it fails",
        type=_NUMBER,
        metavar="N",
    )
    truncation: bool = switch("truncate inputs to the model's limit, as FastSeq does")
    no_truncation: bool = switch("truncate nothing: lines longer than --max_tokenizer_length are failed inputs, too")
    padding: str | None = flag(
        "accepted for FastSeq's command lines: a batch is as wide as its longest input either way",
        choices=("max_length", "longest"),
    )
    return_tensors: str | None = flag("accepted for FastSeq's command lines", choices=("pt",))
    padding_side: str | None = flag(
        "default: left with --causal_lm, else the tokenizer's own", choices=("left", "right")
    )
    include_special_tokens: bool = switch("keep special tokens such as </s> in the output")
    clean_up_tokenization_spaces: bool = switch(
        "remove the spaces before punctuation that some tokenizers leave (default: the tokenizer's own setting)",
    )
    output_summaries_only: bool = switch(
        "leave the prompt out of the output of a causal LM; always so, accepted for FastSeq's command lines",
    )

    beam: int | None = setting_flag("num_beams", "N", "number of beams")
    max_gen_length: int | None = setting_flag(
        "max_length", "N", "longest output in tokens; with --causal_lm the prompt counts too"
    )
    max_new_tokens: int | None = setting_flag("max_new_tokens", "N", "most tokens to generate, without the prompt")
    min_gen_length: int | None = setting_flag(
        "min_length",
        "N",
        "shortest output in tokens; with --causal_lm the prompt counts too",
        type=whole_number(0, unset=-1),
    )
    no_repeat_ngram_size: int | None = setting_flag(
        "no_repeat_ngram_size", "N", "no N tokens in a row occur twice (0: off)"
    )
    repetition_penalty: float | None = setting_flag("repetition_penalty", "X", "penalty of repeated tokens (1.0: none)")
    length_penalty: float | None = setting_flag(
        "length_penalty", "X", "beam scores are divided by length to this power"
    )
    early_stopping: bool | str | None = setting_flag(
        "early_stopping",
        "WHEN",
        "when beam search stops: true (as soon as there are N finished beams), false (a better one is unlikely) "
        "or never (a better one is impossible)",
    )
    decoder_start_token_id: int | None = setting_flag(
        "decoder_start_token_id", "ID", "first token given to the decoder"
    )
    eos_token_id: int | None = setting_flag("eos_token_id", "ID", "token that ends an output")
    forced_bos_token: str | None = flag("token that every output starts with, as text", metavar="TOKEN")
    num_return_sequences: int | None = setting_flag("num_return_sequences", "N", "outputs per input")
    generation_config: dict[str, Any] | None = flag(
        "JSON file of generation settings (generation_config.json); what it leaves out stays the model's own, "
        "and flags win over it",
        type=json_file,
        metavar="FILE",
    )
    gen: list[tuple[str, Any]] = flag(
        "any further setting of transformers' GenerationConfig, or one for a model inside of a MODEL that speaks, with "
        "its name before it (text_num_beams); VALUE is JSON or else text; may be given again",
        [],
        type=setting,
        action="append",
        metavar="KEY=VALUE",
    )

    do_sample: bool = switch("sample instead of taking the most likely token", setting="do_sample")
    temperature: float | None = setting_flag("temperature", "X", "divides the logits; needs --do_sample")
    top_k: int | None = setting_flag("top_k", "N", "sample from the N likeliest tokens; needs --do_sample")
    top_p: float | None = setting_flag(
        "top_p", "P", "sample from the likeliest tokens that together have probability P; needs --do_sample"
    )
    seed: int | None = flag("seed of the random numbers, set before the first batch", type=whole_number(0), metavar="N")

    reference_path: Path | None = flag(
        "one reference per line of INPUT; prints ROUGE, BLEU, chrF and exact match (pip install "
        "rouge-score sacrebleu), and of speech the word error rate (pip install jiwer). Of several outputs per input "
        "the first is scored",
        type=Path,
        metavar="FILE",
    )
    reference_field: str | None = flag(
        "take the references from this field of the JSON records of --reference_path or, without it, of INPUT",
        metavar="NAME",
    )
    score_path: Path | None = flag("where to write these scores as JSON; needs references", type=Path, metavar="FILE")

    @property
    def hears(self) -> bool:
        """Whether INPUT names audio files."""
        return self.task in HEARING

    @property
    def speaks(self) -> bool:
        """Whether outputs are sounds."""
        return self.task in SPEAKING

    @property
    def reads_jsonl(self) -> bool:
        """Whether INPUT holds JSON records."""
        return self.input_format == "jsonl"

    @property
    def writes_jsonl(self) -> bool:
        """Whether OUTPUT does."""
        return self.output_format == "jsonl"

    def setting_flags(self) -> list[str]:
        """Every flag that gives a setting of generate, --gen included, as it was written."""
        return [*(flag for *_, flag in self.settings()), *(f"--gen {key}={value}" for key, value in self.gen)]

    def settings(self) -> list[tuple[str, Any, str]]:
        """Name and value of every setting of generate that a flag of its own gives, and that flag as it was written."""
        given = []
        for each in fields(self):
            value = getattr(self, each.name)
            if "setting" in each.metadata and value is not None and value is not False:
                given.append((each.metadata["setting"], value, f"--{each.name}" + f" {value}" * (value is not True)))
        return given

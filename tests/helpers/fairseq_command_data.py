"""A tiny corpus, its dictionaries, and models that fairseq trains for some updates, for tests of the commands."""

import json
import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode, get_encoder
from made_once import made_once
from python_process import run_python
from sacremoses import MosesDetokenizer

SPLITS = ("train", "valid", "test")
SIZES = (
    "--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2 "
    "--decoder-layers 1 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2"
)
TRAINING = "--cpu --optimizer adam --lr 0.01 --max-tokens 1000 --dropout 0 --no-epoch-checkpoints --no-progress-bar"

# fairseq's own command as it is under torch before 2.6, otherwise untouched.
UPSTREAM = """
import argparse, importlib, json, sys, torch
torch.serialization.add_safe_globals([argparse.Namespace])
for command, *sys.argv[1:] in json.loads(sys.argv[1]):
    importlib.import_module(f"fairseq_cli.{command}").cli_main()
"""


@dataclass(frozen=True)
class CommandData:
    """Folders and files: data of fairseq-preprocess, and checkpoints of fairseq-train.

    `raw` has the same data as text, `levenshtein` a model that refines; `encoded_data` has neither.
    """

    folder: Path
    flags: tuple[str, ...] = ()

    @property
    def generation(self) -> list[str]:
        """Arguments that translate the test set of 60 lines, and turn pieces of words into text."""
        model = self.folder / "model" / "checkpoint_last.pt"
        flags = ["--path", str(model), *"--cpu -s de -t en --max-len-b 20".split()]
        return [str(self.folder / "bin"), *flags, *self.flags]


def command_data(basetemp: Path) -> CommandData:
    """Builds it in about ten seconds, once in a run; no test may change its files. basetemp: see `made_once`."""
    return CommandData(made_once(basetemp, "fairseq-command", _make))


def _make(folder: Path) -> None:
    write_corpus(folder)
    refined = "--task translation_lev --arch levenshtein_transformer --criterion nat_loss --noise random_delete "
    refined += "--share-all-embeddings --encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 16 "
    refined += "--decoder-embed-dim 16 --encoder-attention-heads 2 --decoder-attention-heads 2 --max-update 2 "
    refined += "--cpu --optimizer adam --lr 0.01 --max-tokens 500 --no-epoch-checkpoints"
    dictionary = ["--srcdict", str(folder / "bin" / "dict.de.txt"), "--joined-dictionary"]
    raw = ["--dataset-impl", "raw", "--destdir", str(folder / "raw")]
    # The second training may get no checkpoint_best.pt: fairseq keeps the best loss of the first.
    upstream_all(
        *_preprocess_and_train(folder),
        ["preprocess", "-s", "de", "-t", "en", *_prefixes(folder), *dictionary, *raw],
        ["train", str(folder / "bin"), *refined.split(), "--save-dir", str(folder / "levenshtein")],
    )


def _prefixes(folder: Path, end: str = "") -> list[str]:
    return [f"--{split}pref={folder / split}{end}" for split in SPLITS]


def encoded_data(basetemp: Path, bpe: str) -> CommandData:
    """Returns the same data as plain text with letters of two bytes, in pieces of this `--bpe`."""
    folder = made_once(basetemp, f"fairseq-command-{bpe}", partial(_make_encoded, bpe))
    flags = (part for flag, file in ENCODINGS[bpe].files.items() for part in (flag, str(folder / file)))
    return CommandData(folder, flags=("--bpe", bpe, *flags))


def _make_encoded(bpe: str, folder: Path) -> None:
    write_corpus(folder)
    detokenizer = MosesDetokenizer("en")
    texts = {}
    for path in [folder / f"{split}.{language}" for split in SPLITS for language in ("de", "en")]:
        lines = path.read_text(encoding="utf-8").replace("@@ ", "").splitlines()
        texts[path] = [detokenizer.detokenize(line.split()).replace("o", "ö") for line in lines]
    encode = ENCODINGS[bpe].learn(folder, texts[folder / "train.de"] + texts[folder / "train.en"])
    for path, lines in texts.items():
        path.write_text("".join(f"{encode(line)}\n" for line in lines), encoding="utf-8")
    upstream_all(*_preprocess_and_train(folder))


def _preprocess_and_train(folder: Path) -> list[list[str]]:
    """Returns commands: every entry of the dictionary is a piece that a BPE can decode."""
    languages = "-s de -t en --joined-dictionary --padding-factor 1"
    model = ["--arch", "transformer", "--share-all-embeddings", "--max-update", "30", *SIZES.split()]
    return [
        ["preprocess", *languages.split(), *_prefixes(folder), "--destdir", str(folder / "bin")],
        ["train", str(folder / "bin"), *model, *TRAINING.split(), "--save-dir", str(folder / "model")],
    ]


def language_model_data(basetemp: Path) -> Path:
    """Trains a language model, once in a run; returns its folder, which no test may change."""
    return made_once(basetemp, "fairseq-language-model", _make_language_model)


def evaluation(folder: Path) -> list[str]:
    """Returns the arguments that evaluate the language model of this folder."""
    path = str(folder / "model" / "checkpoint_last.pt")
    return [str(folder / "bin"), "--path", path, "--cpu", *"--tokens-per-sample 32 --batch-size 4".split()]


def _make_language_model(folder: Path) -> None:
    write_corpus(folder)
    model = "--task language_modeling --arch transformer_lm --decoder-layers 1 --decoder-embed-dim 16 "
    model += "--decoder-ffn-embed-dim 32 --decoder-attention-heads 2 --tokens-per-sample 32 --max-update 10 "
    model += "--disable-validation --required-batch-size-multiple 1"
    save = ["--save-dir", str(folder / "model")]
    upstream_all(
        ["preprocess", "--only-source", *_prefixes(folder, ".en"), "--destdir", str(folder / "bin")],
        ["train", str(folder / "bin"), *model.split(), *TRAINING.split(), *save],
    )


def upstream(command: str, *args: str) -> subprocess.CompletedProcess:
    """Runs fairseq-COMMAND in a process of its own, without fastgen."""
    return upstream_all([command, *args])


def upstream_all(*commands: list[str]) -> subprocess.CompletedProcess:
    """Runs several in one process, which imports fairseq once."""
    done = run_python("-c", UPSTREAM, json.dumps(commands), OMP_NUM_THREADS="1")
    if done.returncode:
        raise AssertionError(f"{commands}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done


Encode = Callable[[str], str]


def learn_sentencepiece(folder: Path, lines: list[str]) -> Encode:
    """Trains a unigram model on these lines."""
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.set_random_generator_seed(0)
    prefix, size = str(folder / "pieces"), {"vocab_size": 60, "num_threads": 1}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_prefix=prefix, minloglevel=2, **size)
    pieces = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    return lambda line: " ".join(pieces.encode(line, out_type=str))


def learn_gpt2(folder: Path, lines: list[str]) -> Encode:
    """Writes an encoding of all bytes and of syllables, with and without a space before them; "ö" stays two bytes."""
    syllables = ("ka", "mi", "re", "su", "ak", "im", "er", "us")
    merges = [" ".join(syllable) for syllable in syllables] + [f"Ġ {syllable}" for syllable in syllables]
    symbols = [*bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in merges)]
    files = folder / "encoder.json", folder / "vocab.bpe"
    files[0].write_text(json.dumps({symbol: number for number, symbol in enumerate(symbols)}))
    files[1].write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    pieces = get_encoder(*map(str, files))
    return lambda line: " ".join(map(str, pieces.encode(line)))


@dataclass(frozen=True)
class Encoding:
    """An encoding. learn: writes its files into a folder; files: the flags that name them."""

    learn: Callable[[Path, list[str]], Encode]
    files: dict[str, str]


ENCODINGS = {
    "sentencepiece": Encoding(learn_sentencepiece, {"--sentencepiece-model": "pieces.model"}),
    "gpt2": Encoding(learn_gpt2, {"--gpt2-encoder-json": "encoder.json", "--gpt2-vocab-bpe": "vocab.bpe"}),
}


def write_corpus(folder: Path) -> None:
    """Writes lines as Moses and BPE leave them: escaped punctuation, and words in pieces."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    words = ["".join(draw.choices(["ka", "to", "mi", "re", "su", "no"], k=draw.randint(1, 3))) for _ in range(60)]
    marks = [",", ".", "!", "&apos;s", "(", ")", "&quot;", "&amp;"]
    for split, number in (("train", 200), ("valid", 20), ("test", 60)):
        lines = []
        for _ in range(number):
            lines.append([draw.choice(words if draw.random() < 0.85 else marks) for _ in range(draw.randint(2, 12))])
        for language, mapping in (("de", _pieces), ("en", lambda word: _pieces(_backwards(word)))):
            text = "".join(" ".join(map(mapping, line)) + "\n" for line in lines)
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8")


def _backwards(word: str) -> str:
    return word[::-1] if word.isalpha() else word


def _pieces(word: str) -> str:
    return f"{word[:3]}@@ {word[3:]}" if len(word) > 4 and word.isalpha() else word

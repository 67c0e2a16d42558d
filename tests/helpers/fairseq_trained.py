"""Two small models that fairseq's own commands train: a Transformer that translates, and a language model.

The language is made up of number, colour and thing: "Tom's two red boats, three cars and nine chairs." becomes "Toms
zwei rote Boote, drei Autos und neun Stühle." Half a minute is enough to learn it, and outputs end where they should,
after 4 to 30 tokens. Moses splits off punctuation and "'s"; a byte-level BPE like GPT-2's splits the words.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from made_once import made_once

NUMBERS = dict(
    zip("two three four five six seven eight nine".split(), "zwei drei vier fünf sechs sieben acht neun".split())
)
KINDS = dict(zip("red old small green new wooden".split(), "rote alte kleine grüne neue hölzerne".split()))
THINGS = dict(
    zip(
        "boats cars houses bridges apples chairs letters horses windows gardens".split(),
        "Boote Autos Häuser Brücken Äpfel Stühle Briefe Pferde Fenster Gärten".split(),
    )
)
OWNERS = {"Tom's": "Toms", "Anna's": "Annas", "Peter's": "Peters"}
SPLITS = {"train": 3600, "valid": 200, "test": 60}
BPE_WORDS = 350
# What the safe loader of torch 2.6 and later refuses to build in a checkpoint of fairseq 0.12: this, and nothing else.
REFUSED = ["argparse.Namespace"]

ENCODER = "--encoder-layers 2 --encoder-embed-dim 64 --encoder-ffn-embed-dim 128 --encoder-attention-heads 4"
DECODER = ENCODER.replace("encoder", "decoder")
TRAINING = (
    "--cpu --dropout 0 --optimizer adam --lr 0.005 --lr-scheduler inverse_sqrt --max-tokens 1500 --seed 1 "
    "--num-workers 0 --no-progress-bar --log-interval 100 --no-save-optimizer-state"
)
TRANSLATION = (
    f"--arch transformer {ENCODER} {DECODER} {TRAINING} --max-update 420 --warmup-updates 60 "
    "--criterion label_smoothed_cross_entropy --label-smoothing 0.1"
)
# Not `--sample-break-mode eos`: upstream's loader for that reads `numpy.compat`, which numpy 2 does not have.
LANGUAGE_MODEL = (
    f"--task language_modeling --arch transformer_lm {DECODER} {TRAINING} --max-update 130 --warmup-updates 40 "
    "--criterion cross_entropy --sample-break-mode complete --tokens-per-sample 96 --no-epoch-checkpoints"
)


@dataclass(frozen=True)
class Trained:
    """Files in one folder. Sources and references of the test set are `test.en` and `test.de`, one sentence a line."""

    folder: Path

    @property
    def data(self) -> Path:
        """What fairseq-preprocess made for translation: dictionaries, and train, valid and test en-de."""
        return self.folder / "data"

    @property
    def language_model_data(self) -> Path:
        return self.folder / "data-lm"

    @property
    def checkpoints(self) -> Path:
        """Of the translation: checkpoint_best.pt, checkpoint_last.pt and those of single epochs."""
        return self.folder / "checkpoints"

    @property
    def language_model_checkpoints(self) -> Path:
        return self.folder / "checkpoints-lm"

    @property
    def bpe(self) -> dict[str, str]:
        """The keywords of the hub interfaces."""
        names = {"gpt2_encoder_json": "vocab.json", "gpt2_vocab_bpe": "merges.txt"}
        return {"bpe": "gpt2"} | {key: str(self.folder / name) for key, name in names.items()}

    @property
    def flags(self) -> list[str]:
        """Of `fairseq-generate` and `fairseq-interactive`, for text as written and all of it.

        Moses with fairseq 0.12 needs the languages, or the command stops; and ve-fairseq 0.12.3 drops what is left over
        when the number of sentences is not a multiple of eight, or of another number that is asked for.
        """
        bpe = [part for key, value in self.bpe.items() for part in (f"--{key.replace('_', '-')}", value)]
        languages = ["--source-lang", "en", "--target-lang", "de"]
        return [*languages, "--tokenizer", "moses", *bpe, "--required-batch-size-multiple", "1"]

    @property
    def epochs(self) -> list[str]:
        """The names of the checkpoints of single epochs, the last one last."""
        numbers = sorted(
            int(path.stem.removeprefix("checkpoint")) for path in self.checkpoints.glob("checkpoint[0-9]*.pt")
        )
        return [f"checkpoint{number}.pt" for number in numbers]

    def lines(self, name: str) -> list[str]:
        return (self.folder / name).read_text(encoding="utf-8").splitlines()


def trained_once(basetemp: Path) -> Trained:
    """Takes half a minute, once in a run of pytest; basetemp: see `made_once`."""
    return Trained(made_once(basetemp, "fairseq-trained", _train))


def _train(folder: Path) -> None:
    write_corpus(folder)
    files = "--trainpref train.bpe --validpref valid.bpe --testpref test.bpe --source-lang en --target-lang de"
    files_of_one = "--only-source --trainpref train.bpe.en --validpref valid.bpe.en --testpref test.bpe.en"

    def train(suffix: str, files: str, flags: str) -> None:
        fairseq("preprocess", *files.split(), "--destdir", f"data{suffix}", cwd=folder)
        fairseq("train", f"data{suffix}", *flags.split(), "--save-dir", f"checkpoints{suffix}", cwd=folder)

    with ThreadPoolExecutor() as at_once:
        list(at_once.map(train, ("", "-lm"), (files, files_of_one), (TRANSLATION, LANGUAGE_MODEL)))


def sentence(draw: random.Random) -> tuple[str, str]:
    """A sentence of one to six parts, most have two, and its translation."""
    english, german = [], []
    for _ in range(min(1 + int(draw.expovariate(0.6)), 6)):
        words = [draw.choice(list(NUMBERS.items()))]
        if draw.random() < 0.2:
            words.insert(0, draw.choice(list(OWNERS.items())))
        if draw.random() < 0.5:
            words.append(draw.choice(list(KINDS.items())))
        words.append(draw.choice(list(THINGS.items())))
        english.append(" ".join(word for word, _ in words))
        german.append(" ".join(word for _, word in words))
    return listed(english, "and"), listed(german, "und")


def listed(parts: list[str], conjunction: str) -> str:
    return f" {conjunction} ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts) + "."


def write_corpus(folder: Path) -> None:
    """`train.en` and so on as written, `train.bpe.en` and so on as the models read them, and the BPE's two files."""
    from fairseq.data import encoders
    from tokenizers import ByteLevelBPETokenizer

    draw = random.Random(0)
    splits = {split: [sentence(draw) for _ in range(number)] for split, number in SPLITS.items()}
    learned = ByteLevelBPETokenizer()
    learned.train_from_iterator([text for pair in splits["train"] for text in pair], BPE_WORDS, show_progress=False)
    learned.save_model(str(folder))
    bpe = encoders.build_bpe(Namespace(**Trained(folder).bpe))
    for column, language in enumerate(("en", "de")):
        moses = encoders.build_tokenizer(Namespace(tokenizer="moses", source_lang=language, target_lang=language))
        for split, pairs in splits.items():
            texts = [pair[column] for pair in pairs]
            write_lines(folder / f"{split}.{language}", texts)
            write_lines(folder / f"{split}.bpe.{language}", [bpe.encode(moses.encode(text)) for text in texts])


def write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


# Upstream's commands cannot read upstream's checkpoints under torch 2.6 and later without this, see REFUSED.
_COMMAND = """
import argparse, runpy, sys, torch
if hasattr(torch.serialization, "add_safe_globals"):
    torch.serialization.add_safe_globals([argparse.Namespace])
command = sys.argv.pop(1)
sys.argv[0] = f"fairseq-{command}"
runpy.run_module(f"fairseq_cli.{command}", run_name="__main__")
"""


def fairseq(command: str, *args: str, cwd: Path | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The unpatched `fairseq-COMMAND args...` in a process of its own; AssertionError with its output if it fails."""
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND, command, *args],
        cwd=cwd,
        env=os.environ | {"FASTGEN_DISABLE": "1", "OMP_NUM_THREADS": "1"},
        input=stdin,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise AssertionError(f"fairseq-{command}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done

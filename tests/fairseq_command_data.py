"""A tiny corpus, its dictionaries and models that fairseq trained for some updates, for tests of the commands."""

from __future__ import annotations

import random
import subprocess
from dataclasses import dataclass
from pathlib import Path

from python_process import run_python

SIZES = (
    "--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2 "
    "--decoder-layers 1 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2"
)
TRAINING = "--cpu --optimizer adam --lr 0.01 --max-tokens 1000 --dropout 0 --no-epoch-checkpoints --no-progress-bar"

# fairseq's own command as it is under torch before 2.6; everything else about it is untouched.
UPSTREAM = (
    "import argparse, importlib, sys, torch; torch.serialization.add_safe_globals([argparse.Namespace]); "
    "importlib.import_module('fairseq_cli.' + sys.argv.pop(1)).cli_main()"
)


@dataclass(frozen=True)
class CommandData:
    """Folders and files: data of fairseq-preprocess, and checkpoints of fairseq-train."""

    folder: Path

    @property
    def generation(self) -> list[str]:
        """Arguments that translate the test set of 60 lines."""
        model = self.folder / "model" / "checkpoint_last.pt"
        return [str(self.folder / "bin"), "--path", str(model), *"--cpu -s de -t en --max-len-b 20".split()]


def make(folder: Path) -> CommandData:
    """Takes about ten seconds."""
    write_corpus(folder)
    languages = "-s de -t en --joined-dictionary"
    prefixes = [f"--{split}pref={folder / split}" for split in ("train", "valid", "test")]
    upstream("preprocess", *languages.split(), *prefixes, "--destdir", str(folder / "bin"))
    model = ["--arch", "transformer", "--share-all-embeddings", "--max-update", "30", *SIZES.split()]
    upstream("train", str(folder / "bin"), *model, *TRAINING.split(), "--save-dir", str(folder / "model"))
    return CommandData(folder)


def make_language_model(folder: Path) -> list[str]:
    """Arguments that evaluate a language model."""
    write_corpus(folder)
    prefixes = [f"--{split}pref={folder / split}.en" for split in ("train", "valid", "test")]
    upstream("preprocess", "--only-source", *prefixes, "--destdir", str(folder / "bin"))
    model = "--task language_modeling --arch transformer_lm --decoder-layers 1 --decoder-embed-dim 16 "
    model += "--decoder-ffn-embed-dim 32 --decoder-attention-heads 2 --tokens-per-sample 32 --max-update 10 "
    model += "--disable-validation --required-batch-size-multiple 1"
    save = ["--save-dir", str(folder / "model")]
    upstream("train", str(folder / "bin"), *model.split(), *TRAINING.split(), *save)
    path = str(folder / "model" / "checkpoint_last.pt")
    return [str(folder / "bin"), "--path", path, "--cpu", *"--tokens-per-sample 32 --batch-size 4".split()]


def upstream(command: str, *args: str, check: bool = True) -> subprocess.CompletedProcess:
    """fairseq-COMMAND in a process of its own, without fastgen."""
    done = run_python("-c", UPSTREAM, command, *args, OMP_NUM_THREADS="1")
    if check and done.returncode:
        raise AssertionError(f"fairseq-{command}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done


# fastgen's command with the model's part left to fairseq: what differs then is the pipeline, and nothing may.
PIPELINE_ONLY = (
    "import argparse, sys, torch; torch.serialization.add_safe_globals([argparse.Namespace]); "
    "from fastgen.cli.fairseq.generate import main; sys.exit(main())"
)


def write_corpus(folder: Path) -> None:
    """Lines as after Moses and BPE: escaped punctuation, and words in pieces."""
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

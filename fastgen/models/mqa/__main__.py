"""`python -m fastgen.models.mqa pool IN OUT --num_key_value_heads 1`: writes a saved model with fewer key heads.

Tests: tests/models/mqa/test_pooling.py
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import fastgen.models.mqa

# Files that `save_pretrained` writes; other files of the folder, such as the tokenizer's, are copied.
WEIGHTS = (".safetensors", ".bin", ".index.json")
CONFIGURATIONS = ("config.json", "generation_config.json")


def pool(source: Path, target: Path, num_key_value_heads: int) -> None:
    """Writes the model in folder `source` with fewer key heads to `target`, which appears when it is complete."""
    import transformers

    from fastgen.models.mqa.pooling import pool_kv_heads  # also registers fastgen's models with AutoConfig

    if target.exists():
        raise ValueError(f"OUT {target} exists already")
    config = transformers.AutoConfig.from_pretrained(source)
    name = (config.architectures or [None])[0]
    kind = getattr(transformers, name or "", None) or getattr(fastgen.models.mqa, name or "", None)
    if kind is None:
        raise ValueError(f"IN {source}: architectures={config.architectures} in config.json names no known model class")
    pooled = pool_kv_heads(kind.from_pretrained(source), num_key_value_heads)
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    pooled.save_pretrained(part)
    for file in source.iterdir():
        if file.is_file() and file.name not in CONFIGURATIONS and not file.name.endswith(WEIGHTS):
            shutil.copy2(file, part)
    part.rename(target)


def main(argv: list[str]) -> int:
    """Runs the command, and returns its exit status: 0, or 1 for an argument that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m fastgen.models.mqa", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="pool")
    command = commands.add_parser("pool", help="fewer key heads, each the mean of those that come to share it")
    command.add_argument("source", metavar="IN", type=Path, help="folder of a saved model")
    command.add_argument("target", metavar="OUT", type=Path, help="folder to write, which must not exist")
    command.add_argument("--num_key_value_heads", type=int, required=True, help="key heads of each attention layer")
    args = parser.parse_args(argv)
    try:
        pool(args.source, args.target, args.num_key_value_heads)
    except (OSError, ValueError) as error:
        print(f"python -m fastgen.models.mqa pool: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Copies of the installed transformers in which some lines are edited, for programs in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import transformers

LIBRARY = Path(transformers.__file__).parent


def edited(folder: Path, file: str, *replacements: tuple[str, str]) -> Path:
    """Creates a package `transformers` of links to the installed one, with a file of its own; returns its folder.

    Compiled modules are linked one by one: Python writes others, such as the edited one, beside the links.
    file: relative to the package. replacements: each old text must occur in it.
    """
    text = (LIBRARY / file).read_text(encoding="utf-8")
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new)
    source, target = LIBRARY, folder / "transformers"
    for part in Path(file).parts:
        target.mkdir(parents=True)
        for child in source.iterdir():
            if child.name not in (part, "__pycache__"):
                (target / child.name).symlink_to(child)
        (target / "__pycache__").mkdir()
        for compiled in (source / "__pycache__").glob("*.pyc"):
            if not compiled.name.startswith(f"{Path(part).stem}."):
                (target / "__pycache__" / compiled.name).symlink_to(compiled)
        source, target = source / part, target / part
    target.write_text(text, encoding="utf-8")
    return folder


def run(program: str, *folders: Path, **environ: str) -> str:
    """Runs a program with modules of these folders before the installed ones; returns what it prints."""
    paths = [*map(str, folders), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "always", **environ}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout

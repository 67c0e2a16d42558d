"""Tells `make` whether its virtual environment has fastgen installed from this checkout, as README's commands do too.

    python tools/is_installed.py setup.py csrc/*.cpp

Exits with 0 if this Python has an editable installation of the checkout that is newer than each of the files, and with
1 otherwise. Without it `make` would compile the kernels of a user's environment again.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTION = "fastgen-generate"


def is_installed(root: Path, files: list[Path]) -> bool:
    """Whether this Python has an editable installation of `root` that is newer than the files."""
    try:
        installed = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return False
    source = json.loads(installed.read_text("direct_url.json") or "{}")  # there is none for a package of an index
    if source.get("url") != root.as_uri() or not source.get("dir_info", {}).get("editable"):
        return False
    record = Path(str(installed.locate_file(f"fastgen_generate-{installed.version}.dist-info/RECORD")))
    return record.exists() and all(file.stat().st_mtime < record.stat().st_mtime for file in files)


if __name__ == "__main__":
    sys.exit(not is_installed(ROOT, [Path(name) for name in sys.argv[1:]]))

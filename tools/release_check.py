"""Shows that the version can be released: `make release-check`, or `make release-check TAG=v0.1.0` for a tag.

CHANGELOG.md has an entry for the version of fastgen, unless that is between two releases; if there is a tag, it names
the version, and the entry has a date. dist/ holds the sources and wheels of that version, and no others; links in the
metadata lead to the tag.
"""

from __future__ import annotations

import argparse
import re
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import fastgen  # noqa: E402

MAX_WHEEL_BYTES = 3_000_000
DISTRIBUTION = "fastgen_generate"


def changelog_problems(text: str, version: str, tag: str) -> list[str]:
    """Returns why the entries of a changelog and the tag, empty if there is none, do not fit the version."""
    if ".dev" in version:  # between two releases
        return [f"fastgen {version} is not a release (accepted: a version without .dev)"] if tag else []
    headings = re.findall(r"^## (\S+?), (.+)$", text, re.MULTILINE)
    if not headings or headings[0][0] != version:
        return [f"CHANGELOG.md begins with {headings[:1]} (accepted: an entry for {version})"]
    if not tag:
        return []
    problems = [] if tag == f"v{version}" else [f"the tag is {tag} (accepted: v{version})"]
    if not re.fullmatch(r"\d{1,2} [A-Z][a-z]+ 20\d\d", headings[0][1]):
        problems.append(f"CHANGELOG.md dates {version} {headings[0][1]!r} (accepted: a date, as 1 December 2026)")
    return problems


def distribution_problems(folder: Path, version: str) -> list[str]:
    """Returns why the files in the folder are not those of a release: one archive of sources, and small wheels."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    sources = f"{DISTRIBUTION}-{version}.tar.gz"
    wheel = re.compile(re.escape(f"{DISTRIBUTION}-{version}-py3-none-manylinux_2_28_") + r"(x86_64|aarch64)\.whl")
    wheels = [name for name in sizes if wheel.fullmatch(name)]
    problems = [f"{name} is none of {sources} and {wheel.pattern}" for name in sorted({*sizes} - {*wheels, sources})]
    problems += [] if sources in sizes else [f"{folder} has no {sources}"]
    problems += [] if wheels else [f"{folder} has no wheel"]
    return problems + [
        f"{name} has {sizes[name]} bytes (accepted: fewer than {MAX_WHEEL_BYTES})"
        for name in wheels
        if sizes[name] >= MAX_WHEEL_BYTES
    ]


def metadata_problems(archive: Path) -> list[str]:
    """Returns why the package index would not show the sources as it should: no addresses, links that lead nowhere."""
    with tarfile.open(archive) as sources:
        tests = [name for name in sources.getnames() if name.split("/")[1:2] == ["tests"]]
        text = sources.extractfile(f"{archive.name.removesuffix('.tar.gz')}/PKG-INFO").read().decode()
    problems = [f"{archive.name} has {name}, but not all that it needs" for name in tests[:1]]
    if relative := re.findall(r"\]\((?!https?:|#)([^)]+)\)", text):
        set_by = "GITHUB_SERVER_URL, GITHUB_REPOSITORY and GITHUB_REF_NAME, which setup.py reads, set by a workflow"
        problems.append(f"{archive.name} links to {relative[0]}, relative to nothing (accepted: {set_by})")
    return problems + ([] if "\nProject-URL: " in text else [f"{archive.name} has no addresses of the project"])


def main() -> None:
    """Prints each problem; the exit status is 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tag", default="", help="the tag that is released, such as v0.1.0")
    tag = parser.parse_args().tag
    problems = changelog_problems((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), fastgen.__version__, tag)
    problems += distribution_problems(ROOT / "dist", fastgen.__version__)
    problems += [problem for archive in (ROOT / "dist").glob("*.tar.gz") for problem in metadata_problems(archive)]
    is_release = ".dev" not in fastgen.__version__
    result = "can be released" if is_release else "is between two releases; its files are those of a release"
    print("\n".join(problems) or f"fastgen {fastgen.__version__} {result}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()

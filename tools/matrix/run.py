"""Runs the tests of tests/core.txt with other versions of Python, torch and transformers; `make matrix`.

    python tools/matrix/run.py            # all combinations, the results to results.json and docs/support.md
    python tools/matrix/run.py 3.12 ...   # only the named ones; the others keep their results

One thing changes at a time: Python with the newest of everything, transformers, torch. Each combination gets an
environment in .venv-matrix, which is removed afterwards. A combination that cannot be installed has a reason. If all
tests of a combination pass, the hosts' sources that they used are accepted: fastgen/optimizer/contracts.json.

The builds of torch on PyPI are for CUDA. If pip finds no other, one is used without CUDA's libraries
(cuda_stand_ins.py), and its version ends in +cu….
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks"), str(Path(__file__).parent)]

import cuda_stand_ins  # noqa: E402
from measure import describe_cpu  # noqa: E402

RESULTS = Path(__file__).parent / "results.json"
PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- make matrix -->\n", "<!-- end of make matrix -->\n"
ENVIRONMENT = ROOT / ".venv-matrix"
TOOLS = ["pytest", "pytest-randomly", "pytest-timeout", "hypothesis", "psutil"]
PACKAGES = ("torch", "transformers", "numpy")
# fairseq 0.12.2 has no wheel, and metadata that newer pips refuse; nothing here calls its torchaudio.
BUILDS_FAIRSEQ = ("pip<24.1", "setuptools<70", "wheel", "cython", "numpy<2")
FAIRSEQ_NEEDS = ("omegaconf<2.1", "hydra-core<1.1", "cffi", "regex", "sacrebleu", "bitarray")
REPORTED = """
import importlib.metadata as m, json, platform
names = {names}
print(json.dumps({{"python": platform.python_version()}} | {{n: m.version(n) for n in names}}))
"""


@dataclass(frozen=True)
class Combination:
    """Requirements for pip; the installed versions are in the results."""

    name: str
    python: str
    torch: str = "torch"
    transformers: str = "transformers"
    fairseq: str = ""  # its distribution's name


COMBINATIONS = (
    Combination("3.10", "3.10"),
    Combination("3.11", "3.11"),
    Combination("3.12", "3.12", fairseq="ve-fairseq"),
    Combination("3.13", "3.13"),
    Combination("3.14", "3.14"),
    Combination("transformers-5.0", "3.11", "torch==2.13.0", "transformers==5.0.*"),
    Combination("transformers-5.6", "3.11", "torch==2.13.0", "transformers==5.6.*"),
    Combination("transformers-5.12", "3.11", "torch==2.13.0", "transformers==5.12.*"),
    Combination("transformers-5.17", "3.11", "torch==2.13.0", "transformers==5.17.*"),
    Combination("transformers-newest", "3.11", "torch==2.13.0", fairseq="ve-fairseq"),
    # Its last release under its own name, for Python 3.10.
    Combination("fairseq-0.12.2", "3.10", "torch==2.13.0", fairseq="fairseq"),
    # The newest transformers needs a newer torch.
    Combination("torch-2.4", "3.11", "torch==2.4.*", "transformers==5.0.*"),
)


class CannotInstall(Exception):
    """Installing failed: the message is the last line of pip or venv."""


def call(*command: str | Path, **env: str) -> str:
    done = subprocess.run(command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise CannotInstall(next((line for line in lines if line.startswith("ERROR: ")), lines[-1]))
    return done.stdout


def install_torch(python: Path, wanted: str) -> str:
    """Installs torch, of NVIDIA's packages at most the runtime; returns "torch==version"."""
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    report = json.loads(call(*pip, "install", "--dry-run", "--no-deps", "--report", "-", wanted))
    metadata = report["install"][0]["metadata"]
    pinned = f"torch=={metadata['version']}"
    call(*pip, "install", "--no-deps", pinned)
    site_packages = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))").strip())
    if any(cuda_stand_ins.PACKAGES.match(f"Requires-Dist: {line}") for line in metadata["requires_dist"]):
        cuda_stand_ins.forget_requirements(site_packages)
        call(*pip, "install", "--no-deps", cuda_stand_ins.runtime(site_packages))
        cuda_stand_ins.write(site_packages)
    return pinned


def install(combination: Combination) -> Path:
    """Installs a combination; returns the Python of the environment."""
    interpreter = f"python{combination.python}"
    if shutil.which(interpreter) is None:
        raise CannotInstall(f"Python {combination.python} was not available")
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    call(interpreter, "-m", "venv", ENVIRONMENT, PYENV_VERSION=combination.python)  # for an interpreter of pyenv
    python = ENVIRONMENT / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    call(*pip, "--upgrade", "pip", "setuptools")
    torch = install_torch(python, combination.torch)
    if combination.fairseq == "fairseq":
        call(*pip, *BUILDS_FAIRSEQ)
        call(*pip, "--no-build-isolation", "--no-deps", "fairseq==0.12.2")
        call(*pip, *FAIRSEQ_NEEDS)
    extra = "transformers,fairseq" if combination.fairseq == "ve-fairseq" else "transformers"
    call(*pip, torch, combination.transformers, f"--editable=.[{extra}]", *TOOLS)
    if combination.fairseq == "ve-fairseq":
        call(python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchaudio")  # see FAIRSEQ in the Makefile
    return python


def run(combination: Combination) -> dict[str, Any]:
    """Returns a row: the exact versions, and how many tests passed, were skipped and failed; or `reason`."""
    row: dict[str, Any] = {"name": combination.name, "python": combination.python}
    row |= {"date": datetime.date.today().isoformat(), "cpu": describe_cpu()}
    try:
        python = install(combination)
    except CannotInstall as error:
        return row | {"reason": str(error)}
    names = [*PACKAGES, *filter(None, [combination.fairseq])]
    row |= json.loads(call(python, "-c", REPORTED.format(names=names)))
    row["fairseq"] = row.pop(combination.fairseq, None)
    # torch.__version__ names the build too: +cpu, +cu130.
    row["torch"] = call(python, "-c", "import torch; print(torch.__version__)").strip()
    environment = os.environ | {"FASTGEN_STRICT": "1", "OMP_NUM_THREADS": "1"}
    command = [python, "-m", "pytest", "-rfEs", "-p", "no:cacheprovider", "--write-contracts", "@tests/core.txt"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout, done.stderr, sep="\n")
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped|failed|error)", done.stdout)}
    if not counts:
        return row | {"reason": f"pytest ended with {done.returncode} and ran nothing"}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    return row | {"passed": counts.get("passed", 0), "skipped": counts.get("skipped", 0), "failed": failed}


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the table of docs/support.md: a line for each combination."""
    lines = ["| Python | torch | transformers | numpy | fairseq | passed | skipped | failed | date, CPU |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    rows_by_name = {row["name"]: row for row in rows}
    for combination in COMBINATIONS:
        row = rows_by_name.get(combination.name, {"python": combination.python, "reason": "not yet"})
        when = f"{row['date']}, {row['cpu']}" if "date" in row else ""
        if "reason" in row:
            why = f"not run with {combination.torch} and {combination.transformers}: {row['reason']}"
            lines.append(f"| {row['python']} | {why} | | | | | | | {when} |")
            continue
        cells = [*(row[name] or "–" for name in ("python", *PACKAGES, "fairseq")), row["passed"], row["skipped"]]
        lines.append(f"| {' | '.join(map(str, cells))} | {row['failed']} | {when} |")
    return "\n".join(lines) + "\n"


def write(rows: list[dict[str, Any]]) -> None:
    RESULTS.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + table(rows) + END + after, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(one.name for one in COMBINATIONS))
    names = parser.parse_args(arguments).names
    if unknown := set(names) - {one.name for one in COMBINATIONS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))} (accepted: {', '.join(one.name for one in COMBINATIONS)})")
    rows = {row["name"]: row for row in json.loads(RESULTS.read_text(encoding="utf-8"))} if RESULTS.exists() else {}
    for combination in COMBINATIONS:
        if not names or combination.name in names:
            rows[combination.name] = run(combination)
            print(rows[combination.name], flush=True)
            write([rows[one.name] for one in COMBINATIONS if one.name in rows])
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    return 1 if any(row.get("failed") for row in rows.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""`make gpu-check`: the checks that need a GPU, part by part, the most important first.

    python tools/gpu_check.py [PART …] [--out FOLDER] [--page FILE] [--seconds S]

A part is a list of cases. Each case is written to FOLDER/gpu-check.json as soon as it has ended; one that the file has,
of this GPU, versions, kernels and day, is not measured again. If a case raises, its error is written, the next cases
run, and the next call repeats it. The parts, and the seconds that each should take on an H200:

    smoke         40   kernels, a captured call of samples and of beams, and what has failed or might fail on a GPU
    profile       15   kernels of a captured step by their time (gpu_models.py)
    generate     160   models of real shape, stock, compiled and with fastgen (gpu_models.py)
    attention     50   errors and times of the ways to attend (gpu_attention.py)
    tests         70   captured steps and what can go wrong around them, kernels; FOLDER/tests.log
    parity       120   ten architectures with and without fastgen, in fp32 and bf16, in a process of its own
    rates         20   from what size on a shared prompt is faster (gpu_attention.py)
    sanitize      80   kernels under compute-sanitizer

It needs torch, transformers and what tests/helpers imports, and neither `make` nor an installed fastgen: a machine
without a network gets them with `make gpu-carry` (docs/gpu-checks.md). --seconds: no case begins later. --page writes
tables into a page. Ends with 1 if a case raises or fails, with 2 without a GPU. Not yet run as a whole on a GPU; its
dry run, with tiny shapes, has run on the stand-in for a GPU that the tests use.

Tests: tests/test_gpu_check.py, tests/optimizer/test_cuda_twin.py
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests" / "helpers")]

import gpu_attention  # noqa: E402
import gpu_models  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor  # noqa: E402

import fastgen  # noqa: E402
from fastgen.ops import kernels  # noqa: E402
from fastgen.testing import configured  # noqa: E402

FILE = "gpu-check.json"
SANITIZER = ["compute-sanitizer", "--error-exitcode", "1", "--report-api-errors", "no", "--tool", "memcheck"]
SECONDS = {"parity": 240, "tests": 240, "sanitize": 120}  # after which the process of a part is killed
BEGIN, END = "<!-- gpu-check: begin -->", "<!-- gpu-check: end -->"  # around what --page replaces
Cases = dict[str, Callable[[], Any]]
Results = dict[str, dict[str, Any]]


class Options(NamedTuple):
    """dry: whether shapes are tiny. folder: of results and logs."""

    dry: bool
    folder: Path = Path(".")


STEPS, ATTENTION = "test_captured_steps_cuda.py", "test_triton_attention_cuda.py"
SMOKE = (
    f"{STEPS}::test_tokens_of_cuda_graphs_are_those_of_the_library[llama-always-samples]",
    f"{STEPS}::test_tokens_of_cuda_graphs_are_those_of_the_library[bart-always-beams]",
    f"{STEPS}::test_steps_in_half_precision_are_cuda_graphs[llama-dtype1]",
    f"{STEPS}::test_beams_of_a_mixture_of_experts_are_not_captured_in_fp32",
    f"{STEPS}::test_calls_under_a_default_device_are_captured_steps[beams]",
    f"{STEPS}::test_other_threads_draw_numbers_during_a_capture",
    f"{STEPS}::test_a_failed_capture_warns_once_and_leaves_no_trace",
    f"{ATTENTION}::test_rows_of_a_mask_may_be_far_apart",
)
NOT_ON_TWIN = ("half_precision", ATTENTION)  # which rounds otherwise, and has no Triton


def environment(dry: bool) -> dict[str, Any]:
    """Returns what results depend on."""
    versions = {module.__name__: module.__version__ for module in (torch, transformers, fastgen)}
    states = {name: [str(kernel) for kernel in listed if kernel.device == "cuda"] for name, listed in kernels().items()}
    states = {name: listed for name, listed in states.items() if listed}
    day = time.strftime("%Y-%m-%d")
    return {"gpu": torch.cuda.get_device_name(), "date": day, "dry": dry, **versions, "kernels": states}


def smoke(options: Options) -> Cases:
    """Returns tests of tests/gpu, in this process."""
    tests = [test for test in SMOKE if not (options.dry and any(name in test for name in NOT_ON_TWIN))]
    return {test.partition("::test_")[2]: partial(_tested, test) for test in tests}


def _tested(test: str) -> dict[str, Any]:
    import pytest

    class Noting:
        text = ""

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed or report.skipped:
                self.text += f"{report.outcome}: {report.longreprtext[-400:]}"

    noting = Noting()
    command = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--rootdir", str(REPOSITORY)]
    with torch.enable_grad():
        status = pytest.main([*command, str(REPOSITORY / "tests" / "gpu" / test)], plugins=[noting])
    return {"status": int(status), "end": [noting.text or "passed"]}


NAMES = ("gpt2", "llama", "qwen3", "gemma2", "bloom", "bart", "m2m_100", "t5", "whisper", "mixtral")
DRY_NAMES = ("t5", "whisper")
# The largest differences of scores; in bf16 those of the first steps, which are within 0.05 on the twin of a GPU.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.2}


def parity(options: Options) -> Cases:
    """Returns what compares tiny models, see `_parity`; mixtures of experts last, which might harm the process."""
    names = DRY_NAMES if options.dry else NAMES
    return {f"{name}, {dtype}": partial(_parity, name, dtype) for name in names for dtype in TOLERANCES}


def _parity(name: str, dtype_name: str) -> dict[str, Any]:
    """Returns equal tokens, the largest difference of scores, and replayed steps, with prompts shared.

    Models, inputs and comparisons are those of the tests, in tests/helpers. In bf16 rounding decides between close
    tokens: they are counted, and only the scores of the first steps are compared.
    """
    from architecture_parity import MODES, measure
    from architectures import BY_NAME
    from parity import run_both
    from reports import capturing
    from tiny_models import lively

    dtype = getattr(torch, dtype_name)
    model = lively(BY_NAME[name].model()).to(dtype).cuda()
    inputs = {key: value.cuda() for key, value in BY_NAME[name].inputs().items()}
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    differences, equal, replayed = [], [], 0
    with configured(share="always"), capturing():
        for mode in MODES:
            scores = measure(model, inputs, mode, new_tokens=12 if dtype == torch.float32 else 2)
            differences.append(scores.largest_score_difference)
            stock, tokens, report = run_both(partial(_tokens, model, {**inputs, **MODES[mode]}))
            equal.append(torch.equal(stock, tokens))
            replayed += report.replays
    return {"equal": sum(equal), "of": len(equal), "difference": max(differences), "replayed": replayed}


def _tokens(model: torch.nn.Module, arguments: dict[str, Any]) -> Tensor:
    torch.manual_seed(1)
    return model.generate(**arguments, min_new_tokens=12, max_new_tokens=24)


# Captured steps and whatever can go wrong around them, and the kernels. `make test-gpu` runs the others too.
FILES = (STEPS, ATTENTION, "test_no_repeat_ngram_cuda.py", "test_checksums_cuda.py")


def tests(options: Options) -> Cases:
    """Returns what runs `FILES` of tests/gpu in eight processes, or one of their tests, and keeps their output."""
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "-p", "no:randomly", "-p", "no:cacheprovider"]
    if options.dry:
        command += ["-p", "cuda_twin", f"tests/gpu/{SMOKE[-2]}"]
    else:
        command += ["-n", "8", *(f"tests/gpu/{name}" for name in FILES)]
    return {"all": partial(_ended, command, 15, options.folder, "tests", FASTGEN_STRICT="1")}


def sanitize(options: Options) -> Cases:
    """Returns what runs the n-gram kernels under memcheck; its status is None if the tool is missing."""
    if not shutil.which(SANITIZER[0]):
        return {"n-gram kernels": lambda: {"status": None, "end": [f"{SANITIZER[0]} is not on the PATH"]}}
    command = [*SANITIZER, sys.executable, "tests/gpu/sanitize_no_repeat_ngram.py"]
    return {"n-gram kernels": partial(_ended, command, 5, options.folder, "sanitize")}


def _ended(command: list[str], lines: int, folder: Path, part: str, **environment: str) -> dict[str, Any]:
    """Runs a command, whose output goes to a log; returns its status and last lines.

    Raises subprocess.TimeoutExpired after `SECONDS`.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment
    log = folder / f"{part}.log"
    with log.open("w") as file:
        process = subprocess.run(
            command, cwd=REPOSITORY, env=environment, stdout=file, stderr=file, check=False, timeout=SECONDS[part]
        )
    return {"status": process.returncode, "end": log.read_text(errors="replace").splitlines()[-lines:]}


PARTS: dict[str, Callable[[Options], Cases]] = {
    "smoke": smoke,
    "profile": lambda options: gpu_models.profile(options.dry),
    "generate": lambda options: gpu_models.generate(options.dry),
    "attention": lambda options: gpu_attention.attention(options.dry),
    "tests": tests,
    "parity": parity,
    "rates": lambda options: gpu_attention.rates(options.dry),
    "sanitize": sanitize,
}


def run(names: Iterable[str], results: Results, options: Options, until: float = float("inf")) -> None:
    """Runs the cases of these parts that have not ended well, and writes all results to the file after each."""
    for name in names:
        done = results.setdefault(name, {})
        for case, measure in PARTS[name](options).items():
            if case in done and "error" not in done[case] and done[case].get("status", 0) == 0:
                continue
            begun = time.perf_counter()
            if begun > until:
                print(f"{name}: no time left for {case}", flush=True)
                return
            try:
                done[case] = measure()
            except Exception as error:
                traceback.print_exc()
                first_line = str(error).partition("\n")[0]  # torch's other lines say how to debug
                done[case] = {"error": f"{type(error).__name__}: {first_line}"}
            save(results, options.folder)
            print(f"{name}, {case}: {time.perf_counter() - begun:.0f} s", flush=True)


def save(results: Results, folder: Path) -> None:
    (folder / FILE).write_text(json.dumps(results, indent=2))


def run_apart(name: str, results: Results, options: Options, seconds: float) -> None:
    """Runs a part in a process of its own, which writes to the same file."""
    folder = options.folder
    command = [sys.executable, __file__, name, "--out", str(folder), "--in-process", *["--dry"] * options.dry]
    with (folder / f"{name}.log").open("w") as log:
        try:
            subprocess.run(command, stdout=log, stderr=log, check=False, timeout=min(SECONDS[name], seconds))
        except subprocess.TimeoutExpired as error:
            print(f"{name}: {error}", flush=True)
    results.update(json.loads((folder / FILE).read_text()))
    print(f"{name}: {len(results.get(name, {}))} cases, {name}.log", flush=True)


def failures(results: Results) -> list[str]:
    """Returns a message for each case that raised or failed, model without parity, and kernel less exact than stock's.

    In half precision stock's tokens are not expected: rounding decides between close ones.
    """
    messages = []
    for part, cases in results.items():
        for case, cell in cases.items() if part in PARTS else ():
            if "error" in cell:
                messages.append(f"{part}, {case}: {cell['error']}")
            elif cell.get("status"):
                messages.append(f"{part}, {case}: status {cell['status']}, {' '.join(cell['end'][-1:])}")
            elif part == "attention":
                messages += gpu_attention.failures(case, cell)
            elif part == "parity":
                dtype = case.rpartition(", ")[2]
                is_equal = cell["equal"] == cell["of"] or dtype != "float32"
                if not (is_equal and cell["difference"] <= TOLERANCES[dtype]):
                    messages.append(f"parity, {case}: {_parity_cell(cell)}")
            elif part == "generate":
                messages += _differences(case, cell)
    return messages


def _differences(name: str, ways: dict[str, Any]) -> list[str]:
    case = gpu_models.MODELS.get(name)
    messages = []
    if not ways[gpu_models.FASTGEN]["replayed"]:
        messages.append(f"generate, {name}: no step was captured")
    if case is not None and case.dtype == torch.float32:
        differ = {way: cell["equal_tokens"] for way, cell in ways.items() if cell["equal_tokens"] < 1}
        messages += [f"generate, {name}, {way}: {equal:.0%} of stock's tokens" for way, equal in differ.items()]
    return messages


def _parity_cell(cell: dict[str, Any]) -> str:
    return f"{cell['equal']} of {cell['of']}, {cell['difference']:.0e}, {cell['replayed']}"


def _model_cell(way: dict[str, Any]) -> str:
    times = f"{way['first_s']:.2f} s, {way['s']:.3f} s, {way['ms_per_step']:.2f} ms"
    return f"{times}, {way['equal_tokens']:.0%}, {way['replayed']}, {way['peak_mb']:.0f} MB"


def _rates_cell(cell: float | None) -> str:
    return "never" if cell is None else f"{cell:.3g}"


TABLES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "generate": (
        "Seconds of a first and of a later call, milliseconds of a step, the share of tokens that equal stock's, "
        "replayed steps, and memory that a call adds:",
        _model_cell,
    ),
    "attention": (
        "Attention of one layer in a CUDA graph, µs, and its relative error against fp64:",
        lambda way: f"{way['us']:.0f}, {way['error']:.1e}",
    ),
    "rates": (
        "MB that a prompt stored once must save in a layer, as measured and according to the rates of an H200:",
        _rates_cell,
    ),
}


def page(results: Results) -> Iterator[str]:
    """Yields the lines of Markdown that say what was measured."""
    facts = results["environment"]
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "transformers", "fastgen"))
    what = "A dry run with tiny shapes, whose figures say nothing" if facts["dry"] else "`make gpu-check`"
    yield f"{what}: {facts['gpu']}, {facts['date']}, {versions}."
    listed = "; ".join(f"{name} ({', '.join(states)})" for name, states in facts["kernels"].items())
    yield from ("", f"Kernels: {listed}.")
    for part in filter(results.get, PARTS):
        ended = {case: cell for case, cell in results[part].items() if "error" not in cell}
        if part in TABLES and ended:
            title, cell_of = TABLES[part]
            yield from ("", title, "", *_table(ended, cell_of))
        elif part == "profile":
            for case, rows in ended.items():
                yield from ("", f"Kernels of a captured step, {case}: {rows['us_of_a_step']:.0f} µs", "")
                yield from _table({f"`{name}`": row for name, row in rows.items() if isinstance(row, dict)}, _number)
        elif part == "parity" and ended:
            yield from ("", "Tiny models: ways with the tokens of stock, difference of scores, replayed steps:", "")
            yield from _table({case: {"fastgen": cell} for case, cell in ended.items()}, _parity_cell)
        elif part in ("smoke", "tests", "sanitize"):
            for case, cell in ended.items():
                outcome = "not run" if cell["status"] is None else f"status {cell['status']}"
                yield from ("", f"{part}, {case}: {outcome}, `{' '.join(cell['end'][-1:])}`")
        for case, cell in results[part].items():
            if "error" in cell:
                yield from ("", f"{part}, {case}: not ended, `{cell['error']}`")


def _number(value: float) -> str:
    return f"{value:.1f}"


def _table(rows: dict[str, dict[str, Any]], cell: Callable[[Any], str]) -> Iterator[str]:
    columns = list(dict.fromkeys(way for ways in rows.values() for way in ways))
    yield f"| | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for name, ways in rows.items():
        yield f"| {name} | {' | '.join(cell(ways[way]) if way in ways else '' for way in columns)} |"


def write_page(path: Path, results: Results) -> None:
    """Replaces the part of a page between the two marks; a page that is not there holds nothing else."""
    before, _, rest = (path.read_text(encoding="utf-8") if path.exists() else "").partition(BEGIN)
    lines = [before + BEGIN, "", *page(results), "", END + rest.partition(END)[2]]
    path.write_text("\n".join(lines).rstrip("\n") + "\n", encoding="utf-8")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--out", type=Path, default=Path("."), help="the folder of results and logs")
    parser.add_argument("--page", type=Path, help="the page to write what was measured into")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no case begins later")
    parser.add_argument("--dry", action="store_true", help="tiny shapes and one test, to see that each part runs")
    parser.add_argument("--in-process", action="store_true", help="no part gets a process of its own")
    flags = parser.parse_args(arguments)
    if unknown := set(flags.parts) - PARTS.keys():
        parser.error(f"PART {', '.join(sorted(unknown))} (accepted: {', '.join(PARTS)})")
    return flags


def main(arguments: list[str] | None = None) -> int:
    flags, begun = parsed(arguments), time.perf_counter()
    if not torch.cuda.is_available():
        print("torch finds no GPU: nothing was checked", file=sys.stderr)
        return 2
    transformers.logging.set_verbosity_error()  # about lengths that Whisper is given twice
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("highest")
    flags.out.mkdir(parents=True, exist_ok=True)
    options, file = Options(flags.dry, flags.out), flags.out / FILE
    results = json.loads(file.read_text()) if file.exists() else {}
    present = environment(flags.dry)
    if results.get("environment") != present:
        results = {"environment": present}
    save(results, flags.out)
    for name in flags.parts or PARTS:
        if name == "parity" and not flags.in_process:
            run_apart(name, results, options, flags.seconds - (time.perf_counter() - begun))
        else:
            run([name], results, options, begun + flags.seconds)
    print("\n".join(page(results)))
    if flags.page is not None:
        write_page(flags.page, results)
    for message in (messages := failures(results)):
        print(f"FAILED: {message}", file=sys.stderr)
    return bool(messages)


if __name__ == "__main__":
    sys.exit(main())

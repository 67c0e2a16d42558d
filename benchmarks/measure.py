"""Shared by all benchmarks: calls in turns, their seconds and memory, facts of the machine, floors, files of results.

A *way* is one of the means to do the same work: "stock" (the unpatched library in this process), "fastgen", a peer.
All ways run directly after each other in each turn, and the first of a turn rotates. Seconds are medians; a ratio is
the median over the turns of the seconds of another way by those of fastgen, so that 2.0 means twice as fast.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fastgen
from fastgen.optimizer.decoding.timing import PROC, peak_memory

L3_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
PACKAGES = ("torch", "transformers", "ve-fairseq", "fairseq", "ctranslate2", "lm_eval", "ray")

Seconds = dict[str, float]
Tokens = list[list[int]]
Ways = dict[str, Callable[[], Any]]
Floors = Mapping[str, Mapping[str, float]]


class Answer(NamedTuple):
    """The result of a way that measures itself, in its own process: seconds, and the new tokens of each row."""

    seconds: float
    tokens: Tokens


class UsageError(Exception):
    """A flag is refused: the message names it and the accepted values."""


class PeerError(Exception):
    """A peer has no figure: the message says why."""


@dataclass(frozen=True)
class Options:
    """How to measure. against: names of peers; pause: seconds before a call."""

    repeats: int = 3
    device: str = "cpu"
    dtype: str = "float32"
    cpu_time: bool = False
    against: tuple[str, ...] = ()
    pause: float = 0.0

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def clock(self) -> float:
        """Returns seconds: CPU time of this process with `cpu_time`, otherwise of the clock."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.process_time() if self.cpu_time else time.perf_counter()


def with_and_without(call: Callable[..., Any]) -> Ways:
    """Returns this call as "fastgen" and, with the library's own functions, as "stock"."""
    return {"fastgen": call, "stock": fastgen.disabled()(call)}


def warm_up(ways: Ways, options: Options, reasons: dict[str, str]) -> dict[str, float]:
    """Calls each way once; returns the megabytes that each way in this process adds, if the system says so."""
    added = {}
    for way in [*ways]:
        torch.manual_seed(0)
        returned: list[Any] = []
        try:
            memory = peak_memory(lambda way=way, returned=returned: returned.append(ways[way]()))
        except PeerError as error:
            reasons[way] = str(error)
            del ways[way]
            continue
        if memory is not None and not isinstance(returned[0], Answer):
            added[way] = memory / 1e6
    return added


def in_turns(
    ways: Ways, repeats: int, options: Options, reasons: dict[str, str]
) -> Iterator[tuple[Seconds, dict[str, Any]]]:
    """Yields the seconds and results of all ways in each turn; a peer that fails is left out, with its reason."""
    for turn in range(repeats):
        seconds, returned, names = {}, {}, [*ways]
        first = turn % len(names)
        for way in names[first:] + names[:first]:
            time.sleep(options.pause)
            torch.manual_seed(turn)
            begun = options.clock()
            try:
                returned[way] = ways[way]()
            except PeerError as error:
                reasons[way] = str(error)
                del ways[way]
                continue
            seconds[way] = options.clock() - begun
            if isinstance(returned[way], Answer):
                seconds[way], returned[way] = returned[way]
        yield seconds, returned


def compare(
    ways: Ways,
    options: Options,
    are_equal: Callable[[Any, Any], bool] = torch.equal,
    after: Callable[[], object] = bool,
    reasons: dict[str, str] | None = None,
    repeats: int | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Warms all ways up and measures them; returns the figures, and the output of each way in the last turn.

    are_equal: compares the outputs of stock and fastgen in each turn. after: called after each turn. reasons: receives
    why peers have no figure.
    """
    reasons = {} if reasons is None else reasons
    added, turns, equal = warm_up(ways, options, reasons), [], True
    returned: dict[str, Any] = {}
    for seconds, returned in in_turns(ways, repeats or options.repeats, options, reasons):
        turns.append(seconds)
        equal = equal and are_equal(returned["stock"], returned["fastgen"])
        after()
    turns = [{way: turn[way] for way in ways} for turn in turns]
    return {**statistics_of(turns), "added_mb": added, "equal": equal}, returned


def statistics_of(turns: Sequence[Seconds], ours: str = "fastgen") -> dict[str, Any]:
    """Returns the medians of each way, every turn, and the ratios of other ways to `ours`."""
    return {
        "seconds": medians(turns),
        "turns": {way: [turn[way] for turn in turns] for way in turns[0]},
        "ratios": {way: statistics.median(turn[way] / turn[ours] for turn in turns) for way in turns[0] if way != ours},
    }


def medians(turns: Sequence[Seconds]) -> Seconds:
    """Returns the median of each stage, or of each way."""
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


class Clock:
    """Seconds of each stage since `start`, without those of stages inside of it."""

    def __init__(self, options: Options, rest: str) -> None:
        """rest: the name of the time between stages."""
        self.options, self.rest = options, rest
        self.start()

    def start(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._name, self._since = self.rest, self.options.clock()

    def stop(self, total: str) -> Seconds:
        """Returns the seconds of all stages, and their sum as `total`."""
        self._enter(self.rest)
        return dict(self.seconds) | {total: self.seconds.total()}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a stage. Also a decorator, which is Python's own: fastgen leaves models with replaced methods alone."""
        before = self._enter(name)
        try:
            yield
        finally:
            self._enter(before)

    def _enter(self, name: str) -> str:
        now = self.options.clock()
        self.seconds[self._name] += now - self._since
        before, self._name, self._since = self._name, name, now
        return before


def cpu() -> dict[str, str]:
    """Returns name, family, model and l3 ("32768K"): virtual machines name all CPUs of one maker alike."""
    if not (PROC / "cpuinfo").exists():
        return {"name": platform.processor() or platform.machine()}
    first = (PROC / "cpuinfo").read_text().split("\n\n")[0]
    lines = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    fields = {"name": "model name", "family": "cpu family", "model": "model"}
    facts = {name: lines[field] for name, field in fields.items() if field in lines}
    return facts | ({"l3": L3_SIZE.read_text().strip()} if L3_SIZE.exists() else {})


def describe_cpu() -> str:
    """Returns a line like "AMD EPYC, family 25, model 1, l3 32768K"."""
    facts = cpu()
    return ", ".join([facts.pop("name", platform.machine()), *(f"{key} {value}" for key, value in facts.items())])


def commit() -> str:
    """Returns the name of the checkout's commit, with a "+" where files other than results and docs differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs")
    return git("describe", "--always", "--exclude=*") + "+" * bool(changed)


def versions() -> dict[str, str]:
    """Returns the version of Python, and of those packages that are installed."""
    numbers = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            numbers[package] = version(package)
        except PackageNotFoundError:
            continue
    return numbers


def head(device: str) -> dict[str, Any]:
    """Returns the machine and the versions, for a file of results."""
    gpu = {"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}
    threads = torch.get_num_threads()
    return {"cpu": cpu(), **gpu, "threads": threads, "versions": versions(), "commit": commit()}


def read_floors(path: str | None, kind: str, device: str, names: Collection[str]) -> Floors:
    """Returns the floors of a kind of cases, none without a file; raises UsageError for an unknown case."""
    if path is None:
        return {}
    try:
        section = kind if device == "cpu" else f"{kind} {device}"
        floors = json.loads(Path(path).read_text(encoding="utf-8")).get(section, {})
    except (OSError, ValueError) as error:
        raise UsageError(f"--floors {path}: {error}") from error
    if unknown := sorted(set(floors) - set(names)):
        raise UsageError(f"--floors {path}: {section} {unknown[0]!r}: choose from {', '.join(names)}")
    return floors


def failures(result: Mapping[str, Any], floors: Floors) -> list[str]:
    """Returns a sentence for each ratio of a result that is below its floor, and if outputs differ."""
    case, ratios = result["case"], dict(result["ratios"])
    if added := result.get("added_mb"):
        ratios["memory"] = added["stock"] / max(added["fastgen"], 1)
    below = [
        f"{case}: {ratios[name]:.2f} against {name}, below the floor of {floor:.2f}"
        for name, floor in floors.get(case, {}).items()
        if name in ratios and ratios[name] < floor
    ]
    return below + ([] if result["equal"] else [f"{case}: outputs differ"])

"""Reports, which `fastgen.explain()` returns: what one `generate` shared, which kernels ran, what was not done and why.

A report describes; nothing reads it to decide. Reasons have a code for tests, programs and documentation, declared in
fastgen/reasons.py, and a text for people.

Tests: tests/optimizer/test_report.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from fastgen import ops
from fastgen.ops.kernel import Kernel
from fastgen.reasons import CHOSEN, CODES, counted

# The parts of a call that reasons refer to.
PATCHES = "patches"
CALL = "call"
PREFILL = "prompt sharing"
PREFIX = "common prefix"
KEPT = "kept prefix"
KV_CACHE = "KV cache"
LOOP = "decoding loop"
STEPS = "decode steps"
DRAFTS = "drafts"
COMPACTION = "finished inputs"
NGRAMS = "n-gram blocking"
ALLOWED = "allowed tokens"
VOCODER = "vocoder"

# The kinds of calls, and in words what a report of each is about.
GENERATE, SCORING = "generate", "scoring"
KINDS = {GENERATE: "call of `generate`", SCORING: "scoring of texts"}

# Prefixes of names among the kernels: of replayed steps, and of operations that materialized shared keys.
REPLAY, MATERIALIZED = "decode step, ", "materialized: "


@dataclass(frozen=True)
class Reason:
    """A reason why something was not done.

    code: the kind of reason, in capitals. text: a clause without a full stop. detail: numbers with units.
    """

    code: str
    text: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.detail})" if self.detail else self.text

    @property
    def is_decision(self) -> bool:
        """Whether fastgen could have done it and chose not to, because nothing is gained or the user said so."""
        return self.code in CODES[CHOSEN]


LAYER_EMPTY = Reason("LAYER_EMPTY", "a layer of the cache is empty")
MODEL_CHANGED = Reason("MODEL_CHANGED", "user code has changed the model during the call")

# Texts of several tables.
MODES = "a TorchDispatchMode, TorchFunctionMode or functorch transform is active"
NOT_EMPTY = "the cache is not empty"


def that_hold(*rows: tuple[str, str, Any] | list[Reason]) -> list[Reason]:
    """Returns the reasons that hold; the rows of the table are code, text and condition, or reasons of another table.

    If the condition is a list, each item gives a reason, whose text has the item in place of `{}`.
    """
    reasons: list[Reason] = []
    for row in rows:
        if isinstance(row, list):
            reasons += row
        elif (condition := row[2]) and isinstance(condition, list):
            reasons += [Reason(row[0], row[1].format(item)) for item in condition]
        elif condition:
            reasons.append(Reason(row[0], row[1]))
    return reasons


Function = TypeVar("Function", bound=Callable[..., Any])

# The functions that return reasons, with the parts of a call that they are for. The documentation lists them.
CHECKS: list[tuple[Any, tuple[str, ...]]] = []


def check(*parts: str) -> Callable[[Function], Function]:
    """Registers a function that returns or raises reasons against these parts of a call; codes are its constants."""

    def register(function: Function) -> Function:
        CHECKS.append((function, parts))
        return function

    return register


class LeaveAlone(Exception):
    """Leaves the work to the library: each patch catches this at one point, reports `reasons`, and calls the original.

    A `DecodeStep` catches it if keys and values do not fit a static cache; its steps then run eagerly.
    """

    def __init__(self, reasons: Sequence[Reason]) -> None:
        super().__init__(*map(str, reasons))
        self.reasons = reasons


def leave_alone_for(reasons: Sequence[Reason]) -> None:
    """Raises LeaveAlone if there are reasons."""
    if reasons:
        raise LeaveAlone(reasons)


@dataclass
class Stage:
    """A part of a call, such as the encoder.

    seconds: by the host's clock, which does not wait for a GPU. report: of a stage that is itself a call of `generate`.
    """

    name: str
    seconds: float
    report: Report | None = None


@dataclass(repr=False)
class Report:
    """The report of one call of a host's `generate`.

    inputs, rows: 0 until the prefill has run. shared: what was computed or stored once per input, in words. not_done:
    what was not done, as pairs of a part of the call and a `Reason`. kernels: the number of calls of each kernel of
    fastgen, and of each operation that materialized shared keys (`MATERIALIZED` and its name). stages: the parts of the
    call, if known. drafted, accepted: tokens that were checked as drafts, and those of them that were generated;
    steps_saved: the forwards that were not needed then. has_steps: whether it generates; false if it only scores texts.
    """

    model: str
    inputs: int = 0
    rows: int = 0
    shared: list[str] = field(default_factory=list)
    not_done: list[tuple[str, Reason]] = field(default_factory=list)
    kernels: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    stages: list[Stage] = field(default_factory=list)
    prefix_length: int = 0
    prefix_tokens_saved: int = 0
    prefix_tokens_kept: int = 0
    drafted: int = 0
    accepted: int = 0
    steps_saved: int = 0
    has_steps: bool = True

    def set_prefix(self, length: int, saved: int, reused: int = 0, groups: int = 1) -> None:
        """Adds that all inputs begin with `length` equal tokens, which were computed once or not at all.

        saved: the number of tokens that were not computed. reused: the first tokens of the prefix, whose keys and
        values an earlier call had kept. groups: the number of sets of inputs with prefixes of at most `length` tokens.
        """
        self.prefix_length, self.prefix_tokens_saved, self.prefix_tokens_kept = length, saved, reused
        whose = "all inputs" if groups == 1 else f"the inputs in each of {groups} groups"
        text = f"common prefix: {counted(length, 'token')} of {whose}, {saved} not computed"
        self.shared.append(text + (f", {reused} kept from an earlier call" if reused else ""))

    @property
    def kind(self) -> str:
        """The kind of the call, one of `KINDS`."""
        return GENERATE if self.has_steps else SCORING

    @property
    def unused_kernels(self) -> dict[str, str]:
        """The kernels of fastgen that did not run, and why; an operation none of whose kernels ran is one item."""
        unused = {}
        for operation, implementations in ops.kernels().items():
            kernels = [kernel for kernel in implementations if kernel.counted_as]
            ran = [kernel for kernel in kernels if not self.kernels.keys().isdisjoint(kernel.counted_as)]
            if kernels and not ran:
                unused[operation] = _why_not(kernels[-1])  # the one with the fewest conditions
            for index, kernel in enumerate(kernels if ran else ()):
                if kernel not in ran:
                    comes_later = index > kernels.index(ran[0]) and not kernel.unsupported_reasons()
                    reason = f"{ran[0].name} comes first" if comes_later else _why_not(kernel)
                    unused[f"{operation} ({kernel.name})"] = reason
        return unused

    def add_reasons(self, part: str, reasons: Iterable[Reason]) -> None:
        """Adds reasons why this part of the call was not done, each once."""
        for reason in reasons:
            if (part, reason) not in self.not_done:
                self.not_done.append((part, reason))

    def set_patches(self, switched_off: Mapping[str, str], why_none: str) -> None:
        """Sets what holds now, after the call: groups that are switched off, and, if no patch is active, why."""
        self.not_done = [(part, reason) for part, reason in self.not_done if part != PATCHES]
        if why_none:
            self.add_reasons(PATCHES, [Reason("NO_PATCH", f"calls after this one do not use fastgen: {why_none}")])
        for group, reason in switched_off.items():
            text = f"{group} is switched off until fastgen.enable(): {reason}"
            self.add_reasons(PATCHES, [Reason("SWITCHED_OFF", text)])

    def codes(self, part: str | None = None) -> set[str]:
        """Returns the codes of all reasons, or of one part of the call."""
        return {reason.code for about, reason in self.not_done if part in (None, about)}

    @property
    def fallbacks(self) -> list[str]:
        """What was left to the library because fastgen cannot do it, in words."""
        return [f"{part}: {reason}" for part, reason in self.not_done if not reason.is_decision]

    @property
    def decisions(self) -> list[str]:
        """What fastgen chose not to do because nothing is gained or the user said so, in words."""
        return [f"{part}: {reason}" for part, reason in self.not_done if reason.is_decision]

    @property
    def verdict(self) -> str:
        """One line: steps saved by drafts, and whether steps were captured and prompts shared, and if not, why."""
        if any(stage.report is not None for stage in self.stages):
            return f"{len(self.stages)} stages"
        if not self.rows and not self.shared:
            return "; ".join(self.fallbacks + self.decisions) or "; ".join(self._done()) or "nothing done"
        loop = self.reason_for(LOOP)
        why_eager = None if self.replays else self.reason_for(STEPS) or loop
        why_alone = self.reason_for(PREFILL) or (None if self.shared else loop)
        done = ["prompts"] if why_alone is None and self.rows > self.inputs else []
        done += [f"a prefix of {counted(self.prefix_length, 'token')}"] if self.prefix_length else []
        if not done and why_eager is not None and why_eager == why_alone:
            return f"decode steps not captured, prompts not shared: {why_alone.text}"
        steps = "decode steps " + ("captured" if self.replays else "not captured")
        steps += "" if why_eager is None else f": {why_eager.text}"
        if done:
            prompts = " and ".join(done) + (" shared" if self.rows > 1 else " reused")
        else:
            prompts = "prompts not shared: " + ("one row per input" if why_alone is None else why_alone.text)
        parts = [steps, prompts] if self.has_steps else [prompts]
        if self.steps_saved:
            parts.insert(0, f"drafts saved {counted(self.steps_saved, 'step')}")
        return "; ".join(parts)

    def reason_for(self, part: str) -> Reason | None:
        """Returns the first reason why this part of the call was not done, or None."""
        for about, reason in self.not_done:
            if about == part:
                return reason
        return None

    @property
    def replays(self) -> int:
        """The number of decode steps that were replays of a captured step."""
        return sum(calls for name, calls in self.kernels.items() if name.startswith(REPLAY))

    def as_dict(self) -> dict[str, Any]:
        """Returns the report for JSON: strings, numbers, and lists and dictionaries of them."""
        names = ["verdict", "model", "inputs", "rows", "prefix_length", "prefix_tokens_saved", "prefix_tokens_kept"]
        names += ["drafted", "accepted", "steps_saved"]
        names += ["unused_kernels", "fallbacks", "decisions", "seconds"]
        return {name: getattr(self, name) for name in names} | {
            "shared": list(self.shared),
            "replayed_steps": self.replays,
            "kernels": dict(sorted(self.kernels.items())),
            "reasons": [
                {"part": part, **vars(reason), "decision": reason.is_decision}  # code, text, detail
                for part, reason in self.not_done
            ],
            "stages": [
                {"name": stage.name, "seconds": stage.seconds}
                | ({"report": stage.report.as_dict()} if stage.report is not None else {})
                for stage in self.stages
            ],
        }

    def __repr__(self) -> str:
        lines = [self.verdict, f"  {self._call()}" + (f", {self.seconds:.3f} s" if self.seconds else "")]
        for stage in self.stages:
            lines.append(f"  stage: {stage.name}, {stage.seconds:.3f} s")
            if stage.report is not None:
                lines += [f"    {line}" for line in repr(stage.report).splitlines()]
        lines += [f"  {item}" for item in self._done()]
        if self.verdict != "; ".join(self.fallbacks + self.decisions):
            lines += [f"  left to the library: {item}" for item in self.fallbacks]
            lines += [f"  not worthwhile: {item}" for item in self.decisions]
        return "\n".join(lines)

    def summary(self) -> str:
        """Returns the call in one line."""
        return "; ".join([f"{self._call()}: {self.verdict}", *self._done()])

    def _done(self) -> list[str]:
        saved = counted(self.steps_saved, "step")
        drafts = f"drafts: {counted(self.drafted, 'token')} checked, {self.accepted} right, {saved} saved"
        done = [*self.shared, *([drafts] if self.drafted else [])]
        return [*done, *(f"{name}: {counted(calls, 'call')}" for name, calls in sorted(self.kernels.items()))]

    def _call(self) -> str:
        rows = f": {counted(self.inputs, 'input')}, {counted(self.rows, 'row')}" if self.rows else ""
        return self.model + rows


@cache  # the same object until a call ends, so that callers can compare the reports before and after a call
def without_call(not_active: tuple[tuple[str, str], ...], kind: str) -> Report:
    """Returns the report before any call of this kind. not_active: the patches that are not active, and why."""
    report = Report("no call")
    report.add_reasons(PATCHES, [Reason("NO_PATCH", f"{text}: {why}") for text, why in not_active])
    report.add_reasons(CALL, [Reason("NO_CALL", f"no {KINDS[kind]} in this thread has gone through fastgen")])
    return report


def _why_not(kernel: Kernel) -> str:
    return "; ".join(kernel.unsupported_reasons()) or f"nothing to do ({kernel.task})"

"""The steps of a greedy or sampling loop with drafts: forwards of several tokens, and their logits one by one.

`DraftedSteps` stands between the loop and its `TransformersDecodeStep`. Asked for the logits of the next token, it has
them already if the last forward checked a draft and all rows have followed it so far. Otherwise it drops the keys of
what was not followed, and runs a forward: of one token, or with the next draft (`decoding/drafts.py`).

A first use is compared: the first draft is checked by steps of one token as well, which the loop needs anyway, and only
if both give the same logits at two positions, drafts are trusted for this model.

Tests: tests/optimizer/transformers/test_drafts.py
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fastgen.models.cache_names import CACHE
from fastgen.optimizer.decoding.cost_model import size_of
from fastgen.optimizer.decoding.drafts import Drafts, Text
from fastgen.optimizer.decoding.graphs import differs_sync
from fastgen.optimizer.decoding.report import DRAFTS, MODEL_CHANGED, Reason
from fastgen.optimizer.transformers import kv_layers


@dataclass
class DraftFacts:
    """What is known of a model's forwards of several tokens, in one dtype.

    is_proven: whether one gave the logits of single steps. refused: why drafts are not checked any more. seconds: by
    rows, tokens, and whether they were replays, the number of forwards and the shortest time.
    """

    dtype: torch.dtype
    is_proven: bool = False
    refused: list[Reason] = field(default_factory=list)
    seconds: defaultdict[tuple[int, int, bool], list[float]] = field(
        default_factory=lambda: defaultdict(lambda: [0, math.inf])
    )


# MIN_MEASUREMENTS: fewer measured times are ignored. FAR_OFF: a measured time replaces an estimate that it exceeds by
# this factor.
MIN_MEASUREMENTS = 3
FAR_OFF = 1.5

_version = attrgetter("_version")  # counts changes in place

_facts: WeakKeyDictionary[Any, DraftFacts] = WeakKeyDictionary()


@dataclass
class Checked:
    """A draft and the logits of the forward that checked it.

    tokens: `[rows][size - 1]`. logits: `[rows, size, vocabulary_size]`. used: how many of these the loop has taken, or
    compared in a trial. length: of the cache before the forward. versions: of the weights.
    """

    tokens: list[list[int]]
    outputs: Any
    logits: Tensor
    length: int
    versions: int
    used: int = 0

    def follows(self, newest: list[int]) -> bool:
        """Whether the newest token of each row is the drafted one, so that the next logits are computed already."""
        size = self.logits.shape[1]
        return self.used < size and all(row[self.used - 1] == token for row, token in zip(self.tokens, newest))


class DraftedSteps:
    """Gives the logits of each step of a loop, some of them from the forward of an earlier step.

    step: the `TransformersDecodeStep`. checked: the last draft, if its logits are not used up. trial: the draft that is
    compared with single steps.
    """

    def __init__(self, step: Any, sources: list[list[int]]) -> None:
        self.step, self.sources = step, sources
        self.drafts = Drafts([], self._cost)
        self.checked: Checked | None = None
        self.trial: Checked | None = None
        self.is_left_alone = False
        facts, dtype = _facts.get(step.model), step.model.dtype
        if facts is None or facts.dtype != dtype or not step.call.costs.looks_back:
            facts = DraftFacts(dtype)
            if step.call.costs.looks_back:
                _facts[step.model] = facts
        self.facts = facts

    def logits_sync(self, input_ids: Tensor) -> Tensor:
        """Returns the logits `[rows, vocabulary_size]`, float32, of the token after input_ids `[rows, length]`."""
        step, facts = self.step, self.facts
        if step.steps == 0:
            return step.next_logits(input_ids)
        newest, checked, tokens = self._read_sync(input_ids), self.checked, []
        follows = checked is not None and checked.follows(newest)
        if not follows:
            self.settle()
            if self.trial is not None and not self.trial.follows(newest):
                self.trial = None
            if self.trial is None:
                tokens = self._propose(input_ids)
        if step.runs_user_code and (follows or tokens or self.trial is not None) and self._is_outdated():
            self.settle()
            self.trial, follows, tokens = None, False, []
        if checked is not None and follows:
            return self._take(checked)
        if tokens and facts.is_proven:
            return self._check(input_ids, tokens)
        if tokens:
            self._try(input_ids, tokens)
        return self._single_sync(input_ids)

    def _is_outdated(self) -> bool:
        """Whether user code has changed the model or, in place, its weights, since the last forward with a draft."""
        if self.step.has_changed():
            self._leave_alone([MODEL_CHANGED])
            return True
        ahead = self.checked or self.trial
        return ahead is not None and ahead.versions != self._versions()

    def _versions(self) -> int:
        return sum(map(_version, self._weights))

    @cached_property
    def _weights(self) -> list[Tensor]:
        return [weight for weight in self.step.model.parameters() if not weight.is_inference()]

    def settle(self) -> None:
        """Drops positions of the cache whose tokens the loop has not taken."""
        checked, self.checked = self.checked, None
        if checked is not None and self.step.graph is None:
            kv_layers.crop(self.step.arguments[CACHE], checked.length + checked.used)

    def compact(self, rows: list[int]) -> None:
        """Keeps these rows only."""
        self.settle()
        self.trial = None
        self.drafts.take(rows)

    def report(self) -> None:
        """Adds to the call's report what was drafted."""
        self.settle()
        report, drafts = self.step.call.report, self.drafts
        report.drafted, report.accepted = report.drafted + drafts.drafted, report.accepted + drafts.accepted
        report.steps_saved += drafts.saved

    def _read_sync(self, input_ids: Tensor) -> list[int]:
        """Returns the newest token of each row, and adds it to the texts."""
        newest: list[int] = input_ids[:, -1].tolist()
        if self.drafts.texts:
            self.drafts.append(newest)
        else:
            sources = self.sources or [[]] * len(newest)
            self.drafts.texts = [Text(source + row) for source, row in zip(sources, input_ids.tolist())]
        return newest

    def _cost(self, rows: int, size: int) -> float:
        """Returns what a forward of so many tokens per row takes, in steps of one token.

        The cost is estimated, so that equal runs decide equally. Measured times replace an estimate that is far too
        low, as with mixtures of experts, where more tokens read more experts.
        """
        costs, seconds, is_replay = self.step.call.costs, self.facts.seconds, self.step.graph is not None
        (count, shortest), (singles, single) = seconds[rows, size, is_replay], seconds[rows, 1, is_replay]
        estimated = costs.steps_of_forward(rows * size)
        is_measured = min(count, singles) >= MIN_MEASUREMENTS and costs.looks_back
        is_far_off = is_measured and shortest > FAR_OFF * estimated * single
        return shortest / single if is_far_off else estimated

    def _overhead(self, size: int) -> float:
        """Returns the time of a forward by that of its replay, as steps of one token are; 1 if it is replayed."""
        step = self.step
        if step.replays_ahead(size):
            return 1.0
        host, computed = step.call.costs.seconds_of_step(size_of(step.model, step.known_code), step.rows)
        return 1 + host / computed

    def _propose(self, input_ids: Tensor) -> list[list[int]]:
        """Returns the draft of each row to be checked now; empty if there is none, or it is not worthwhile."""
        step, left = self.step, self.step.max_length - input_ids.shape[1]
        if self.is_left_alone:
            return []
        if (graph := step.graph) is not None:
            left = min(left, graph.cache.capacity - graph.cache.generated_length)
        tokens = self.drafts.propose(left)
        if tokens and graph is not None and not step.replays_ahead(size := len(tokens[0]) + 1):
            graph.wanted[size] += 1
            tokens = self.drafts.propose(left, self._overhead)
        if not tokens:
            return []
        if reasons := self.facts.refused or step.checks.drafts:
            self._leave_alone(reasons)
        return [] if reasons else tokens

    def _forward(self, input_ids: Tensor, tokens: list[list[int]], is_trial: bool = False) -> Checked:
        size = len(tokens[0]) + 1
        length = self.step.arguments[CACHE].get_seq_length()
        drafted = torch.tensor(tokens, dtype=input_ids.dtype, device=input_ids.device)
        versions = self._versions() if self.step.runs_user_code else 0
        outputs = self._timed(size, self.step.run_ahead, torch.cat([input_ids, drafted], dim=1), size, is_trial)
        return Checked(tokens, outputs, outputs.logits, int(length), versions)

    def _check(self, input_ids: Tensor, tokens: list[list[int]]) -> Tensor:
        """Runs a forward with a draft, and returns the logits of its first token."""
        self.checked = checked = self._forward(input_ids, tokens)
        self.drafts.drafted += len(tokens) * len(tokens[0])
        return self._take(checked)

    def _take(self, checked: Checked) -> Tensor:
        """Returns the next logits of the last forward with a draft, and counts the step."""
        step, drafts = self.step, self.drafts
        if step.graph is not None:
            step.graph.cache.advance()
        step.steps += 1
        step.arguments = step.extended(checked.outputs)
        logits = checked.logits[:, checked.used]
        drafts.saved += checked.used > 0
        drafts.accepted += len(logits) * (checked.used > 0)
        checked.used += 1
        return logits.to(dtype=torch.float32)

    def _single_sync(self, input_ids: Tensor) -> Tensor:
        logits = self._timed(1, self.step.next_logits, input_ids)
        if (trial := self.trial) is not None:
            if differs_sync(logits.to(trial.logits.dtype), trial.logits[:, trial.used]):
                self._refuse(f"{type(self.step.model).__name__}: a forward of several tokens gave other logits")
            elif trial.used == 1:
                self.facts.is_proven, self.trial = True, None
            else:
                trial.used = 1
        return logits

    def _try(self, input_ids: Tensor, tokens: list[list[int]]) -> None:
        """Runs a forward with a draft, whose logits are then compared with those of single steps."""
        step, cache = self.step, self.step.arguments[CACHE]
        length = int(cache.get_seq_length())
        try:
            self.trial = self._forward(input_ids, tokens, is_trial=True)
            if self.trial.logits.shape[1] != len(tokens[0]) + 1:
                self._refuse(f"{type(step.model).__name__}: a forward of several tokens gave logits of one")
            else:
                self.trial.logits = self.trial.logits.clone()  # replays overwrite them
        except Exception as error:
            self._refuse(f"{type(step.model).__name__}: {type(error).__name__}: {error}")
        if step.graph is not None:
            step.graph.cache.advance(0)
        else:
            kv_layers.crop(cache, length)

    def _refuse(self, text: str) -> None:
        """Checks no more drafts of this model."""
        self.facts.refused, self.trial = [Reason("DRAFTS_REFUSED", text)], None
        self._leave_alone(self.facts.refused)

    def _leave_alone(self, reasons: list[Reason]) -> None:
        """Checks no more drafts in this call."""
        self.is_left_alone = True
        self.step.call.report.add_reasons(DRAFTS, reasons)

    def _timed(self, size: int, run: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a forward of so many tokens per row and notes its time, unless it is eager beside replays."""
        step, started = self.step, time.perf_counter()
        is_replay = step.replays_ahead(size)
        counts = is_replay or step.graph is None
        result = run(*arguments)
        if counts:
            entry = self.facts.seconds[step.rows, size, is_replay]
            entry[0], entry[1] = entry[0] + 1, min(entry[1], time.perf_counter() - started)
        return result

"""The steps of a greedy or sampling loop with drafts: forwards of several tokens, and their logits one by one.

`DraftedSteps` stands between the loop and its `TransformersDecodeStep`. It already has the logits of the next token if
the last forward checked a draft and all rows have followed it so far. Otherwise it drops the keys of what was not
followed, and runs a forward: of one token, or with the next draft (`decoding/drafts.py`).

fastgen makes the inputs of several tokens itself, out of those that the library prepares for one: a class may prepare
several differently. So drafts need a class whose inputs of one token depend on nothing but the arguments
(`CallChecks.drafts`), and arguments whose columns are known (`inputs_ahead`).

A first use is compared: the first draft is checked by steps of one token as well, which the loop needs anyway. Only if
both give the same logits at two positions are drafts trusted for this model and calls of this kind, until something in
the model is replaced. Other logits count for good.

Tests: tests/optimizer/transformers/test_drafts.py, tests/optimizer/transformers/test_drafted_inputs.py,
tests/optimizer/transformers/test_drafted_architectures.py
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import Cache

from fastgen.config import CONFIG
from fastgen.models.cache_names import CACHE_NAMES
from fastgen.optimizer.decoding.cost_model import ForwardTimes, size_of
from fastgen.optimizer.decoding.drafts import Drafts, Text
from fastgen.optimizer.decoding.graphs import differs_sync
from fastgen.optimizer.decoding.report import DRAFTS, MODEL_CHANGED, LeaveAlone, Reason, check
from fastgen.optimizer.transformers import kv_layers
from fastgen.optimizer.transformers.row_groups import TOKENIZER

# Arguments of a forward with a column for each of its tokens, by what the columns of drafted tokens are.
TOKENS = ("input_ids", "decoder_input_ids")
POSITIONS = ("position_ids", "decoder_position_ids", "cache_position")
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")  # those of the last token
MASKS = ("attention_mask", "decoder_attention_mask")
KEPT_LOGITS = "logits_to_keep"

# Arguments without such columns, and types of arguments that have none.
WITHOUT_COLUMNS = (*CACHE_NAMES, "encoder_outputs", TOKENIZER)
PLAIN_TYPES = (type(None), bool, str)

NOTHING_REPEATED = Reason("NOTHING_REPEATED", "the text repeated nothing that was worth checking")

Kind = tuple[Any, ...]  # of a forward: what chooses its code

# Measured times of a model's forwards.
_times: WeakKeyDictionary[Any, defaultdict[Kind, ForwardTimes]] = WeakKeyDictionary()
_padding_of_modules: WeakKeyDictionary[Any, frozenset[int]] = WeakKeyDictionary()


@dataclass
class Checked:
    """A draft and the outputs of the forward that checked it.

    tokens: `[rows][size - 1]`. logits: `[rows, size, vocabulary_size]`. version: the step's, after the forward. kind:
    of the forward. used: how many of the logits the loop has taken, or compared in a trial.
    """

    tokens: list[list[int]]
    outputs: Any
    logits: Tensor
    version: int
    kind: Kind
    used: int = 0

    def follows(self, newest: list[int]) -> bool:
        """Whether the newest token of each row is the drafted one, so that the next logits are computed already."""
        size = self.logits.shape[1]
        return self.used < size and all(row[self.used - 1] == token for row, token in zip(self.tokens, newest))


class DraftedSteps:
    """Gives the logits of each step of a loop, some of them from the forward of an earlier step.

    step: the `TransformersDecodeStep`. Drafts call six of its methods: `outputs_of` a draft, inside of `attempt`, and
    `advance` for each token that the loop takes; `next_logits` of a single step; `leaves_if_changed` and `version`. Its
    mode says how forwards run, and drops positions. checked: the last draft, if its logits are not used up. trial: the
    draft that is compared with single steps.
    """

    def __init__(self, step: Any, sources: list[list[int]]) -> None:
        self.step, self.sources = step, sources
        self.call, self.model = step.call, step.model
        self.remembers = not CONFIG.repeatable  # whether it uses what earlier calls have proven and measured
        self.drafts = Drafts([], self._cost, _padding_of(step))
        self.checked: Checked | None = None
        self.trial: Checked | None = None
        self.is_left_alone = False
        self._reasons: list[Reason] | None = None  # against drafts in this call, once there is one
        self._kinds: dict[bool, Kind] = {}  # of forwards, by whether the cache is static
        self._own_proofs: dict[Kind, list[Reason]] = {}

    @property
    def kind(self) -> Kind:
        """The kind of a forward now: with such arguments, and with a static cache or the loop's own."""
        is_static = self.step.mode.cache is not None
        if is_static not in self._kinds:
            self._kinds[is_static] = DRAFTS, is_static, _kind_of_call(self.step)
        return self._kinds[is_static]

    @property
    def proofs(self) -> dict[Kind, list[Reason]]:
        """For each kind of forward that was compared: the reasons against drafts, an empty list if it was right."""
        facts = self.call.facts_of(self.model, self.step.checks.known_code)
        return facts.proofs if self.remembers else self._own_proofs

    def logits_sync(self, input_ids: Tensor) -> Tensor:
        """Returns the logits `[rows, vocabulary_size]`, float32, of the token after input_ids `[rows, length]`."""
        newest = self._read_sync(input_ids)
        checked = self.checked
        tokens = []
        follows = checked is not None and checked.follows(newest)
        if not follows:
            self.settle()
            if self.trial is not None and not self.trial.follows(newest):
                self.trial = None
            if self.trial is None:
                tokens = self._propose(input_ids)
        if (follows or tokens or self.trial is not None) and self._is_outdated():
            self.settle()
            self.trial = None
            follows = False
            tokens = []
        if checked is not None and follows:
            return self._take(checked)
        if tokens and self.proofs.get(self.kind) == []:
            checked = self._check(input_ids, tokens)
            return self._single_sync(input_ids) if checked is None else self._take(checked)
        if tokens:
            self._try(input_ids, tokens)
        return self._single_sync(input_ids)

    def _is_outdated(self) -> bool:
        """Whether user code has changed the model or, in place, its weights, since the last forward with a draft."""
        if self.step.leaves_if_changed():
            self._leave_alone([MODEL_CHANGED])
            return True
        ahead = self.checked or self.trial
        return ahead is not None and ahead.version != self.step.version()

    def settle(self) -> None:
        """Drops positions of the cache whose tokens the loop has not taken."""
        if self.checked is not None:
            self.step.mode.drop(self.step)
        self.checked = None

    def compact(self, rows: list[int]) -> None:
        """Keeps these rows only."""
        self.settle()
        self.trial = None
        self.drafts.compact(rows)

    def end(self) -> None:
        """Drops what was not taken, and adds to the call's report what was drafted, or that nothing was."""
        self.settle()
        report, drafts = self.call.report, self.drafts
        if self._reasons is None and not self.is_left_alone:
            report.add_reasons(DRAFTS, [NOTHING_REPEATED])
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
        """Returns what a forward of `size` tokens per row takes, in steps of one token, if both run alike."""
        path = "eager" if self.step.mode.cache is None else "replay"
        times = self._times_of(self.kind) if self.remembers else None
        return self.call.costs.steps_of_forward(rows, size, times, path)

    def _overhead(self, size: int) -> float:
        """Returns by what factor a forward takes longer because it is not a replay, as steps of one token are."""
        if self.step.mode.path(size) == "replay":
            return 1.0
        work = size_of(self.model, self.step.checks.known_code).step(len(self.drafts.texts))
        return self.call.costs.seconds(work) / self.call.costs.seconds(work.without_modules)

    def _propose(self, input_ids: Tensor) -> list[list[int]]:
        """Returns the draft of each row to be checked now; empty if there is none, or it is not worthwhile."""
        mode = self.step.mode
        if self.is_left_alone:
            return []
        left = self.step.max_length - input_ids.shape[1]
        room = mode.room(left)
        tokens = self.drafts.propose(room)
        if tokens and mode.path(size := len(tokens[0]) + 1) == "static":
            mode.want(size)
            tokens = self.drafts.propose(room, self._overhead)
        if not tokens:
            return []
        if self._reasons is None:
            cache = cache_of(self.step)
            length = 0 if cache is None else kv_layers.length_of(cache) or 0
            self._reasons = self.step.checks.drafts(length + left)
        if reasons := self.proofs.get(self.kind) or self._reasons:
            self._leave_alone(reasons)
        return [] if reasons else tokens

    def _forward(self, input_ids: Tensor, tokens: list[list[int]], is_trial: bool = False) -> Checked:
        size = len(tokens[0]) + 1
        kind = self.kind  # captures may begin at this forward
        drafted = torch.tensor(tokens, dtype=input_ids.dtype, device=input_ids.device)
        outputs = self._timed(size, self.step.outputs_of, torch.cat([input_ids, drafted], dim=1), size, is_trial)
        return Checked(tokens, outputs, outputs.logits, self.step.version(), kind)

    def _check(self, input_ids: Tensor, tokens: list[list[int]]) -> Checked | None:
        """Runs a forward with a draft; returns None if it failed: then single steps continue."""
        try:
            with self.step.attempt(is_trial=False) as rollback:
                self.checked = self._forward(input_ids, tokens)
                rollback.keep()
        except LeaveAlone as left_alone:
            self._leave_alone(left_alone.reasons)
        except Exception as error:
            self._leave_alone([self._refusal(f"{type(error).__name__}: {error}")])
        else:
            self.drafts.drafted += len(tokens) * len(tokens[0])
        return self.checked

    def _take(self, checked: Checked) -> Tensor:
        """Returns the next logits of the last forward with a draft, and counts the step."""
        self.step.advance(checked.outputs)
        logits = checked.logits[:, checked.used]
        if checked.used > 0:
            self.drafts.saved += 1
            self.drafts.accepted += len(logits)
        checked.used += 1
        return logits.to(dtype=torch.float32)

    def _single_sync(self, input_ids: Tensor) -> Tensor:
        logits = self._timed(1, self.step.next_logits, input_ids)
        if (trial := self.trial) is not None:
            if differs_sync(logits.to(trial.logits.dtype), trial.logits[:, trial.used]):
                self._refuse("a forward of several tokens gave other logits", trial.kind)
            elif trial.used == 1:
                self.proofs.setdefault(trial.kind, [])
                self.trial = None
            else:
                trial.used = 1
        return logits

    def _try(self, input_ids: Tensor, tokens: list[list[int]]) -> None:
        """Runs a forward with a draft, whose logits are then compared with those of single steps."""
        try:
            with self.step.attempt(is_trial=True):
                trial = self._forward(input_ids, tokens, is_trial=True)
        except LeaveAlone as left_alone:
            self._leave_alone(left_alone.reasons)
        except Exception as error:
            self._refuse(f"{type(error).__name__}: {error}", self.kind)
        else:
            if trial.logits.shape[1] != len(tokens[0]) + 1:
                self._refuse("a forward of several tokens gave logits of one", trial.kind)
            else:
                trial.logits = trial.logits.clone()  # replays overwrite them
                self.trial = trial

    def _refuse(self, text: str, kind: Kind) -> None:
        """Checks no more drafts in calls with forwards of this kind."""
        reasons = self.proofs[kind] = [self._refusal(text)]
        self.trial = None
        self._leave_alone(reasons)

    def _refusal(self, text: str) -> Reason:
        return Reason("DRAFTS_REFUSED", f"{type(self.model).__name__}: {text}")

    def _leave_alone(self, reasons: Sequence[Reason]) -> None:
        """Checks no more drafts in this call."""
        self.is_left_alone = True
        self.call.report.add_reasons(DRAFTS, reasons)

    def _timed(self, size: int, run: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a forward of `size` tokens per row and notes its time."""
        path = self.step.mode.path(size)
        times = self._times_of(self.kind)
        started = time.perf_counter()
        result = run(*arguments)
        times.add(len(self.drafts.texts), size, path, time.perf_counter() - started)
        return result

    def _times_of(self, kind: Kind) -> ForwardTimes:
        return _times.setdefault(self.model, defaultdict(ForwardTimes))[kind]


@check(DRAFTS)
def inputs_ahead(inputs: dict[str, Any], drafted: Tensor, column: int) -> dict[str, Any]:
    """Returns the inputs of a forward of the newest token and drafted ones, out of those of the newest token.

    drafted: `[rows, count]`. column: of the first drafted token, in masks of a static cache, `[…, 1, length]`, whose
    later columns are hidden. Raises LeaveAlone if the columns of an argument are not known.
    """
    is_cross = TOKENS[1] in inputs
    count = drafted.shape[1]
    mask = MASKS[is_cross]
    ahead = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, PLAIN_TYPES) or name in WITHOUT_COLUMNS or (is_cross and name == MASKS[0]):
            continue
        if name in TOKENS and value.shape[1] == 1:
            ahead[name] = torch.cat([value, drafted], dim=1)
        elif name in POSITIONS:
            ahead[name] = value + torch.arange(count + 1, dtype=value.dtype, device=value.device)
        elif name in TOKEN_TYPES:
            ahead[name] = value.expand(*value.shape[:-1], count + 1)
        elif name == mask and isinstance(value, Tensor) and value.dim() == 2:
            ahead[name] = torch.cat([value, value.new_ones(len(value), count)], dim=1)
        elif name == mask:
            ahead[name] = tree_map_only(Tensor, lambda states: _mask_ahead(states, count, column), value)
        elif name == KEPT_LOGITS:
            ahead[name] = count + 1
        else:
            text = f"argument {name}: its columns are not known for drafted tokens"
            raise LeaveAlone([Reason("ARGUMENT_COLUMNS", text)])
    return ahead


def _mask_ahead(mask: Tensor, count: int, column: int) -> Tensor:
    """Returns a mask `[rows, heads, count + 1, length]` in which each token sees those before it as well."""
    masks = mask.repeat(1, 1, count + 1, 1)
    sees = torch.ones(count + 1, count, dtype=torch.bool, device=mask.device).tril(-1)
    masks[..., column : column + count].masked_fill_(sees, True if mask.dtype == torch.bool else 0)
    return masks


def cache_of(step: Any) -> Cache | None:
    """Returns the cache of the loop, unless it is of a class that has no layers (XLNet returns tuples of tensors)."""
    cache = kv_layers.cache_of(step.arguments)
    return cache if isinstance(cache, Cache) else None


def _kind_of_call(step: Any) -> tuple[Any, ...]:
    """Returns what decides which code a step runs; called after the prefill, which fills the cache."""
    kinds = frozenset((name, _kind_of(value)) for name, value in step.arguments.items() if value is not None)
    cache = cache_of(step)
    layers = () if cache is None else tuple(map(type, kv_layers.layers_of(cache)))
    return type(step.model), step.model.dtype, step.attention, kinds, layers


def _kind_of(value: Any) -> Any:
    """Returns what code may ask of an argument before it reads numbers: a flag, or a tensor's dtype and dimensions."""
    if isinstance(value, Tensor):
        return value.dtype, value.dim()
    return value if isinstance(value, PLAIN_TYPES) else type(value)


def _padding_of(step: Any) -> frozenset[int]:
    """Returns the padding tokens: some models do not count them as positions."""
    model = step.model
    if model not in _padding_of_modules:  # fixed when a module is made
        ids = {vars(module).get("padding_idx") for module in model.modules()}
        _padding_of_modules[model] = frozenset(token for token in ids if isinstance(token, int))
    configs = step.generation_config, model.config.get_text_config(decoder=True)
    tokens = (getattr(config, "pad_token_id", None) for config in configs)  # some configurations do not have one
    return _padding_of_modules[model].union(token for token in tokens if isinstance(token, int))

"""The first use of code that no test has seen: a class, or another version of transformers or of a modeling file.

If `trust` accepts all sources of a call's model (`sources.py`), everything is on. Otherwise the first call is
transformers', and fastgen repeats it beside, for at most `MOST_STEPS` steps:

    all     fastgen's loop; prompts shared however short, steps captured from the second on, drafts
    plain   for a few steps, nothing of that, if an input has several rows: the path of prompts too short to share

Tokens, logits of each step, the returned cache and the random state must be equal. Then later calls of this kind are
fastgen's; if something differs, they are transformers'. A call of more steps is compared with one that ends early.

Tests: tests/optimizer/transformers/test_first_use.py
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import ModelOutput
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from fastgen.ops.kernel import tolerance
from fastgen.ops.prefix_trie import PrefixTrie
from fastgen.optimizer import trust
from fastgen.optimizer.decoding.call import (
    GenerateCall,
    Restore,
    all_of,
    undo_of_attributes,
    undo_of_random_numbers,
    undo_of_tensors,
)
from fastgen.optimizer.decoding.cost_model import CaptureCosts
from fastgen.optimizer.decoding.guards import is_constant, qualified_name
from fastgen.optimizer.decoding.model_info import ModelInfo
from fastgen.optimizer.decoding.report import PREFILL, Reason, that_hold
from fastgen.optimizer.transformers import kv_layers
from fastgen.optimizer.transformers.checks import KNOWN, CallChecks, EndsEarly, HostModel, generate_call
from fastgen.optimizer.transformers.prefixes import longest_sync
from fastgen.optimizer.transformers.sources import is_users, scores_differ
from fastgen.optimizer.transformers.verification import VerifiedCall
from fastgen.optimizer.trust import NotComparable
from fastgen.patching import disabled

MOST_STEPS, LEAST_STEPS, PLAIN_STEPS = 48, 4, 5

# The most trials of one kind of call with one model, whose plain attributes may change in each call.
MOST_TRIALS = 8

# What the cost models of the repeated calls have in place of thresholds.
_ALWAYS = CaptureCosts(new=0, existing=0, eager_forwards=1, least=0)
_NEVER = CaptureCosts(new=0, existing=0, eager_forwards=1, least=1 << 62)
ALL: dict[str, Any] = {"share": True, "cpu_captures": _ALWAYS, "gpu_captures": _ALWAYS}
PLAIN: dict[str, Any] = {"share": False, "cpu_captures": _NEVER, "gpu_captures": _NEVER}

# Arguments that the library calls, which choose no code of the host; another call can prove it.
_CALLED = {"logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer"}

# For each model, the number of trials of each kind of call.
_trials: WeakKeyDictionary[nn.Module, Counter[Any]] = WeakKeyDictionary()


class Noting(LogitsProcessor):
    """Notes the largest logits `[rows, 8]` of the first steps and the prompt's length, and changes no scores."""

    def __init__(self) -> None:
        self.length, self.largest = 0, list[Tensor]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.largest:
            self.length = input_ids.shape[1]
        if len(self.largest) < MOST_STEPS:
            self.largest.append(scores.float().topk(min(8, scores.shape[1])).values)
        return scores


def _random_states() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


@dataclass
class Noted:
    """The output of a call, what `Noting` saw, torch's random states after it, and the scores of all its beams."""

    output: Any
    noting: Noting
    random_states: list[Tensor] = field(default_factory=_random_states)
    beam_scores: Tensor | None = None


@contextmanager
def _beam_scores_of(model: HostModel) -> Iterator[dict[str, Tensor]]:
    """A context that yields the "last" scores `[inputs, num_beams]` of the library's beam search of this model.

    Yields nothing if an unknown library has no such method, or one that returns something else.
    """
    scores: dict[str, Tensor] = {}
    update: Any = getattr(model, "_update_finished_beams", None)

    def noting(*args: Any, **kwargs: Any) -> Any:
        updated = update(*args, **kwargs)
        with suppress(TypeError, IndexError):
            scores["last"] = updated[1]
        return updated

    if update is not None:
        vars(model)["_update_finished_beams"] = noting
    try:
        yield scores
    finally:
        vars(model).pop("_update_finished_beams", None)


class FirstUse:
    """A call of a kind that is not accepted, because of these unknown sources.

    key: its kind, a text if it is the same in later processes.
    """

    def __init__(
        self,
        call: GenerateCall,
        model: HostModel,
        unknown: dict[str, str | None],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> None:
        arguments = inspect.signature(GenerationMixin.generate).bind_partial(model, *args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
        del arguments["self"]
        self.call, self.model, self.arguments = call, model, arguments
        kind = type(model)
        self.subject = f"{kind.__module__}.{kind.__qualname__} on transformers {transformers.__version__}"
        self.steps = self._most_steps()
        self.key = self._key(unknown)

    def _setting(self, name: str) -> Any:
        for holder in (self.arguments, self.arguments.get("generation_config"), self.model.generation_config):
            value = holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)
            if value is not None:
                return value
        return None

    def _most_steps(self) -> int:
        """Returns the most steps that the call may take, as far as its arguments tell."""
        steps, length = self._setting("max_new_tokens"), self._setting("max_length")
        if steps is not None or length is None:
            return 20 if steps is None else int(steps)
        prompt = self.arguments.get("inputs", self.arguments.get("input_ids"))
        if isinstance(prompt, Tensor) and not self.model.config.is_encoder_decoder:
            length -= prompt.shape[1]
        return int(length)

    def _key(self, unknown: dict[str, str | None]) -> Any:
        """Returns what chooses code: sources, plain attributes, dtype and device, and the kind of call."""
        model = self.model
        defaults = vars(GenerationConfig())
        weight = next(iter(model.parameters()), torch.empty(0))
        inputs = [value.shape[0] for value in self.arguments.values() if isinstance(value, Tensor) and value.dim()]
        several = [(self._setting(name) or 1) > 1 for name in ("num_beams", "num_return_sequences")]
        names = {name for name, value in self.arguments.items() if value is not None} - _CALLED
        for config in filter(None, (self.arguments.get("generation_config"), model.generation_config)):
            names |= {name for name, value in vars(config).items() if value != defaults.get(name)}
        mode = (*several, bool(self._setting("do_sample")), max(inputs, default=1) > 1, tuple(sorted(names)))
        mode += self._has_common_prefix(), kv_layers.is_filled(kv_layers.cache_of(self.arguments))
        attention = getattr(model.config, "_attn_implementation", None)
        self._kind = type(model), model.dtype, weight.device.type, attention, *mode
        parts = type(model).__module__, type(model).__qualname__, *self._kind[1:], _state_of(self.call, model)
        key = trust.key_of(sorted(unknown.items()), *parts)
        return (type(model), key) if None in unknown.values() else key

    def _has_common_prefix(self) -> bool:
        """Whether the rows of the prompt have a common prefix, which fastgen may compute once."""
        prompt, mask = (
            self.arguments.get("inputs", self.arguments.get("input_ids")),
            self.arguments.get("attention_mask"),
        )
        if not isinstance(prompt, Tensor) or prompt.dim() != 2 or self.model.config.is_encoder_decoder:
            return False
        return longest_sync({"input_ids": prompt, "attention_mask": mask}, self.model.config).length > 1

    def generate(self, original: Callable, accelerated: Callable[..., Any]) -> Any:
        """Returns the output of the call: fastgen's if a trial has shown no difference, otherwise transformers'.

        accelerated: runs the call of a `GenerateCall` with fastgen.
        """
        if trust.is_proven(self.key):
            return accelerated(original, self.call, self.model, **self.arguments)
        if trust.refusal(self.key):
            return self._left(original, trust.reason_for(self.key, self.subject))
        if reasons := self._unfit():
            return self._left(original, *reasons)
        _trials.setdefault(self.model, Counter())[self._kind] += 1
        ours = partial(self._ours, original, accelerated)
        noted, _ = trust.trial(self.key, ours, partial(self._theirs, original), self._difference, self.subject)
        self.call.report.add_reasons(PREFILL, [trust.reason_for(self.key, self.subject)])
        return noted.output

    def _left(self, original: Callable, *reasons: Reason) -> Any:
        self.call.report.add_reasons(PREFILL, reasons)
        with disabled():
            return original(self.model, **self.arguments)

    def _unfit(self) -> list[Reason]:
        """Returns why this call cannot show whether fastgen is right, empty if it can."""
        with torch.no_grad():
            if reasons := CallChecks(self.call, self.model).rows:
                return reasons
        stateful = [
            f"a call with {name} cannot be repeated" for name, value in self.arguments.items() if not _can_repeat(value)
        ]
        try:
            self._copied = _copied(self.arguments)
        except Exception as error:  # tensors that autograd has recorded cannot be copied, for example
            stateful.append(f"an argument cannot be copied: {error}")
        text = f"{self.subject} is not compared yet: {{}}"
        few = f"a call for fewer than {LEAST_STEPS} new tokens shows too little"
        facts = self.call.facts_of(self.model, KNOWN)
        is_distributed = facts.is_sharded or getattr(self.model, "_tp_size", None) is not None
        changes = "its modules keep state that changes between calls"
        return that_hold(
            ("UNVERIFIED", text.format(few), self.steps < LEAST_STEPS),
            ("UNVERIFIED", text.format(changes), _trials.get(self.model, Counter())[self._kind] >= MOST_TRIALS),
            ("UNVERIFIED", text, stateful[:1]),
            ("UNVERIFIED", text.format("other processes take part in its forwards"), is_distributed),
            ("UNVERIFIED", text, trust.unfit(self.key)),
        )

    def _noted(self, run: Callable[..., Any], steps: int | None, arguments: dict[str, Any]) -> Noted:
        """Runs the call, of at most `steps` steps if that is not None, and notes logits."""
        noting = Noting()
        arguments = dict(arguments)
        arguments["logits_processor"] = LogitsProcessorList([noting, *(arguments.get("logits_processor") or ())])
        if steps is not None:
            arguments["stopping_criteria"] = [
                *(arguments.get("stopping_criteria") or ()),
                EndsEarly(self._start + steps),
            ]
        return Noted(run(self.model, **arguments), noting)

    def _theirs(self, original: Callable) -> tuple[Noted, Noted]:
        """Returns the caller's call, and one that `_ours` can repeat: the same, or one that ends early."""
        self._restore = self._undo()
        with _beam_scores_of(self.model) as beam_scores:
            noted = self._noted(original, None, self.arguments)
            self._limit = None
            expected = noted
            self._start = noted.noting.length
            if len(noted.noting.largest) >= MOST_STEPS:
                restore = self._undo()
                self._limit = min(self.steps // 3, MOST_STEPS)
                self._restore()
                expected = self._noted(original, self._limit, _copied(self._copied))
                restore()
        expected.beam_scores = beam_scores.get("last")
        return noted, expected

    def _undo(self) -> Restore:
        """Returns a function that restores random numbers, and what modules hold now."""
        modules = list(self.model.modules())
        foreign = [module for module in modules if is_users(type(module))]
        return all_of(undo_of_random_numbers(), undo_of_tensors(modules), undo_of_attributes(foreign))

    def _ours(self, original: Callable, accelerated: Callable[..., Any]) -> list[Noted]:
        """Returns the results of fastgen's two ways. Raises NotComparable if fastgen does nothing in this call."""
        results = []
        restore = self._undo()
        try:
            for costs, steps in ((ALL, self._limit), (PLAIN, PLAIN_STEPS)):
                self._restore()
                with generate_call(self.model) as call:
                    call.costs = replace(call.costs, **costs)
                    results.append(self._noted(partial(accelerated, original, call), steps, _copied(self._copied)))
                    results[-1].beam_scores = call.host.beam_scores
                    if costs is ALL and (not call.is_accelerated or len(results[0].noting.largest) < LEAST_STEPS):
                        raise NotComparable(call.report.summary())
                if call.rows == call.inputs:
                    break  # nothing is shared anyway
        finally:
            restore()
        return results

    def _difference(self, ours: list[Noted], theirs: tuple[Noted, Noted]) -> str | None:
        """Returns the first difference, of logits, tokens, outputs or random numbers."""
        expected, compared = theirs[1], ours[0]
        is_half = self.model.dtype not in (torch.float32, torch.float64)
        for noted in ours:
            if logits := _logits_difference(noted.noting.largest, expected.noting.largest, is_half):
                return logits
        if is_half:
            return None
        compare = VerifiedCall(self.model, {}, {})
        outputs = _common(compared.output, expected.output)
        if different := compare.difference(*outputs) or _cache_difference(*outputs):
            return str(different)
        if expected.beam_scores is not None and scores_differ(compared.beam_scores, expected.beam_scores):
            return "other scores of beams"
        is_drawn_alike = all(map(torch.equal, compared.random_states, expected.random_states))
        return None if is_drawn_alike else "other random numbers are drawn"


def _logits_difference(ours: list[Tensor], theirs: list[Tensor], is_half: bool) -> str | None:
    """Returns the first difference of logits; in half precision rounding may change a token, and all later ones."""
    for step, (own, expected) in enumerate(zip(ours, theirs)):
        if own.shape != expected.shape:  # inputs have left the batch
            return None
        limit = tolerance("logits", torch.bfloat16 if is_half else torch.float32)
        atol = limit * expected.nan_to_num(posinf=0, neginf=0).abs().max().item()
        equal = torch.isclose(own, expected, rtol=0, atol=atol, equal_nan=True).all(dim=-1)  # [rows]
        if equal.float().mean() < (0.5 if is_half and step else 1):
            return f"logits of step {step} differ by {(own - expected).nan_to_num().abs().max().item():.2g}"
    return None


def _common(ours: Any, theirs: Any) -> tuple[Any, Any]:
    """Returns the outputs with the names that both have: fastgen may leave out what the caller does not use."""
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return ours, theirs
    names = [name for name in theirs if name in ours]
    return {name: ours[name] for name in names}, {name: theirs[name] for name in names}


def _cache_difference(ours: Any, theirs: Any) -> str | None:
    caches = [kv_layers.cache_of(output) if isinstance(output, dict) else None for output in (ours, theirs)]
    if None in caches:
        return None
    pairs = zip(*(kv_layers.layers_of(cache) for cache in caches if cache is not None))
    for index, (layer, expected) in enumerate(pairs):
        states = [[getattr(owner, name, None) for name in ("keys", "values")] for owner in (layer, expected)]
        if type(layer) is not type(expected) or scores_differ(*states):
            return f"layer {index} of the returned cache differs"
    return None


def _state_of(call: GenerateCall, model: HostModel) -> str:
    """Returns the plain attributes of the model's modules, of users' classes, and its configuration, as one text."""
    facts = call.facts_of(model, KNOWN)
    if facts not in _state_texts:
        lines = {model.config.to_json_string(use_diff=False)}
        for module in model.modules():
            spaces = [vars(kind) for kind in reversed(type(module).__mro__) if is_users(kind)] + [vars(module)]
            plain = {name: _text(value) for space in spaces for name, value in space.items() if name[:2] != "__"}
            lines.add(f"{type(module).__qualname__} {sorted(plain.items())}")
        _state_texts[facts] = "\n".join(sorted(lines))
    return _state_texts[facts]


def _text(value: Any) -> str:
    """Returns a constant, or a collection of constants; the name of code; of other objects the class."""
    if is_constant(value):
        return str(sorted(map(repr, value))) if isinstance(value, (set, frozenset)) else repr(value)
    return qualified_name(value) if callable(value) else type(value).__qualname__


# Results about a model, as long as its facts hold.
_state_texts: WeakKeyDictionary[ModelInfo, str] = WeakKeyDictionary()


# Objects that a call does not change, and objects that take part in a loop with a state of their own.
_UNCHANGED = (bool, int, float, str, type(None), torch.dtype, torch.device, Tensor, GenerationConfig, PrefixTrie,
              PreTrainedTokenizerBase)  # fmt: skip
_WITH_STATE = (BaseStreamer, nn.Module)


def _can_repeat(value: Any) -> bool:
    """Whether a second call with this argument, or with a copy of it, does the same."""
    if isinstance(value, dict):
        return all(map(_can_repeat, value.values()))
    if isinstance(value, (list, tuple)):
        return (type(value) in (list, tuple) or _is_ours(value)) and all(map(_can_repeat, value))
    return isinstance(value, _UNCHANGED) or (_is_ours(value) and not isinstance(value, _WITH_STATE))


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith(("transformers.", "fastgen."))


def _copied(value: Any) -> Any:
    """Returns the argument with copies of processors, caches and other objects that change while they are used."""
    if type(value) is dict:
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, ModelOutput):
        return copy.copy(value)
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return copy.deepcopy(value) if _is_ours(value) and not isinstance(value, _UNCHANGED) else value

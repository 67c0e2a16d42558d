"""The sources that a model of transformers relies on, and trials of the scores of unknown ones.

Tests: tests/optimizer/transformers/test_first_use.py, tests/optimizer/transformers/test_token_log_probs.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastgen.ops.kernel import tolerance
from fastgen.optimizer import trust
from fastgen.optimizer.decoding.call import GenerateCall
from fastgen.optimizer.decoding.model_info import ModelInfo, last_facts_of
from fastgen.optimizer.transformers.checks import KNOWN, HostModel, is_foreign
from fastgen.provenance import packages_of

# The host's files that fastgen repeats or relies on, for all models.
FILES = (*(name for name in KNOWN.files if name.startswith("transformers.")),
         "transformers.generation.logits_process", "transformers.generation.stopping_criteria")  # fmt: skip

Result = TypeVar("Result")

# The results of `unknown_of`, as long as a model's facts hold.
_unknown: WeakKeyDictionary[ModelInfo, dict[str, str | None]] = WeakKeyDictionary()


def unknown_of(call: GenerateCall, model: HostModel) -> dict[str, str | None]:
    """Returns the sources of this model that are not accepted, with their hashes; empty if everything is on.

    Goes by the classes that its modules had when they were last read, which `CallChecks.rows` compares.
    """
    facts = last_facts_of(model) or call.facts_of(model, KNOWN)
    call.host.accepted[model] = facts.kinds.keys()
    if facts not in _unknown:
        _unknown[facts] = _unknown_of_kinds(model, facts.kinds)
    return _unknown[facts]


def _unknown_of_kinds(model: HostModel, kinds: Iterable[type]) -> dict[str, str | None]:
    """Returns the same for a model with modules of these classes."""
    files = {base.__module__ for kind in kinds for base in kind.__mro__}
    files = {name for name in files if name.startswith("transformers.models.")} | (sys.modules.keys() & {*FILES})
    if is_foreign(model):
        files |= {kind.__module__ for kind in kinds if kind is type(model) or is_users(kind)}
    return trust.unknown_sources(sorted(files))


def shared_scores(
    models: list[Any],
    shared: Callable[[], Result],
    plain: Callable[[], Result],
    sources: Iterable[str] = (),
    visible: Tensor | None = None,
) -> Result:
    """Returns the result of `shared`, or of `plain` until a trial has shown that unknown models give the same scores.

    sources: those of the caller of the models. visible: where scores of this shape count, bool; None: everywhere.
    """
    unknown = trust.unknown_sources(sources)
    for model in models:
        unknown |= _unknown_of_kinds(model, {*map(type, model.modules())})
    if not unknown:
        return shared()
    parts = [(type(model).__qualname__, str(model.config), model.dtype, model.device.type) for model in models]
    subject = f"scores of {', '.join(name for name, *_ in parts)}"
    difference = partial(scores_differ, visible=visible)
    return trust.ours_or_theirs(unknown, tuple(parts), shared, plain, difference, subject)


def scores_differ(ours: Any, theirs: Any, visible: Tensor | None = None) -> str | None:
    """Returns the first difference of two results: numbers and tensors, nested alike."""
    if isinstance(theirs, dict):
        return scores_differ(list(ours.values()), [theirs[key] for key in ours])
    for numbers in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        if numbers[0] is numbers[1] is None:
            continue
        score, expected = map(torch.as_tensor, numbers)
        if visible is not None and score.shape == expected.shape == visible.shape:
            score, expected = score[visible], expected[visible]
        limit = tolerance("logits", expected.dtype)
        if score.shape != expected.shape or not torch.allclose(score, expected, limit, 10 * limit, equal_nan=True):
            return "other scores"
    return None


def is_users(kind: type) -> bool:
    """Whether a class is the user's."""
    return not packages_of(kind) <= KNOWN.packages

"""Faster text generation with Hugging Face transformers and fairseq, with identical output.

    import fastgen

is enough, before or after the library is imported: it patches the library's `generate`, and leaves to the original what
it does not support. `python -m fastgen` shows what is patched and what is not, and why.

To use fastgen for some calls only, set `FASTGEN_AUTO=0` and put `with fastgen.enabled():` around them.

Tests: tests/test_package.py
"""

from __future__ import annotations

from contextlib import contextmanager

from fastgen import models
from fastgen.config import CONFIG, configure, start_logging
from fastgen.optimizer import PATCH_SET
from fastgen.optimizer.fairseq import import_hint as _import_hint
from fastgen.patching import PatchState, PatchStates, disabled, switched
from fastgen.patching.import_hooks import explain_failure
from fastgen.patching.target import upgrade_reason

TYPE_CHECKING = False  # type checkers assume True; importing typing would take a quarter of `import fastgen`
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from torch import Tensor

    from fastgen.batch.generator import TextGenerator
    from fastgen.ops.prefix_trie import PrefixTrie
    from fastgen.optimizer.decoding.report import Report
    from fastgen.optimizer.decoding.verify import Verification

__all__ = [
    "PatchState",
    "PrefixTrie",
    "TextGenerator",
    "configure",
    "disable",
    "disabled",
    "enable",
    "enabled",
    "explain",
    "log_likelihoods",
    "reusing_prefix",
    "status",
    "token_log_probs",
    "verify",
]
__version__ = "0.2.0.dev0"


def enable() -> None:
    """Patches the libraries that are imported, and the rest when they are imported; importing fastgen does this.

    Patches that have failed, see `status()`, are tried again. Does nothing under FASTGEN_DISABLE=1.
    """
    _arm(everywhere=True, again=True)


@contextmanager
def enabled() -> Iterator[None]:
    """Enables fastgen in this thread or task, even after `disable()`, inside `disabled()` and with FASTGEN_AUTO=0.

    Applies patches that are not applied yet; they stay when the block ends, but calls elsewhere reach the originals
    unless fastgen is enabled there, too. The innermost of nested `enabled()` and `disabled()` counts. A thread started
    inside does not inherit it, an asyncio task does. Also a decorator.

    Does nothing under FASTGEN_DISABLE=1; a `disable()` inside the block ends it.
    """
    _arm(everywhere=False, again=False)
    with switched(True):
        yield


def _arm(everywhere: bool, again: bool) -> None:
    if CONFIG.disable:
        PATCH_SET.skip("FASTGEN_DISABLE=1")
    else:
        explain_failure("fairseq", _import_hint)
        PATCH_SET.arm(everywhere, again)


def disable() -> None:
    """Restores the originals in all threads, until `enable()` or the next `enabled()`."""
    PATCH_SET.revert("fastgen.disable()")


def status() -> PatchStates:
    """Returns name, group, state (pending, applied, skipped, failed or reverted), reason and host of each patch.

    Printed, it has one line per group, because patches of a group are applied all or none.
    """
    return PATCH_SET.states()


def explain(kind: str | None = None) -> Report:
    """Returns the report of this thread's last call: what was shared, which kernels ran, and what was not done.

        trainer.train()
        rollout, scoring = fastgen.explain("generate"), fastgen.explain("scoring")

    kind: "generate" for the last `generate`; "scoring" for the last pass over whole texts, by a trainer,
    `token_log_probs`, `log_likelihoods` or lm-evaluation-harness; None for the later of the two.

    Print the report to read it; `as_dict()` is for JSON. Before the first call it has the code NO_CALL. NO_PATCH says
    why patches are not active, so that calls after the reported one do not use fastgen; calls inside `disabled()` are
    not reported. It names the groups of patches that are switched off because they have failed, and why.
    """
    from fastgen.optimizer.decoding.call import last_report
    from fastgen.optimizer.decoding.report import GENERATE, KINDS, without_call

    if kind not in (None, *KINDS):
        raise ValueError(f"kind is {kind!r} (accepted: None, {', '.join(map(repr, KINDS))})")
    report, states = last_report(kind), status()
    if report is None:
        return without_call(states.not_active(), kind or GENERATE)
    report.set_patches(PATCH_SET.switched_off, states.why_none)
    return report


def verify(model: Any, inputs: Any, **generate_kwargs: Any) -> Verification:
    """Generates without fastgen and with it, from the same random numbers, and returns the first difference.

        print(fastgen.verify(model, tokenizer(texts, padding=True, return_tensors="pt"), num_beams=4))

    model: a model of transformers, with inputs as a mapping of arguments or as input_ids; or a generator of fairseq,
    with a sample. generate_kwargs: the arguments of its `generate`. The result has `equal`; the first `difference` with
    its step and row, the scores of both sequences and their gap; seconds and bytes of both calls; `speedup`, which is
    None if the seconds differ too much from turn to turn, or are too few; `as_dict()` and a text. `generate` is called
    at least 14 times: the first two calls are compared, the next two measured for memory, the rest timed in turns. The
    random state is restored afterwards.
    """
    from fastgen.optimizer.decoding import verify

    hosts = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    if "fairseq" in hosts and hasattr(model, "search"):
        from fastgen.optimizer.fairseq.generate import FairseqCall

        return verify.verify(FairseqCall(model, inputs, generate_kwargs), enabled)
    if callable(getattr(model, "generate", None)):
        _check_transformers()
        from fastgen.optimizer.transformers.verification import VerifiedCall

        return verify.verify(VerifiedCall(model, inputs, generate_kwargs), enabled)
    accepted = "a model of transformers with generate, a generator of fairseq"
    raise TypeError(f"model is a {type(model).__name__} (accepted: {accepted})")


def log_likelihoods(
    model: Any, contexts: Sequence[Any], continuations: Sequence[Any], tokenizer: Any = None, **options: Any
) -> list[tuple[float, bool]]:
    """Returns for each continuation of a context the sum of log-probabilities, and whether it is the greedy one.

        fastgen.log_likelihoods(model, [question] * 4, [" yes", " no", " perhaps", " never"], tokenizer)

    model: a decoder-only model of transformers. contexts, continuations: lists of the same length, of lists of token
    ids; or of strings, with the tokenizer. options: `tokens_per_batch`, the number of tokens in a forward (default
    8192). The common prefix of contexts, and a context with several continuations, is computed once: see `explain()`.
    Results are those of a forward of each context with its continuation, to 1e-4 in fp32.
    """
    _check_transformers()
    from fastgen.optimizer.transformers import log_likelihoods

    return log_likelihoods.log_likelihoods(model, contexts, continuations, tokenizer, **options)


def token_log_probs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    completion_length: int,
    temperature: float = 1.0,
    entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns the log-probabilities of each row's last tokens, `[rows, completion_length]`, differentiable.

        log_probs = fastgen.token_log_probs(model, input_ids, attention_mask, completion_length=64)

    model: a decoder-only model of transformers. input_ids, attention_mask: int64 `[rows, length]`, prompts padded on
    the left and completions on the right, as trainers make them; None means a mask of ones. completion_length: the
    number of last columns to score, less than `length`. temperature: divides the logits. entropy: whether to return the
    pair of log-probabilities and entropies of the same distributions. Both are float32, float64 if the model is, and 0
    for tokens that the mask hides or that follow a hidden one.

    What rows have in common at their beginning, such as the prompt of several completions, or of a chosen and a
    rejected one, goes through the model once, forward and backward: see `explain()`. Results and gradients are those of
    a forward of all rows, to 1e-5 in fp32.
    """
    _check_transformers()
    from fastgen.optimizer.transformers import token_log_probs

    return token_log_probs.token_log_probs(model, input_ids, attention_mask, completion_length, temperature, entropy)


@contextmanager
def reusing_prefix(model: Any, check_weights: bool = True) -> Iterator[None]:
    """Makes calls of the model's `generate` in this thread or task reuse keys and values of the previous call.

        with fastgen.reusing_prefix(model):
            for question in questions:
                model.generate(**tokenizer(SYSTEM_PROMPT + question, return_tensors="pt"))

    model: a decoder-only model of transformers. One row of keys and values is kept until the block ends: those of the
    last prompt, or of the common prefix of the last batch. Tokens that later prompts share with it are not computed
    again, if the model is unchanged. check_weights: whether to read all weights in each call to detect changes, which
    takes about as long as a decode step; pass False if nothing writes into them in the block. `explain()` reports what
    was kept.
    """
    _check_transformers()
    from fastgen.optimizer.decoding.call import setting
    from fastgen.optimizer.transformers.kept_prefix import PrefixReuse

    with setting(PrefixReuse(model, check_weights)):
        yield


def _check_transformers() -> None:
    """Raises ImportError with the wanted and the installed version if transformers is too old."""
    if why := upgrade_reason(models.LOWEST["transformers"], "transformers"):
        raise ImportError(why)


def __getattr__(name: str) -> Any:
    if name == "PrefixTrie":
        from fastgen.ops.prefix_trie import PrefixTrie

        return PrefixTrie
    if name == "TextGenerator":
        from fastgen.batch.generator import TextGenerator

        return TextGenerator
    raise AttributeError(f"module 'fastgen' has no attribute {name!r}")


start_logging(CONFIG.log)
models.register()
if CONFIG.auto or CONFIG.disable:
    enable()
else:
    PATCH_SET.skip("FASTGEN_AUTO=0")

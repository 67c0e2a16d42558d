"""Hooks of the tests: what fastgen has captured and compared, and parts that are watched, replaced or bounded.

Tests use these instead of fastgen's internals, which only this file names. Each context manager restores everything
when its block ends; none may be used by several threads at the same time.
"""

import functools
import importlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from fastgen import ops, testing
from fastgen.optimizer import PATCH_SET
from fastgen.testing import configured

_DECODING = "fastgen.optimizer.decoding"
_TRANSFORMERS = "fastgen.optimizer.transformers"
_FAIRSEQ = "fastgen.optimizer.fairseq"

# The parts that tests watch, break or replace: what each does, and where the code that uses it looks it up.
PARTS = {
    # Captured steps.
    "capture a step": f"{_DECODING}.graphs:CapturedStep.capture",
    "capture kernels": f"{_DECODING}.graphs:CpuCapture.capture",
    "compare a replay": f"{_DECODING}.captures:differs_sync",
    "fill a static cache": f"{_DECODING}.static_kv_cache:StaticKVCache.load",
    "grow a static cache": f"{_DECODING}.decode_step:StaticSteps.over",
    "static step": f"{_DECODING}.decode_step:StaticSteps.outputs_of",
    "masks of a step": f"{_TRANSFORMERS}.decode_step:StepMasks.reveal",
    "masks were built": f"{_TRANSFORMERS}.decode_step:StepMasks.keep_sync",
    "pad inputs": f"{_TRANSFORMERS}.decode_step:TransformersDecodeStep._pad",
    "wait for a flag": f"{_TRANSFORMERS}.decode_step:needs_sync",
    "check for the end, a step late": f"{_DECODING}.decode_step:LateFlags.exchange",
    # Caches.
    "copy a layer": f"{_DECODING}.kv_cache:KVCache.copy",
    "read segments": f"{_DECODING}.kv_cache:KVCache.segments",
    "copy a static layer": f"{_DECODING}.static_kv_cache:StaticKVCache.copy",
    "reorder a cache": f"{_DECODING}.kv_cache:KVCache.reorder",
    "use a cache": f"{_TRANSFORMERS}.decode_step:kv_layers.use",
    # The loops.
    "decode step": f"{_TRANSFORMERS}.decode_step:TransformersDecodeStep.logits",
    "compact a step": f"{_TRANSFORMERS}.decode_step:TransformersDecodeStep.compact",
    "compact a step's cache": f"{_DECODING}.decode_step:DecodeStep.compact",
    "compact samples": f"{_TRANSFORMERS}.token_loop:TokenLoop.compact",
    "draw samples": f"{_TRANSFORMERS}.token_loop:_draw",
    "draw as torch": f"{_TRANSFORMERS}.token_loop:_draws_as_torch",
    "choose beams, fairseq": f"{_FAIRSEQ}.loop:Loop.propose",
    "extend beams, fairseq": f"{_FAIRSEQ}.loop:Loop.advance",
    "collect beams, fairseq": f"{_FAIRSEQ}.loop:Loop.collect",
    "reorder, fairseq": f"{_FAIRSEQ}.decode_step:FairseqDecodeStep.reorder",
    # Prompts and prefixes.
    "expand a prefill": f"{_TRANSFORMERS}.prefill:PrefillPlan._expand",
    "take a row of each group": f"{_TRANSFORMERS}.row_groups:take",
    "compare rows": f"{_TRANSFORMERS}.row_groups:_equal_to_row_before_sync",
    "arguments of a prefix": f"{_TRANSFORMERS}.prefixes:CommonPrefix.of_prefix",
    "keep a prefix": f"{_TRANSFORMERS}.kept_prefix:PrefixReuse.keep",
    "check a draft": f"{_TRANSFORMERS}.drafts:DraftedSteps._check",
    "forward of a draft": f"{_TRANSFORMERS}.drafts:DraftedSteps._forward",
    "find a prefix": f"{_TRANSFORMERS}.kept_prefix:PrefixReuse.match_sync",
    "read weights": f"{_TRANSFORMERS}.kept_prefix:weights_of",
    "score tokens": f"{_TRANSFORMERS}.log_likelihoods:Scorer._log_probs",
    "streams of ProphetNet": f"{_TRANSFORMERS}.models.prophetnet:_streams",
    # Facts about a model, and reports of calls.
    "line of a report": f"{_DECODING}.report:Report.summary",
    "walk through a model": f"{_DECODING}.model_info:ModelInfo",
    "compare a model": f"{_DECODING}.guards:Guards.check",
    "measure a model": f"{_DECODING}.cost_model:_measured",
    "end a call": f"{_DECODING}.call:GenerateCall.__exit__",
    "changes in a call": f"{_DECODING}.call:GenerateCall.change_of",
    "reasons of rows": f"{_TRANSFORMERS}.checks:CallChecks._row_reasons",
    "states of rows": f"{_TRANSFORMERS}.checks:CallChecks.row_states",
    "trial": "fastgen.optimizer.trust:_conclude",
    "faster forwards": f"{_TRANSFORMERS}.call:faster_forwards",
    # Ops.
    "reasons against oneDNN": "fastgen.ops.cpu_linear:machine_reasons",
    "shared attention": f"{_DECODING}.segmented_kv:shared_attention",
    "no-repeat n-gram": "fastgen.ops.no_repeat_ngram:no_repeat_ngram",
    "no-repeat n-gram, in place": "fastgen.ops.no_repeat_ngram:no_repeat_ngram_",
    # Kernels of an operation.
    "top k in one stage": "beam top k/torch",
    "attention, few queries": "shared attention/C++ few queries",
    "attention, many queries": "shared attention/C++ many queries",
}

# Bounds that tests lower, so that small inputs reach them.
LIMITS = {
    "smallest_capacity": f"{_DECODING}.static_kv_cache:SMALLEST_CAPACITY",
    "most_graphs": f"{_DECODING}.graph_cache:MOST_GRAPHS",
    "beams_of_part": "fastgen.ops.beams:PART",
    "min_elements_of_thread": "fastgen.ops.norms:RMS_ELEMENTS_OF_THREAD",
    "min_elements_of_norm": "fastgen.ops.norms:LAYER_ELEMENTS_OF_THREAD",
    "min_elements_of_gelu": "fastgen.ops.activations:GELU_ELEMENTS_OF_THREAD",
    "min_elements_to_draw": f"{_TRANSFORMERS}.token_loop:MIN_ELEMENTS_TO_DRAW",
}

# For `costs`: makes every model large enough for its products to be considered.
ANY_SIZE = {"min_large": 0.0}


def replaced(part: str, by: Callable) -> AbstractContextManager[None]:
    """Calls `by` in place of one of `PARTS`, see `fastgen.testing.replaced`."""
    return testing.replaced(*place_of(PARTS[part]), by)


def watched(part: str) -> AbstractContextManager[list[testing.Call]]:
    """Yields a list to which each call of one of `PARTS` is appended when it ends."""
    return testing.watched(*place_of(PARTS[part]))


def broken(
    part: str, error: BaseException | type[BaseException], after: int = 0
) -> AbstractContextManager[list[testing.Call]]:
    """Raises an error in one of `PARTS`, as if it were fastgen's own; after: the number of calls that work before."""
    return testing.watched(*place_of(PARTS[part]), error, after)


@contextmanager
def limits(**values: int) -> Iterator[None]:
    """Sets some of `LIMITS`."""
    with ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch.object(*place_of(LIMITS[name]), value))
        yield


@contextmanager
def costs(**thresholds: Any) -> Iterator[None]:
    """Gives calls that begin inside, in any thread, a cost model with these thresholds."""
    from fastgen.optimizer.decoding import cost_model

    settings = vars(cost_model.DEFAULT) | thresholds
    with mock.patch.object(cost_model, "DEFAULT", cost_model.CostModel(**settings)):
        yield


@contextmanager
def force(backend: str) -> Iterator[list[int]]:
    """Treats all products as large, and computes them with one GEMM backend: "BLAS", "oneDNN" or "skinny GEMM".

    Yields a list to which the number of rows of each product is appended.
    """
    asked: list[int] = []

    def fastest(rows: Any, *others: Any) -> str:
        asked.append(len(rows))
        return backend

    with mock.patch.multiple("fastgen.ops.cpu_linear", MIN_ELEMENTS=0, fastest=fastest):
        yield asked


@contextmanager
def without(name: str) -> Iterator[None]:
    """Makes kernels of this name, such as "C++", unsupported, for operations that choose a kernel in each call."""
    with ExitStack() as stack:
        for kernel in itertools.chain(*ops.kernels().values()):
            if kernel.name.partition(" ")[0] == name:
                stack.enter_context(mock.patch.object(kernel, "unsupported_reasons", lambda: ["none was built"]))
        yield


def captured_graphs(model: Any) -> dict[Any, Any]:
    """Returns a model's captured steps between two calls, by key, the latest last."""
    from fastgen.optimizer.decoding import graph_cache

    cache = graph_cache._graph_caches.get(model)
    return {} if cache is None else dict(cache.entries)


def captures_of(refused: list[Any]) -> SimpleNamespace:
    """Returns what a `CapturedStep` needs of the `Captures` of a call; its refusals are added to `refused`."""
    from fastgen.optimizer.decoding.graphs import CpuCapture

    graphs = SimpleNamespace(refused=refused, backend=CpuCapture())
    loop = SimpleNamespace(logits_of=lambda outputs: outputs)
    call = SimpleNamespace(report=SimpleNamespace(kernels=Counter()))
    return SimpleNamespace(graphs=graphs, loop=loop, remembers=True, call=call, refuse=refused.append)


def holds_graphs(model: Any) -> bool:
    """Whether a call holds the captured steps of a model, so that no other call may use them."""
    from fastgen.optimizer.decoding import graph_cache

    return graph_cache._graph_caches[model].in_use.locked()


def proven() -> set[object]:
    """Returns the keys of trials at first use that showed no difference."""
    from fastgen.optimizer import trust

    return {key for key, different in trust._outcomes.items() if different is None}


def refused() -> set[str]:
    """Returns what differed in trials at first use."""
    from fastgen.optimizer import trust

    return {different for different in trust._outcomes.values() if different is not None}


def accept(sources: Iterable[str]) -> None:
    """Adds the sources of the installed hosts to contracts.json: a test has found equal results with them."""
    from fastgen.optimizer import trust

    accepted = json.loads(trust.CONTRACTS.read_text(encoding="utf-8"))
    for source in sources:
        if (hashes := trust._hashes(source)) is not None:
            accepted.setdefault(source, {})[hashes[0]] = hashes[1]
    lines = (f"{json.dumps(name)}: {json.dumps(accepted[name], sort_keys=True)}" for name in sorted(accepted))
    trust.CONTRACTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


@contextmanager
def fresh_trust(unknown: tuple[str, ...] = (), accepted: bool = False) -> Iterator[None]:
    """Forgets earlier trials, and at the end those made inside.

    unknown: prefixes of sources that count as unknown. accepted: whether all sources count as accepted.
    """
    from fastgen.optimizer import trust
    from fastgen.optimizer.transformers import first_use
    from fastgen.optimizer.transformers import sources as sources_of_models

    original = trust.unknown_sources

    def unknown_sources(sources: Iterable[str]) -> dict[str, str | None]:
        sources = [*sources]
        played = {source: trust.hash_of(source) for source in sources if source.startswith(unknown)} if unknown else {}
        really_unknown = original(sources)
        return {} if accepted else really_unknown | played

    with (
        mock.patch.multiple(trust, _outcomes={}, _inconclusive=Counter(), unknown_sources=unknown_sources),
        mock.patch.object(trust, "_stored", dict),
        mock.patch.object(first_use, "_trials", WeakKeyDictionary()),
        mock.patch.object(sources_of_models, "_unknown", WeakKeyDictionary()),
    ):
        yield


@contextmanager
def errors_noted() -> Iterator[list[str]]:
    """Leaves calls to the library after an error of fastgen's own, as without FASTGEN_STRICT=1; patches stay on.

    Yields a list to which the errors are appended.
    """
    errors: list[str] = []
    note = mock.patch.object(PATCH_SET, "fail", lambda group, reason, error: errors.append(str(error)))
    with configured(strict=False), note:
        yield errors


def place_of(path: str) -> tuple[Any, str]:
    """Returns the class, module or kernel of one of `PARTS` or `LIMITS`, and the name of its attribute."""
    operation, is_kernel, kernel = path.partition("/")
    if is_kernel:
        return next(one for one in ops.kernels()[operation] if one.name == kernel), "run"
    module, _, names = path.partition(":")
    *owners, name = names.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), name

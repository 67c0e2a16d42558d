"""Random calls of `generate` with fastgen against the unpatched library, in one process.

    python tests/helpers/fuzz.py --comparisons 20000        # as `make fuzz`
    python tests/helpers/fuzz.py --first 4711 --comparisons 1

Prints each difference with the seed that draws it again, and counts at the end. Exit status 1 if anything differed.
"""

import argparse
import copy
import dataclasses
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count, islice
from typing import Any
from unittest.mock import patch

import numpy
import torch
import transformers
from architectures import SPECIAL
from copied_text import Forced, Noting, Stops, copying
from fuzz_cases import Case, draw, draw_copying, model_of
from fuzz_changes import PROGRAMS
from hooks import ANY_SIZE, costs, force
from parity import assert_equal_outputs
from reports import capturing
from torch import nn
from transformers import DynamicCache

import fastgen
from fastgen.models.cache_names import CACHE
from fastgen.ops import cpu_linear
from fastgen.optimizer.transformers import kv_layers
from fastgen.optimizer.transformers.drafts import DraftedSteps
from fastgen.testing import configured

HALF_TOLERANCE = 0.25
TIE = 1e-4
COPIED = "copied text"  # in place of a context: all cases generate a text that copies its prompt


@dataclass
class Outcome:
    """A verdict: equal, tie (scores agree to 1e-4), both raise, or different; and if anything was shared."""

    verdict: str
    detail: str = ""
    shared: bool = False


def compare(case: Case) -> Outcome:
    """Runs the case with and without fastgen."""
    with ExitStack() as stack:
        model = model_of(case.name, case.dtype)
        arguments = _arguments(case)
        if case.by_embeddings and (ids := case.inputs.pop("input_ids", None)) is not None:
            case.inputs["inputs_embeds"] = model.get_input_embeddings()(ids).detach()
        stack.enter_context(_around(case, model))
        expected = _result(lambda: _with_states(model, case, arguments, stock=True))
        output = _result(lambda: _with_states(model, case, arguments, stock=False))
        report = fastgen.explain()
        shared = report is not None and bool(report.shared)
    if isinstance(expected, Exception) or isinstance(output, Exception):
        if type(expected) is type(output):
            return Outcome("both raise", repr(output), shared)
        return Outcome("different", f"stock: {_short(expected)}; fastgen: {_short(output)}", shared)
    try:
        assert_equal_outputs(expected, output, HALF_TOLERANCE if case.is_half else 1e-4)
    except AssertionError as error:
        if case.tokens_only:  # scores tell a tie
            with_scores = compare(dataclasses.replace(case, tokens_only=False))
            return with_scores if with_scores.verdict == "tie" else Outcome("different", str(error)[:300], shared)
        verdict = "tie" if _all_ties(expected[0], output[0]) else "different"
        return Outcome(verdict, " ".join(str(error).split())[:300], shared)
    return Outcome("equal", shared=shared)


def _arguments(case: Case) -> dict[str, Any]:
    arguments = dict(case.arguments)
    if not case.tokens_only:
        arguments |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    if case.is_half:
        tokens = torch.randint(5, 90, (4, 16), generator=torch.Generator().manual_seed(case.seed)).tolist()
        arguments["prefix_allowed_tokens_fn"] = lambda batch, ids: [tokens[batch % 4][ids.shape[0] % 16]]
    return arguments


def _with_states(model: nn.Module, case: Case, arguments: dict[str, Any], stock: bool) -> tuple:
    """Returns the result of generate, and the states of all random numbers afterwards."""
    program = PROGRAMS.get(case.program)
    if case.keeps_state or program:
        model = copy.deepcopy(model)
    torch.manual_seed(case.seed)
    numpy.random.seed(case.seed % 2**32)
    random.seed(case.seed)

    def generate_with(model: Any, edit: Callable[[dict], dict] = dict, **more: Any) -> Any:
        if program:
            result = _result(lambda: model.generate(**edit(case.inputs), **arguments, **more))
            return type(result).__name__ if isinstance(result, Exception) else result
        if case.copies:
            return _with_copied_text(model, case, arguments)
        if not (case.stops or case.passes_cache):
            return model.generate(**case.inputs, **arguments)
        objects: dict[str, Any] = {}
        if case.stops:
            objects["stopping_criteria"] = [Stops()]
        if case.passes_cache:
            objects[CACHE] = DynamicCache(config=model.config)
        result = model.generate(**case.inputs, **arguments, **objects)
        notes = [call for criterion in objects.get("stopping_criteria", ()) for call in criterion.calls]
        return result, notes, objects.get(CACHE)

    def generate() -> Any:
        with fastgen.disabled() if stock else nullcontext():
            return program(random.Random(case.seed), model, generate_with) if program else generate_with(model)

    if case.context == "two threads" and not arguments["do_sample"] and not case.keeps_state:
        with ThreadPoolExecutor(2) as pool:
            result = tuple(call.result() for call in [pool.submit(generate) for _ in range(2)])
        generate() if not stock else None  # leaves the report in this thread
    else:
        result = generate()
    return result, torch.get_rng_state(), torch.from_numpy(numpy.random.get_state()[1].copy()), random.random()


def _with_copied_text(model: nn.Module, case: Case, arguments: dict[str, Any]) -> tuple:
    """Returns the result of generate, and what user code was called with, for a text that copies the prompt."""
    choice = random.Random(case.seed)
    noting = Noting(choice.choice((None, 9, 30)))
    prompt = next(iter(case.inputs.values()))
    source = case.inputs.get("input_ids", torch.ones(prompt.shape[:2], dtype=torch.long))
    own = case.inputs.get("decoder_input_ids", torch.ones(len(source), 1)) if case.kind == "seq2seq" else source
    texts = copying(source, 40, case.seed)
    if case.pads:
        for text in texts:
            for position in choice.sample(range(40), 5):
                text[position] = SPECIAL["pad_token_id"]
    forces = Forced(texts, own.shape[1] * (not case.by_embeddings), choice.choice((0, 0, 3, 7)))
    more: dict[str, Any] = {"logits_processor": [forces, *([noting] if choice.random() < 0.5 else [])]}
    if noting.stops_at:
        more["stopping_criteria"] = [noting]
    if len(source) == 1 and choice.random() < 0.5:
        more["streamer"] = noting
    result = model.generate(**case.inputs, **arguments, **more)
    return result, [value for call in noting.calls for value in call if value is not None]


@contextmanager
def _around(case: Case, model: nn.Module) -> Iterator[None]:
    """Does what user code has done before it calls generate."""
    with ExitStack() as stack:
        by_gates = case.context in ("default gates", "repeated keys", "keys written in place")
        stack.enter_context(configured(share="auto" if by_gates else "always"))
        if case.context != "default gates":
            stack.enter_context(costs(min_computed=0.0))  # drafts of tiny models
        if case.copies:
            stack.enter_context(patch.object(DraftedSteps, "_cost", lambda self, rows, size: 1.0))
        if case.context in ("repeated keys", "keys written in place"):  # the prompt once, and its keys for each row
            stack.enter_context(costs(prefill_overhead=0.0))
        if case.context == "keys written in place":
            stack.enter_context(costs(min_elements_in_place=0))
        if case.context == "inference mode":
            stack.enter_context(torch.inference_mode())
        elif case.context == "autocast":
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        elif case.context == "poisoned memory":  # memory that is read unwritten is NaN
            torch.use_deterministic_algorithms(True, warn_only=True)
            stack.callback(torch.use_deterministic_algorithms, False)
        if case.context.startswith("captured"):
            stack.enter_context(capturing(drafts="auto"))
        if case.context.endswith((cpu_linear.ONEDNN, cpu_linear.SKINNY_GEMM)):
            way, backends = case.context.rpartition(", ")[2], list(cpu_linear.gemm_backends(case.dtype))
            way = way if way in backends else backends[-1]
            stack.enter_context(force(way))
            stack.enter_context(costs(**ANY_SIZE))
        if case.context.startswith("training mode"):
            stack.callback(model.eval)
            model.train()
            if case.context.endswith("without dropout"):
                _drop_nothing(stack, model)
        elif case.context == "compiled forward":
            torch.compiler.reset()
            model.forward = torch.compile(model.forward, backend="eager", fullgraph=True, dynamic=True)
            stack.callback(delattr, model, "forward")
        yield


def _drop_nothing(stack: ExitStack, model: nn.Module) -> None:
    """Makes all dropouts 0, those of modules and those in attributes and configurations."""
    owners = [owner for module in model.modules() for owner in (module, getattr(module, "config", None)) if owner]
    for owner in owners:
        for name, value in vars(owner).items():
            is_rate = "drop" in name or (name == "p" and isinstance(owner, nn.Dropout))
            if is_rate and type(value) in (float, int):
                stack.enter_context(patch.object(owner, name, 0.0))


def _result(call: Any) -> Any:
    try:
        return call()
    except Exception as error:
        return error


def _short(result: Any) -> str:
    return repr(result)[:200] if isinstance(result, Exception) else "returns"


def _all_ties(expected: Any, output: Any) -> bool:
    """Returns whether the first difference among the calls of user code is a tie."""
    if not isinstance(expected, (list, tuple)):
        return _is_tie(expected, output)
    for pair in zip(expected, output):
        try:
            assert_equal_outputs(*pair)
        except AssertionError:
            return _is_tie(*pair)
    return False


def _is_tie(expected: Any, output: Any) -> bool:
    """Returns whether only rounding decided: between equal scores, or of a token at the edge of top-p."""
    if (
        not (hasattr(expected, "sequences") and hasattr(output, "sequences"))
        or expected.sequences.shape != output.sequences.shape
    ):
        return False
    if not torch.allclose(expected.logits[0], output.logits[0], rtol=TIE, atol=TIE):  # before anything was decided
        return False
    if "sequences_scores" in expected:
        if torch.equal(expected.sequences, output.sequences):
            return _have_changed_places(_by_row(expected), _by_row(output))
        return torch.allclose(expected.sequences_scores, output.sequences_scores, rtol=0, atol=TIE)
    for step, (stock, fast) in enumerate(zip(expected.logits, output.logits)):
        if not torch.allclose(stock, fast, rtol=TIE, atol=TIE):
            return False
        if not torch.equal(expected.scores[step].isinf(), output.scores[step].isinf()):
            return True
        position = step - len(expected.logits)  # counted from the end
        best, second = expected.scores[step].topk(2).values.unbind(-1)
        if (expected.sequences != output.sequences)[:, position].any():
            return bool((best - second < TIE).any())
    return False


def _by_row(outputs: Any) -> list[torch.Tensor]:
    """Returns scores of all steps, and keys of all layers, `[rows, …]`: the last step may have moved rows."""
    cache = outputs.get("past_key_values")
    layers = [] if cache is None else kv_layers.layers_of(cache)
    keys = [layer.keys.flatten(1) for layer in layers if isinstance(getattr(layer, "keys", None), torch.Tensor)]
    return [*outputs.scores, *(states for states in keys if states.shape[0] == outputs.scores[0].shape[0])]


def _have_changed_places(expected: list[torch.Tensor], values: list[torch.Tensor]) -> bool:
    """Returns whether values of rows, `[rows, size]` each, differ by the order of their rows only."""
    apart = [(a[:, None] - b[None]).nan_to_num().abs().amax(-1) for a, b in zip(expected, values)]
    moved = any((distances.diagonal() > TIE).any() for distances in apart)
    return moved and all((distances.min(dim).values < TIE).all() for distances in apart for dim in (0, 1))


def run(
    first: int,
    comparisons: int,
    seconds: float = float("inf"),
    context: str = "",
    is_enough: Callable[[Counter[str]], bool] = lambda counts: False,
) -> tuple[Counter[str], list[str]]:
    """Returns counts of verdicts ("equal, shared", …), and a line for each case that differed.

    context: a part of the contexts' names, among these and later seeds. is_enough: tells from the counts so far that
    no more comparisons are needed.
    """
    counts: Counter[str] = Counter()
    differences = []
    end = time.monotonic() + seconds
    if context == COPIED:
        cases = map(draw_copying, count(first))
    else:
        cases = (case for case in map(draw, count(first)) if context in case.context)
    for case in islice(cases, comparisons):
        if time.monotonic() > end or is_enough(counts):
            break
        outcome = compare(case)
        counts[f"{outcome.verdict}, {'shared' if outcome.shared else 'left alone'}"] += 1
        if outcome.verdict in ("different", "tie"):
            differences.append(f"{outcome.verdict}: {case}\n    {outcome.detail}")
            print(differences[-1], flush=True)
    return counts, differences


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (default: 0)")
    parser.add_argument("--comparisons", type=int, default=20_000, metavar="N", help="default: 20000")
    parser.add_argument(
        "--context", default="", metavar="NAME", help=f"only cases with this in their surroundings' name, or {COPIED!r}"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="S", help="stop after so many")
    arguments = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts, differences = run(arguments.first, arguments.comparisons, arguments.seconds, arguments.context)
    print(f"{sum(counts.values())} comparisons from seed {arguments.first} on, transformers {transformers.__version__}")
    for verdict, number in counts.most_common():
        print(f"{number:7} {verdict}")
    return int(any(line.startswith("different") for line in differences))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

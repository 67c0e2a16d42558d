"""User code put into fairseq, before and between calls, does under fastgen what it does without it."""

import functools
import types
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fairseq import search, utils
from fairseq.models.transformer import transformer_decoder
from fairseq.modules import FairseqDropout, MultiheadAttention, transformer_layer
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator
from fairseq_generation import BEAMS, assert_same_hypotheses, compare, generate, run_both
from fairseq_models import CASES, RECURRENT, Case, build, prompts, source_sample, translation, translation_task
from parity import Both
from reports import capturing, replays
from torch.nn import functional

import fastgen
from fastgen.testing import configured

SAMPLING = pytest.mark.parametrize("options", [{}, {"sampling": True}], ids=("beams", "samples"))


@pytest.fixture(scope="module")
def case():
    return CASES["transformer"]()


@pytest.fixture
def lenient():
    """Lets an error of fastgen leave the work to fairseq, as for users, and checks that none did."""
    with configured(strict=False):
        yield
    states = {state.state for state in fastgen.status() if state.group == "fairseq.generation"}
    assert states == {"applied"}


def prepared(case: Case, prepare: Callable[[Any], Any], inference: dict | None = None, **options: Any) -> Callable:
    """Returns a call with a generator that user code has prepared."""

    def call() -> list:
        generator = case.task.build_generator(case.models, Namespace(**BEAMS | options))
        prepare(generator)
        return case.task.inference_step(generator, case.models, case.sample, **inference or {})

    return call


def same(case: Case, prepare: Callable[[Any], Any] = lambda generator: None, **options: Any) -> Both:
    both = run_both(prepared(case, prepare, **options))
    assert_same_hypotheses(both.stock, both.fast)
    return both


@pytest.mark.parametrize("name", ("transformer", "bart"))
def test_hooks_of_the_user_see_the_same_states(name):
    case, seen = CASES[name](), []
    layer = case.models[0].decoder.layers[1]
    layer.register_forward_hook(lambda module, args, output: seen.append((args[0].shape, output[0].detach().clone())))
    same(case, inference=case.inference)
    stock, fast = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert [shape for shape, _ in stock] == [shape for shape, _ in fast] and len(stock) > 5
    for (_, expected), (_, output) in zip(stock, fast, strict=True):
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)


class ScaledAttention(MultiheadAttention):
    def forward(self, query, key, value, *args, **kwargs):
        return super().forward(query * 2.0, key, value, *args, **kwargs)


class OwnFeatures(transformer_decoder.TransformerDecoder):
    """A decoder that changes from the thirteenth token on, which a graph would not see."""

    def extract_features(self, tokens, *args, **kwargs):
        features, extra = super().extract_features(tokens, *args, **kwargs)
        return (-features if tokens.shape[1] > 12 else features), extra


class OwnConnection(transformer_layer.TransformerDecoderLayer):
    def residual_connection(self, x, residual):
        return residual + x * 0.5


class OwnLinear(torch.nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) * 1.5


OWN_CLASSES = [
    ("transformer", "layers.0.encoder_attn", ScaledAttention),
    ("bart", "layers.0.encoder_attn", ScaledAttention),
    ("transformer_lm", "", OwnFeatures),
    ("transformer_lm", "layers.0", OwnConnection),
    ("transformer_lm", "layers.0.fc1", OwnLinear),
]


@pytest.mark.parametrize(("name", "place", "own"), OWN_CLASSES)
def test_classes_of_the_user_keep_their_methods(name, place, own):
    case, options = CASES[name](), {"max_len_b": 30, "min_len": 20}
    with fastgen.disabled():
        plain = generate(case, **options)
    case.models[0].decoder.get_submodule(place).__class__ = own
    with capturing():
        both = compare(case, **options)
    assert not replays(both.report) and {"USER_CODE", "MODEL_STATE"} & both.report.codes()
    with pytest.raises(AssertionError):
        assert_same_hypotheses(plain, both.fast)


def counted(owner: Any, name: str, seen: list) -> Any:
    """Returns this function, which now notes the shapes of its arguments."""
    original = getattr(owner, name)

    def call(*args, **kwargs):
        seen.append([list(value.shape) for value in args if isinstance(value, torch.Tensor)])
        return original(*args, **kwargs)

    return call


def in_generator(path: str) -> Callable[[Any], Any]:
    return lambda generator: functools.reduce(getattr, path.split("."), generator) if path else generator


COUNTED = {  # the case, where the method is, its name
    "prefix tokens of one generator": ("transformer", in_generator(""), "_prefix_tokens"),
    "states of the ensemble": ("transformer", EnsembleModel, "reorder_incremental_state"),
    "outputs of the encoder": ("transformer", EnsembleModel, "reorder_encoder_out"),
    "a step of one search": ("transformer_lm", in_generator("search"), "step"),
    "steps of all searches": ("transformer_lm", search.BeamSearch, "step"),
    "hypotheses of all generators": ("transformer", SequenceGenerator, "finalize_hypos"),
    "the decoder, with all rows": ("transformer", transformer_decoder.TransformerDecoderBase, "extract_features"),
    "a function of torch": ("transformer", torch, "topk"),
}


@pytest.mark.parametrize("what", COUNTED)
def test_functions_that_user_code_replaces_are_called_alike(what, monkeypatch):
    name, owner, method = COUNTED[what]
    case, seen, options = CASES[name](), [], {}
    is_of_generator = isinstance(owner, types.FunctionType)

    def replace(generator: Any) -> None:
        if is_of_generator:
            monkeypatch.setattr(owner(generator), method, counted(owner(generator), method, seen), raising=False)

    if not is_of_generator:
        monkeypatch.setattr(owner, method, counted(owner, method, seen))
    if name == "transformer_lm":
        case.sample, options = prompts(case.task.dictionary, (6, 6, 6)), {"beam": 2, "max_len_b": 12}
    else:
        options["inference"] = {"prefix_tokens": case.sample["net_input"]["src_tokens"][:, :2]}
    same(case, replace, **options)
    assert len(seen) > 2 and seen[: len(seen) // 2] == seen[len(seen) // 2 :]
    assert owner is not torch or "FUNCTION_REPLACED" in fastgen.explain().codes()


def scaled(original: Any) -> Any:
    return lambda *args, **kwargs: original(*args, **kwargs) * 1.1


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (utils, "softmax"),
        (MultiheadAttention, "apply_sparse_mask"),
        (transformer_layer.TransformerDecoderLayerBase, "residual_connection"),
        (transformer_decoder.TransformerDecoderBase, "output_layer"),
        (functional, "linear"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_user_code_in_modules_of_fairseq_is_called(monkeypatch, owner, name):
    case, original = CASES["transformer"](), getattr(owner, name)
    with capturing():
        generate(case)
        before = fastgen.explain()
        # The mask is a static method: what replaces it gets the attention, too.
        masking = lambda self, weights, *args: original(self, weights, *args) * 1.1  # noqa: E731
        monkeypatch.setattr(owner, name, masking if name == "apply_sparse_mask" else scaled(original))
        report = compare(case, accelerated=False).report
    assert replays(before) and not replays(report)
    assert any(reason.code == "USER_CODE" and name in reason.text for _, reason in report.not_done)


# Random numbers, and rows that end.


@SAMPLING
@pytest.mark.parametrize("order", (1, -1))
def test_an_ensemble_with_another_model_is_left_alone(order, options):
    task = translation_task()
    models = [build("transformer", task, 3, 1.5), build("lstm", task, 3, 1.5, **RECURRENT)]
    case = Case(models[::order], task, source_sample(task, lengths=[6, 3, 9]))
    compare(case, accelerated=False, **options)


@SAMPLING
@pytest.mark.parametrize("part", ("dropout", "decoder"))
def test_dropout_switched_on_in_a_generator_counts(part, options):
    case = translation("transformer", [122], 1.5, dropout=0.3, attention_dropout=0.3)

    def train(generator):
        for module in case.models[0].modules():
            if part == "decoder" or isinstance(module, FairseqDropout):
                module.train()

    plain = generate(case, **options)
    with pytest.raises(AssertionError):
        assert_same_hypotheses(plain, same(case, train, **options).fast)


@SAMPLING
def test_layerdrop_is_left_to_fairseq(options):
    compare(translation("transformer", [122], 1.5, decoder_layerdrop=0.2), accelerated=False, **options)


def test_finished_rows_do_not_change_the_draws_of_others():
    case = CASES["transformer_align"]()
    options = {"no_repeat_ngram_size": 3, "sampling": True, "sampling_topp": 0.99, "beam": 6, "max_len_a": 1.0}
    compare(case, source_sample(case.task, [1], 633950), **options)


# Errors of user code are raised once, and the next call works.


class Fails(search.Sampling):
    """A search that raises an error, or returns None, from its fifth step on."""

    def __init__(self, dictionary: Any, answer: Any) -> None:
        super().__init__(dictionary)
        self.answer, self.steps = answer, []

    def step(self, step, *args, **kwargs):
        self.steps.append(step)
        if step < 4:
            return super().step(step, *args, **kwargs)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("answer", (ValueError("budget"), None), ids=("an error", "no answer"))
def test_a_failing_search_is_called_once_a_step(answer, lenient):
    case, searches = CASES["transformer"](), []

    def run():
        searches.append(Fails(case.task.target_dictionary, answer))
        with pytest.raises((ValueError, TypeError)) as error:
            prepared(case, lambda generator: setattr(generator, "search", searches[-1]))()
        return str(error.value), torch.rand(1).item()

    both = run_both(run)
    assert both.stock == both.fast and [search.steps for search in searches] == 2 * [[*range(5)]]
    compare(case)


def test_fairseq_draws_the_same_if_fastgen_is_disabled(lenient):
    case = CASES["transformer"]()

    class SwitchesOff(search.Sampling):
        def step(self, *args, **kwargs):
            fastgen.disable()
            return super().step(*args, **kwargs)

    def run():
        try:
            words = case.task.target_dictionary
            return prepared(case, lambda generator: setattr(generator, "search", SwitchesOff(words)))()
        finally:
            fastgen.enable()

    torch.manual_seed(7)
    with fastgen.disabled():
        expected = run()
    torch.manual_seed(7)
    assert_same_hypotheses(expected, run())

"""What a program does with fairseq's generator that fastgen's loop must notice: it then does the same, or nothing."""

from __future__ import annotations

import types
from argparse import Namespace

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import search
from fairseq.modules import FairseqDropout
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator
from fairseq_generation import BEAMS, assert_same_hypotheses, compare, generate, run_both
from fairseq_models import CASES, RECURRENT, Case, build, source_sample, translation, translation_task

import fastgen
from fastgen.testing import configured


@pytest.fixture
def lenient():
    """As users run it: an error of fastgen's own leaves the work to fairseq."""
    with configured(strict=False):
        yield


def states():
    return {state.state for state in fastgen.status() if state.group == "fairseq.generation"}


@pytest.mark.parametrize("options", [{}, {"sampling": True}], ids=("beams", "samples"))
@pytest.mark.parametrize("order", [0, 1])
def test_an_ensemble_with_a_model_that_is_not_known(order, options):
    task = translation_task()
    models = [build("transformer", task, 3, 1.5), build("lstm", task, 3, 1.5, **RECURRENT)]
    case = Case(models[:: -1 if order else 1], task, source_sample(task, lengths=[6, 3, 9]))
    compare(case, accelerated=False, **options)


class TestMethodsThatAreReplaced:
    def call(self, case, prepare=lambda generator: None, **inference):
        def run():
            generator = case.task.build_generator(case.models, Namespace(**BEAMS))
            prepare(generator)
            return case.task.inference_step(generator, case.models, case.sample, **inference)

        both = run_both(run)
        assert_same_hypotheses(both.stock, both.fast)
        return both.fast

    @pytest.mark.parametrize("on_the_class", [True, False])
    def test_finalize_hypos(self, on_the_class, monkeypatch):
        own = SequenceGenerator.finalize_hypos

        def finalize_hypos(self, step, index, eos_scores, *args, **kwargs):
            return own(self, step, index, eos_scores - step, *args, **kwargs)

        case = CASES["transformer"]()
        plain = generate(case)
        if on_the_class:
            monkeypatch.setattr(SequenceGenerator, "finalize_hypos", finalize_hypos)
            found = self.call(case)
        else:
            found = self.call(case, lambda g: setattr(g, "finalize_hypos", types.MethodType(finalize_hypos, g)))
        assert found[0][0]["score"] < plain[0][0]["score"] - 0.5

    def test_prefix_tokens_of_one_generator(self):
        case, calls = CASES["transformer"](), []

        def count(generator):
            own = generator._prefix_tokens
            generator._prefix_tokens = lambda *args: calls.append(1) or own(*args)

        self.call(case, count, prefix_tokens=case.sample["net_input"]["src_tokens"][:, :2])
        assert len(calls) % 2 == 0 and calls

    @pytest.mark.parametrize("name", ["reorder_incremental_state", "reorder_encoder_out"])
    def test_reorders_of_the_ensemble(self, name, monkeypatch):
        calls, own = [], getattr(EnsembleModel, name)
        monkeypatch.setattr(EnsembleModel, name, lambda *args: calls.append(1) or own(*args))
        self.call(CASES["transformer"]())
        assert len(calls) % 2 == 0 and calls


@pytest.mark.parametrize("part", ["dropout", "decoder"])
@pytest.mark.parametrize("options", [{}, {"sampling": True}], ids=("beams", "samples"))
def test_dropout_that_is_switched_on_after_the_generator_was_built(part, options):
    case = translation("transformer", [122], 1.5, dropout=0.3, attention_dropout=0.3)

    def run():
        generator = case.task.build_generator(case.models, Namespace(**BEAMS | options))
        for module in case.models[0].modules():
            if part == "decoder" or isinstance(module, FairseqDropout):
                module.train()
        return case.task.inference_step(generator, case.models, case.sample)

    both = run_both(run)
    assert_same_hypotheses(both.stock, both.fast)


@pytest.mark.parametrize("options", [{}, {"sampling": True}], ids=("beams", "samples"))
def test_layers_that_are_dropped_in_training_draw_random_numbers_always(options):
    compare(translation("transformer", [122], 1.5, decoder_layerdrop=0.2), accelerated=False, **options)


def test_a_prefix_that_ends_its_sentence():
    case = CASES["pre-norm, learned positions"]()
    compare(
        case, source_sample(case.task, [20], 3), max_len_b=5, inference={"prefix_tokens": torch.tensor([[30, 15, 2]])}
    )


class RaisesOnce(search.Sampling):
    raised = False

    def step(self, step, *args, **kwargs):
        if step == 4 and not self.raised:
            self.raised = True
            raise ValueError("budget")
        return super().step(step, *args, **kwargs)


def test_an_error_of_the_program_is_the_program_s(lenient):
    case = CASES["transformer"]()

    def run():
        generator = case.task.build_generator(case.models, Namespace(**BEAMS))
        generator.search = RaisesOnce(case.task.target_dictionary)
        with pytest.raises(ValueError, match="budget"):
            case.task.inference_step(generator, case.models, case.sample)
        return torch.rand(1)

    both = run_both(run)
    assert torch.equal(both.stock, both.fast) and states() == {"applied"}


def test_a_failing_search_of_the_program_is_called_once_a_step(lenient):
    case, calls = CASES["transformer"](), []

    class HasNoAnswer(search.Sampling):
        def step(self, step, *args, **kwargs):
            calls.append(step)
            return super().step(step, *args, **kwargs) if step < 4 else None

    def run():
        generator = case.task.build_generator(case.models, Namespace(**BEAMS))
        generator.search = HasNoAnswer(case.task.target_dictionary)
        with pytest.raises(TypeError) as error:
            case.task.inference_step(generator, case.models, case.sample)
        return str(error.value), torch.rand(1).item()

    both = run_both(run)
    assert both.stock == both.fast and calls == 2 * [*range(5)] and states() == {"applied"}


def test_switched_off_on_the_way_fairseq_goes_on_with_the_same_random_numbers(lenient):
    case = CASES["transformer"]()

    class SwitchesOff(search.Sampling):
        def step(self, *args, **kwargs):
            fastgen.disable()
            return super().step(*args, **kwargs)

    def run():
        generator = case.task.build_generator(case.models, Namespace(**BEAMS))
        generator.search = SwitchesOff(case.task.target_dictionary)
        try:
            return case.task.inference_step(generator, case.models, case.sample)
        finally:
            fastgen.enable()

    torch.manual_seed(7)
    with fastgen.disabled():
        expected = run()
    torch.manual_seed(7)
    assert_same_hypotheses(expected, run())
    assert states() == {"applied"}


def test_rows_that_have_ended_do_not_move_the_draws_of_others():
    case = CASES["transformer_align"]()
    options = {"no_repeat_ngram_size": 3, "sampling": True, "sampling_topp": 0.99, "beam": 6, "max_len_a": 1.0}
    compare(case, source_sample(case.task, [1], 633950), **options)

"""The decoding loop for fairseq: its reads of the device, its forwards, and the calls that it leaves to fairseq."""

import sys
from argparse import Namespace
from types import FunctionType
from unittest import mock

import pytest
import torch
from fairseq.modules import MultiheadAttention
from fairseq.sequence_generator import SequenceGenerator
from fairseq_generation import BEAMS, assert_same_hypotheses, compare, generate, run_both
from fairseq_models import CASES, prompts
from hooks import replaced, watched
from python_process import REPOSITORY, run_code
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import fastgen
from fastgen.optimizer.decoding.call import generate_call


class HostReads(TorchDispatchMode):
    """Counts the operations that wait for the device: reading a number, and results whose size depends on values."""

    _READING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2")

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        by_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        if name in self._READING or by_mask:
            self.reads.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ("pre-norm, learned positions", "bart"))
def test_each_step_reads_the_device_once(name):
    """From the second step on, the host waits only for the flags of candidates that have ended."""
    case, reads = CASES[name](), []

    def counted(function, self, proposed, *args):
        """Choosing gets the number of the step, extending what was proposed in it."""
        with HostReads() as mode:
            result = function(self, proposed, *args)
        reads.extend(mode.reads if getattr(proposed, "step", proposed) > 0 else ())
        return result

    beams = replaced("choose beams, fairseq", counted), replaced("extend beams, fairseq", counted)
    with watched("collect beams, fairseq") as collected, beams[0], beams[1]:
        generate(case)
    assert reads == []
    assert len(collected) > 5
    with fastgen.disabled(), HostReads() as mode:
        generate(case)
    assert len(mode.reads) > 3 * len(collected), "upstream waits several times in each step"


def test_no_step_asks_whether_tokens_are_padding():
    """Such a read would wait for the device in every step."""
    reads = []
    original = torch.Tensor.any

    def counted(tensor: torch.Tensor, *args, **kwargs):
        reads.append(tensor.shape)
        return original(tensor, *args, **kwargs)

    case = CASES["transformer"]()
    with mock.patch.object(torch.Tensor, "any", counted):
        generate(case)
        ours = len([shape for shape in reads if shape])
        reads.clear()
        with fastgen.disabled():
            generate(case)
    assert ours <= 3 < len(reads)


def test_a_prompt_is_fed_by_steps_if_a_layer_is_fairseqs():
    case = CASES["transformer_lm"]()
    case.models[0].decoder.layers[1].self_attn.skip_embed_dim_check = True
    both = compare(case)
    assert not any("prompt" in item for item in both.report.shared) and both.report.shared


def test_a_prompt_is_computed_in_one_pass():
    """The decoder gets the whole common prompt once, with one row per input, and then one step after the other."""
    case, shapes = CASES["transformer_lm"](), []
    sample = prompts(case.task.dictionary, (6, 6, 6))
    decoder = type(case.models[0].decoder)
    original = decoder.forward

    def watched(self, tokens, *args, **kwargs):
        shapes.append((tuple(tokens.shape), kwargs.get("incremental_state") is not None))
        return original(self, tokens, *args, **kwargs)

    # Named like a function of fairseq: user code would see each step.
    names = {"__name__": "fairseq.watched", "shapes": shapes, "original": original}
    watched = FunctionType(watched.__code__, names, closure=watched.__closure__)
    with mock.patch("fastgen.optimizer.fairseq.checks.TransformerDecoderBase.forward", watched):
        generate(case, sample, beam=2, max_len_b=12)
    assert shapes[0] == ((3, 7), False)
    assert shapes[1] == ((6, 8), True)
    assert "the first 6 tokens of the prompt: once per input, in one pass" in fastgen.explain().shared


@pytest.mark.parametrize("masked", (None, "additive", "boolean"))
def test_encoder_attention_inside_a_generation_is_not_torchs(masked):
    attention = MultiheadAttention(8, 2, self_attention=True).eval()
    query, padding = torch.randn(5, 2, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    boolean = torch.ones(5, 5, dtype=torch.bool).triu(1)
    mask = {"additive": torch.zeros(5, 5).masked_fill(boolean, -torch.inf), "boolean": boolean}.get(masked)

    def call() -> tuple:
        with torch.no_grad():
            return attention(query, query, query, padding, need_weights=False, attn_mask=mask)

    with fastgen.disabled():
        expected, _ = call()
    with mock.patch.object(functional, "multi_head_attention_forward", side_effect=LookupError):
        with generate_call("test") as running:
            running.is_accelerated = True
            attended, weights = call()
        with pytest.raises(LookupError):
            call()
    torch.testing.assert_close(attended, expected, atol=1e-5, rtol=1e-5)
    assert weights is None


def test_the_encoder_output_is_never_repeated():
    case = CASES["transformer"]()
    names = set()
    sys.setprofile(lambda frame, *_: names.add(frame.f_code.co_name))
    try:
        generate(case)
    finally:
        sys.setprofile(None)
    assert "forward_encoder" in names and "reorder_encoder_out" not in names


class Finalizes(SequenceGenerator):
    def finalize_hypos(self, *args, **kwargs):
        return super().finalize_hypos(*args, **kwargs)


LEFT_ALONE = {
    "Finalizes.finalize_hypos is not that of SequenceGenerator": lambda case, generator: setattr(
        generator, "__class__", Finalizes
    ),
    "is in training mode": lambda case, generator: case.models[0].train(),
    "dropout stays on during inference": lambda case, generator: setattr(
        case.models[0].decoder.dropout_module, "apply_during_inference", True
    ),
    "layers of the decoder are used more than once": lambda case, generator: setattr(
        case.models[0].decoder, "layers", torch.nn.ModuleList([case.models[0].decoder.layers[0]] * 2)
    ),
}


@pytest.mark.parametrize("reason", LEFT_ALONE)
def test_calls_left_to_fairseq_have_a_reason(reason):
    case = CASES["transformer"]()
    generator = case.task.build_generator(case.models, Namespace(**BEAMS))
    LEFT_ALONE[reason](case, generator)
    both = run_both(lambda: generator.generate(case.models, case.sample))
    assert_same_hypotheses(both.stock, both.fast)
    assert any(reason in fallback for fallback in both.report.fallbacks), both.report
    assert not both.report.shared


def test_errors_of_arguments_are_those_of_fairseq():
    case = CASES["transformer"]()
    for options in ({"min_len": 30, "max_len_b": 5}, {"inference": {"constraints": torch.zeros(5, 1).long()}}):
        with fastgen.disabled(), pytest.raises((AssertionError, NotImplementedError)) as expected:
            generate(case, **options)
        with pytest.raises(expected.type, match=str(expected.value)[:20]):
            generate(case, **options)


FAILS = """
import fastgen
from fairseq_models import CASES, prompts
from fairseq_generation import generate
from hooks import broken
with broken("choose beams, fairseq", TypeError("of the loop")):
    generate(CASES["bart"]())
report = fastgen.explain()
print(report.shared, report.fallbacks)
"""


def test_after_an_error_of_fastgen_nothing_was_shared():
    """fairseq does the work again, and in all later calls; seen in a process of its own."""
    last = run_code(FAILS, path=REPOSITORY / "tests" / "helpers").splitlines()[-1]
    assert last.startswith("[] ['decoding loop: TypeError: of the loop', 'patches: fairseq.generation is switched off")


def test_explain_tells_what_was_shared():
    case = CASES["bart"]()
    report = compare(case).report
    assert report.model == "BARTModel" and (report.inputs, report.rows) == (5, 15)
    assert "cross-attention keys and values: once per input, 2 layers" in report.shared
    assert "encoder output: never repeated" in report.shared
    assert report.fallbacks == []

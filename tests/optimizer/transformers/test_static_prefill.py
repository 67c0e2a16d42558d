"""Static caches by name: the prefill runs once per input, and all other steps are the library's."""

from unittest import mock

import pytest
import torch
from architectures import INDEXED, LATENT
from hooks import replaced
from parity import assert_equal_outputs, compared, run_both, same_tokens
from reports import PREFILL, is_shared, left_alone_because
from tiny_models import BEAMS, BOTH, SAMPLES, padded, tiny
from torch._dynamo.utils import counters
from transformers import CompileConfig
from versions import needs

import fastgen
from fastgen.optimizer.decoding.report import Reason
from fastgen.optimizer.transformers.call import GROWS

pytestmark = pytest.mark.usefixtures("share_always")

STATIC = {"cache_implementation": "static"}
SEQ2SEQ = ("bart", "t5")


def build(name):
    sizes = {"mistral": {"sliding_window": 6}, "gemma2": {"sliding_window": 11}, "deepseek_v3": LATENT}
    sizes["deepseek_v32"] = LATENT | INDEXED
    return tiny(name, **sizes.get(name, {}))


@BOTH
@pytest.mark.parametrize("name", ("llama", "gpt2", "mistral", "gemma2", "deepseek_v3", *SEQ2SEQ))
def test_the_prefill_runs_once_per_input_into_the_same_cache(name, arguments, rows):
    model, several = build(name), 3 if arguments is BEAMS else 4
    both = compared(model, padded(9, 5), **arguments, **STATIC)  # compares all that the layers of both caches hold
    assert both.report.shared == [PREFILL] and both.report.kernels == {}
    stock, fast = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    assert len(stock) == len(fast) and fast.count(2 * several) < stock.count(2 * several)


@BOTH
@pytest.mark.parametrize("name", ("llama", "mistral", "bart"))
def test_a_static_cache_that_nobody_sees_grows_on_a_cpu(name, arguments):
    model = build(name)
    report = same_tokens(model, padded(9, 5), **arguments, **STATIC)
    assert GROWS in report.shared and is_shared(report)
    model.generation_config.cache_implementation = "static"
    assert GROWS in same_tokens(model, padded(9, 5), **arguments).shared
    assert GROWS not in same_tokens(model, padded(9, 5), **arguments, compile_config=CompileConfig()).shared
    model.model.register_forward_hook(lambda module, args, output: None)
    assert GROWS not in same_tokens(model, padded(9, 5), **arguments).shared


@needs("torch", "2.7", "the library takes CUDA's streams, which need a GPU")
@BOTH
def test_offloaded_static_caches_share_the_prefill(arguments):
    stream = type("Stream", (mock.MagicMock,), {"__module__": "torch"})
    with mock.patch.object(torch, "Stream", stream), mock.patch("torch.cuda.default_stream"):
        both = compared(build("llama"), padded(9, 5), **arguments, cache_implementation="offloaded_static")
    assert both.report.shared == [PREFILL] and both.fast.past_key_values.offloading


@BOTH
def test_whisper_shares_the_prefill_of_static_caches(arguments):
    features = {"input_features": torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(1))}
    assert compared(tiny("whisper"), features, **arguments, **STATIC).report.shared == [PREFILL]


@BOTH
def test_the_library_may_use_the_same_static_cache_next(arguments):
    model, other = build("llama"), {"max_new_tokens": 4, "do_sample": False, "num_beams": 4}
    with fastgen.disabled():
        expected = model.generate(**padded(7, 8), **other, **STATIC)
    assert compared(model, padded(9, 5), **arguments, **STATIC).report.shared == [PREFILL]
    with fastgen.disabled():
        assert torch.equal(model.generate(**padded(7, 8), **other, **STATIC), expected)


@BOTH
def test_a_model_with_states_gets_an_empty_static_cache(arguments):
    with replaced("states of rows", lambda *args: [Reason("MODEL_STATE", "its state")]):
        both = compared(build("llama"), padded(9, 5), **arguments, **STATIC)
    assert left_alone_because(both.report, "MODEL_STATE", "its state")


@pytest.mark.slow
def test_steps_are_compiled_as_often_as_by_the_library():
    model = build("deepseek_v3")
    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    graphs = []

    def call():
        torch.compiler.reset()
        counters.clear()
        result = [model.generate(**padded(9, 5), **SAMPLES, **STATIC, compile_config=config) for _ in range(2)]
        graphs.append(counters["stats"]["unique_graphs"])
        return result

    both = run_both(call)
    assert_equal_outputs(both.stock, both.fast)
    assert both.report.shared == [PREFILL]
    assert graphs[0] == graphs[1] > 0


CHUNKS = needs("transformers", "5.6", "it fails with chunks")
INDEX = needs("transformers", "5.12", "no DeepSeek-V3.2")


@BOTH
@pytest.mark.parametrize(
    ("name", "options", "why"),
    (
        pytest.param("llama", {"prefill_chunk_size": 4}, "CHUNKED_PREFILL", marks=CHUNKS),
        pytest.param("deepseek_v32", {}, "CACHE_LAYERS", marks=INDEX),
    ),
)
def test_other_prefills_of_static_caches_are_left_alone(name, options, why, arguments):
    both = compared(build(name), padded(9, 5), **arguments, **STATIC, **options)
    assert left_alone_because(both.report, why)

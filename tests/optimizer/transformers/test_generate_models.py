"""Models, number formats and ways to run them have the same outputs; `explain()` tells what was shared or why not."""

import inspect
from collections.abc import Callable

import numpy
import pytest
import torch
from architectures import BY_NAME
from parity import assert_equal_outputs, assert_same, run_both
from reports import CROSS, PREFILL, PROMPT, is_materialized, is_shared, left_alone_because
from tiny_models import BEAMS, BOTH, SAMPLES, inputs_of, lively, padded, tiny, token_ids
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from versions import needs

import fastgen

NAMES = ("llama", "gpt2", "bart", "t5")

pytestmark = pytest.mark.usefixtures("share_always")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("kind", "attention"),
    [("autocast", "sdpa"), *((kind, attention) for kind in ("bfloat16", "float16") for attention in ("eager", "sdpa"))],
)
def test_half_precision_agrees_up_to_rounding(name, attention, kind):
    """Tokens are forced on every row, so that rounding cannot change what the later steps compute."""
    model, forced = tiny(name), token_ids(2, 3, seed=4)
    model.set_attn_implementation(attention)
    if kind != "autocast":
        model.to(getattr(torch, kind))

    def only(batch, ids):
        return [int(forced[batch % forced.shape[0], ids.shape[0] % forced.shape[1]])]

    outputs = {"return_dict_in_generate": True, "output_logits": True, "prefix_allowed_tokens_fn": only}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
        both = run_both(lambda: model.generate(**padded(9, 5), **SAMPLES, **outputs))
    assert is_shared(both.report, PROMPT)
    assert len(both.stock.logits) == len(both.fast.logits) == 7
    tolerance = {"bfloat16": 0.15, "float16": 0.02, "autocast": 0.2}[kind]
    for stock, fast in zip(both.stock.logits, both.fast.logits):
        assert stock.dtype == fast.dtype
        torch.testing.assert_close(fast.float(), stock.float(), atol=tolerance, rtol=tolerance)


@needs("torch", "2.5", "no flex attention")
def test_flex_attention_gets_materialized_keys():
    model = tiny("llama")
    model.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"):
        report = assert_same(model, padded(9, 5), **BEAMS)
    assert report.shared[0] == PREFILL
    assert is_materialized(report)


def test_whisper_shares_prompts_of_language_task_and_text():
    model, features = tiny("whisper"), inputs_of("whisper", 1, 1)
    config = model.generation_config
    config.is_multilingual, config.no_timestamps_token_id = True, 70
    config.lang_to_id, config.task_to_id = {"<|en|>": 60, "<|de|>": 61}, {"transcribe": 65, "translate": 66}
    config.prev_sot_token_id = 55
    for more in ({"language": "en"}, {"language": ["en", "de"]}, {"prompt_ids": torch.tensor([55, 11, 12, 13])}):
        more = {"task": "translate", "language": "de", "num_beams": 3, "max_new_tokens": 6} | more
        both = run_both(lambda m=more: model.generate(**features, **m))
        assert torch.equal(both.stock, both.fast)
        assert is_shared(both.report, PROMPT, CROSS)


@needs("transformers", "5.6", "BERT fails with a mask")
@pytest.mark.parametrize("name", ("bert", "roberta", "xlm-roberta", "electra", "camembert", "ernie"))
@BOTH
def test_forwards_that_return_no_cache_are_shared(name, arguments):
    model = tiny(f"{name}-encoder")
    assert not model.config.is_decoder
    assert is_shared(assert_same(model, padded(9, 5), **arguments), PROMPT)


@needs("transformers", "5.23", "BigBird fails")
@BOTH
def test_random_numbers_of_sparse_attention_are_unchanged(arguments):
    sizes = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 2, "max_position_embeddings": 128}
    models = iter([tiny("big_bird", **sizes), tiny("big_bird", **sizes)])  # each gives up sparse attention for good

    def call():
        numpy.random.seed(7)
        return next(models).generate(**padded(60, 50), **arguments), numpy.random.random()

    both = run_both(call)
    assert_equal_outputs(both.stock, both.fast)
    assert left_alone_because(both.report, "ROWS_COUPLED")


@pytest.mark.parametrize("name", ("bart", "t5", "pegasus", "marian", "m2m_100"))
@pytest.mark.parametrize("attention", ("eager", "sdpa"))
def test_a_row_whose_mask_hides_everything_is_shared(name, attention):
    model = tiny(name, max_position_embeddings=512, n_positions=512)
    model.set_attn_implementation(attention)
    inputs = padded(300, 7, 1, side="right")  # 300 keys: a product of its own for few queries
    inputs["attention_mask"][1] = 0
    for arguments in (BEAMS, SAMPLES, {"num_beams": 8, "max_new_tokens": 7}):
        assert is_shared(assert_same(model, inputs, **arguments), CROSS)


def compile_child(path: str, name: str) -> Callable[[nn.Module], None]:
    def compile_it(model: nn.Module) -> None:
        owner = model.get_submodule(path)
        setattr(owner, name, torch.compile(getattr(owner, name), backend="eager"))

    return compile_it


COMPILED = {
    "the model in place": lambda model: model.compile(backend="eager"),
    "its forward": compile_child("", "forward"),
    "an attention": compile_child("model.layers.1", "self_attn"),
    "the forward of a layer": compile_child("model.layers.1", "forward"),
}


@pytest.mark.parametrize("what", COMPILED)
def test_models_compiled_in_any_part_are_left_alone(what):
    model = tiny("llama")
    COMPILED[what](model)
    assert left_alone_because(assert_same(model, padded(9, 5), **BEAMS), "COMPILED")


def test_a_compiled_wrapper_shares_like_the_model_inside():
    assert is_shared(assert_same(torch.compile(tiny("llama"), backend="eager"), padded(9, 5), **BEAMS), PROMPT)


class TestAdapters:
    @pytest.fixture(autouse=True)
    def import_peft(self):
        self.peft = pytest.importorskip("peft")

    def adapted(self, config, name="llama", *others: str) -> nn.Module:
        model = self.peft.get_peft_model(tiny(name), config)
        for other in others:
            model.add_adapter(other, config)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "lora_" in parameter_name or "prompt" in parameter_name:
                    parameter.normal_(0, 0.3, generator=generator)
        return model.eval()

    @pytest.mark.parametrize("name", NAMES)
    def test_lora_adapters_are_shared(self, name):
        config = self.peft.LoraConfig(r=4, target_modules="all-linear")
        for arguments in (BEAMS, SAMPLES):
            assert is_shared(assert_same(self.adapted(config, name), padded(9, 5), **arguments), PROMPT)

    def test_an_adapter_for_each_input_is_left_alone(self):
        config = self.peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model, names = self.adapted(config, "llama", "other"), {"adapter_names": ["default", "other"]}
        assert left_alone_because(assert_same(model, padded(9, 5), **BEAMS, **names), "HOOKS")

    @pytest.mark.parametrize("method", ("PrefixTuningConfig", "PromptTuningConfig"))
    def test_virtual_tokens_are_shared(self, method):
        config = getattr(self.peft, method)(task_type="CAUSAL_LM", num_virtual_tokens=5)
        for arguments in (BEAMS, SAMPLES):
            assert is_shared(assert_same(self.adapted(config), padded(9, 5), **arguments), PROMPT)


@pytest.mark.parametrize("inputs", ((9, 5), (9,)), ids=("two inputs", "one input"))
def test_hooks_of_a_model_see_all_rows(inputs):
    model, rows = tiny("llama"), 4 * len(inputs)
    steering = torch.randn(rows, 1, 32, generator=torch.Generator().manual_seed(5))
    model.model.layers[0].register_forward_hook(lambda module, args, hidden_states: hidden_states + steering)
    assert left_alone_because(assert_same(model, padded(*inputs), **SAMPLES), "HOOKS")


def test_hooks_of_all_modules_see_all_rows():
    seen = []
    hook = register_module_forward_hook(lambda module, args, output: seen.append(len(args[0]) if args else 0))
    try:
        report = assert_same(tiny("llama"), padded(9, 5), **SAMPLES)
    finally:
        hook.remove()
    assert left_alone_because(report, "HOOKS") and seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def test_models_with_offloaded_weights_are_shared(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    parts = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "model.layers.0", "lm_head"), "cpu")
    places = parts | {"model.layers.1": "disk"}
    model = accelerate.dispatch_model(tiny("llama"), places, main_device="cpu", offload_dir=str(tmp_path))
    assert is_shared(assert_same(model, padded(9, 5), **BEAMS), PROMPT)
    model = accelerate.cpu_offload(tiny("bart"), execution_device=torch.device("cpu")) or tiny("bart")
    assert is_shared(assert_same(model, padded(9, 5), **BEAMS), PROMPT, CROSS)


@BOTH
def test_generation_with_gradients_is_left_alone(arguments):
    model = tiny("llama")
    outputs = {"return_dict_in_generate": True, "output_logits": True}

    def call():
        model.zero_grad()
        returned = inspect.unwrap(type(model).generate)(model, **padded(9, 5), **arguments, **outputs)
        torch.stack(returned.logits).square().mean().backward()
        return model.lm_head.weight.grad.clone()

    both = run_both(call, must_report=False)  # this call bypasses the `generate` that reports
    assert torch.equal(both.stock, both.fast)


def test_a_model_with_states_of_the_last_call_is_left_alone():
    recurrent = BY_NAME["recurrent_gemma"]
    models = iter([recurrent.model() for _ in range(2)])
    arguments = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 3}

    def call():
        model = lively(next(models))
        with fastgen.disabled():
            model.generate(token_ids(1, 4), **arguments)
        outputs = {"return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True}
        return model.generate(token_ids(1, 1), **arguments, **outputs)

    stock, fast, report = run_both(call)
    assert torch.equal(torch.stack(stock.logits), torch.stack(fast.logits))
    assert_equal_outputs(stock.hidden_states, fast.hidden_states)
    assert left_alone_because(report, "MODEL_STATE")

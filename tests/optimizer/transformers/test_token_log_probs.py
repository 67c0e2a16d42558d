"""`fastgen.token_log_probs` agrees with a forward of all rows by the library, in scores and gradients."""

from __future__ import annotations

from dataclasses import replace
from types import FunctionType

import pytest
import torch
from architectures import ARCHITECTURES, WITHOUT_PREFIX
from hooks import costs, fresh_trust, proven
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from reports import is_materialized, left_alone_because
from tiny_models import tiny, token_ids
from torch.nn import functional

import fastgen
from fastgen.optimizer.decoding.cost_model import CPU
from fastgen.testing import configured

pytestmark = pytest.mark.usefixtures("share_always")

CAUSAL = [each for each in ARCHITECTURES if each.kind == "causal"]
NOT_SHARED = WITHOUT_PREFIX | {"minimax": "CACHE_LAYERS"}
# Models that compute nothing in fp32 when they are fp64.
IN_FP64 = "gpt2 gpt_neox gpt_bigcode opt biogpt ctrl phi stablelm starcoder2 persimmon falcon nemotron roformer".split()
COLUMNS = 5
GROUPS = [0, 1, 0, 2, 1, 0, 1]  # ragged, not adjacent, and one alone


def completions(groups=GROUPS, prompt: int = 9, columns: int = COLUMNS) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and mask of completions of several prompts, with padding on the left and on the right."""
    prompts, mask = token_ids(max(groups) + 1, prompt, seed=3), torch.ones(max(groups) + 1, prompt, dtype=torch.long)
    mask[1::2, :3], prompts[1::2, :3] = 0, 1
    input_ids = torch.cat([prompts[groups], token_ids(len(groups), columns, seed=5)], dim=1)
    mask = torch.cat([mask[groups], torch.ones(len(groups), columns, dtype=torch.long)], dim=1)
    mask[2::3, -2:] = 0
    return input_ids, mask


def scored(model, input_ids, mask, columns=COLUMNS, **options):
    """Returns log-probabilities, entropies, and the gradients of all parameters of a loss that weighs each token."""
    model.zero_grad(set_to_none=True)
    log_probs, entropies = fastgen.token_log_probs(model, input_ids, mask, columns, 0.9, entropy=True, **options)
    weights = torch.arange(1.0, log_probs.numel() + 1).view(log_probs.shape) / log_probs.numel()
    (log_probs * weights + entropies.square()).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return log_probs.detach(), entropies.detach(), gradients


def assert_agrees(model, input_ids, mask, columns=COLUMNS, tolerance=1e-5):
    """Compares with the plain pass, which takes the library's forward, and leaves the report of the shared one."""
    with fastgen.disabled():
        *plain, plain_gradients = scored(model, input_ids, mask, columns)
    *values, gradients = scored(model, input_ids, mask, columns)
    for value, expected in zip(values, plain, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=tolerance)
    of_all = torch.stack([gradient.norm() for gradient in plain_gradients]).norm()
    for gradient, expected in zip(gradients, plain_gradients, strict=True):
        # Some are 0 but for rounding: those of biases of keys.
        assert (gradient - expected).norm() <= tolerance * (expected.norm() + 0.01 * of_all)


@pytest.fixture
def tokens(monkeypatch):
    """The number of tokens that the embedding sees, one for each forward."""
    counted, embedding = [], functional.embedding

    def counting(input, *args, **kwargs):
        counted.append(input.numel())
        return embedding(input, *args, **kwargs)

    # Named like torch's own function: user code in a forward would be given all rows.
    names = {"__name__": "torch.nn.functional"}
    monkeypatch.setattr(functional, "embedding", FunctionType(counting.__code__, names, closure=counting.__closure__))
    return counted


@pytest.mark.parametrize("architecture", CAUSAL, ids=lambda architecture: architecture.id)
def test_every_architecture_agrees_with_the_plain_pass(architecture):
    model = tiny(architecture.id).eval()
    assert_agrees(model, *completions())
    report = fastgen.explain()
    if (code := NOT_SHARED.get(architecture.id)) is None:
        assert report.prefix_tokens_saved == 8 * 4 and not is_materialized(report)
    else:
        assert left_alone_because(report, code)


@pytest.mark.parametrize("name", IN_FP64)
def test_models_in_fp64_agree_to_1e_10(name):
    assert_agrees(tiny(name).double().eval(), *completions(), tolerance=1e-10)
    assert fastgen.explain().prefix_tokens_saved == 8 * 4


@settings(max_examples=25, deadline=None)
@given(
    groups=st.lists(st.integers(0, 3), min_size=1, max_size=7),
    prompt=st.integers(1, 8),
    columns=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_ragged_groups_agree(groups, prompt, columns, seed):
    random = torch.Generator().manual_seed(seed)
    prompts = torch.randint(5, 8, (4, prompt), generator=random)  # so few tokens that beginnings end anywhere
    input_ids = torch.cat([prompts[groups], torch.randint(5, 8, (len(groups), columns), generator=random)], dim=1)
    starts = torch.randint(0, prompt, (4, 1), generator=random)[groups]
    ends = torch.randint(prompt + 1, prompt + columns + 1, (len(groups), 1), generator=random)
    places = torch.arange(prompt + columns)
    mask = ((places >= starts) & (places < ends)).long()
    assert_agrees(tiny("gpt2").double().eval(), input_ids, mask, columns, tolerance=1e-10)


# The first use of a model: two rows of six tokens, then two that they have in common, and the other four.
TRIAL = (2 * 6, 2, 2 * 4)


def test_beginnings_go_through_the_model_once_per_group(tokens):
    model, (input_ids, mask) = tiny("llama"), completions()
    fastgen.token_log_probs(model, input_ids, mask, COLUMNS)
    # After the trial: two beginnings of 8 columns with 6 rests of 5, and a row alone of 14.
    assert tokens == [*TRIAL, 2 * 8, 6 * 5, 14]
    tokens.clear()
    with fastgen.disabled():
        fastgen.token_log_probs(model, input_ids, mask, COLUMNS)
    assert tokens == [7 * 14]


def test_pairs_share_beginnings_that_differ_in_length(tokens):
    input_ids = token_ids(4, 20)
    input_ids[2, :15], input_ids[3, :9] = input_ids[0, :15], input_ids[1, :9]  # chosen, chosen, rejected, rejected
    mask = torch.ones_like(input_ids)
    mask[1, 16:] = mask[2, 18:] = 0
    model = tiny("llama")
    assert_agrees(model, input_ids, mask, columns=19)  # of all tokens, of which beginnings are scored once
    tokens.clear()
    assert_agrees(model, input_ids, mask, columns=4)
    assert tokens[1:] == [8, 2 * 11, 14, 2 * 5] and fastgen.explain().prefix_tokens_saved == 22


def test_groups_of_unequal_beginnings_share_their_forwards(tokens):
    input_ids = token_ids(4, 20)
    input_ids[2, :15], input_ids[3, :14] = input_ids[0, :15], input_ids[1, :14]
    with configured(share="auto"), costs(rates=replace(CPU, module=0.0)):
        assert_agrees(tiny("llama"), input_ids, None, columns=4)
    assert tokens[1:] == [*TRIAL, 2 * 13, 4 * 6]


def test_scores_of_hidden_tokens_are_zero_with_zero_gradients():
    model, (input_ids, mask) = tiny("llama"), completions()
    for context in (fastgen.enabled(), fastgen.disabled()):
        with context:
            log_probs = fastgen.token_log_probs(model, input_ids, mask, COLUMNS)
        assert torch.equal(log_probs == 0, mask[:, -COLUMNS:] == 0)


def test_entropy_and_temperature_are_those_of_the_distribution():
    model, input_ids = tiny("llama"), token_ids(3, 12)
    log_probs, entropies = fastgen.token_log_probs(model, input_ids, None, 5, temperature=0.7, entropy=True)
    distributions = (model(input_ids).logits[:, -6:-1] / 0.7).log_softmax(dim=-1)
    expected = distributions.gather(-1, input_ids[:, -5:, None]).squeeze(-1)
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies, -(distributions.exp() * distributions).sum(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_scores_without_gradients_are_shared(mode):
    model, (input_ids, mask) = tiny("llama"), completions()
    with mode():
        log_probs = fastgen.token_log_probs(model, input_ids, mask, COLUMNS)
        assert fastgen.explain().prefix_tokens_saved == 8 * 4
        with fastgen.disabled():
            expected = fastgen.token_log_probs(model, input_ids, mask, COLUMNS)
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("gradients", (True, False))
def test_autocast_shares_and_agrees_within_its_rounding(gradients):
    model, (input_ids, mask) = tiny("llama"), completions()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(gradients):
        log_probs = fastgen.token_log_probs(model, input_ids, mask, COLUMNS)
        assert fastgen.explain().prefix_tokens_saved == 8 * 4
    exact = fastgen.token_log_probs(model, input_ids, mask, COLUMNS)
    with torch.autocast("cpu", dtype=torch.bfloat16), fastgen.disabled():
        rounded = fastgen.token_log_probs(model, input_ids, mask, COLUMNS)
    assert log_probs.dtype == torch.float32 and log_probs.requires_grad is gradients
    assert (log_probs - exact).abs().max() < 2 * (rounded - exact).abs().max() + 1e-3


def test_adapters_share_switched_on_and_off():
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model, (input_ids, mask) = get_peft_model(tiny("llama"), config), completions()
    assert_agrees(model, input_ids, mask)
    with_adapter = fastgen.token_log_probs(model, input_ids, mask, COLUMNS)
    with model.disable_adapter(), torch.no_grad():
        without = fastgen.token_log_probs(model, input_ids, mask, COLUMNS)
    assert fastgen.explain().prefix_tokens_saved == 8 * 4
    assert (with_adapter - without).abs().max() > 1e-3
    torch.testing.assert_close(without, fastgen.token_log_probs(tiny("llama"), input_ids, mask, COLUMNS))


def test_scores_of_unknown_models_are_compared_by_configuration():
    input_ids, mask = completions()
    with fresh_trust(unknown=("transformers.models.",)):
        for compared, (layers, dtype) in enumerate(((1, torch.float32), (2, torch.float32), (2, torch.float64)), 1):
            model = tiny("llama", num_hidden_layers=layers).to(dtype)
            first, second = (fastgen.token_log_probs(model, input_ids, mask, COLUMNS) for _ in range(2))
            torch.testing.assert_close(first, second, rtol=0, atol=1e-4)
            assert len(proven()) == compared and fastgen.explain().prefix_tokens_saved


@pytest.mark.parametrize(("config", "code"), ((PrefixTuningConfig, "NO_CACHE"), (PromptTuningConfig, "VIRTUAL_TOKENS")))
def test_virtual_tokens_take_the_plain_pass(config, code):
    model = get_peft_model(tiny("llama"), config(task_type="CAUSAL_LM", num_virtual_tokens=3))
    input_ids, mask = completions()
    log_probs = fastgen.token_log_probs(model, input_ids, mask, COLUMNS)
    assert left_alone_because(fastgen.explain(), code)
    expected = model(input_ids, attention_mask=mask).logits[:, -COLUMNS - 1 : -1].log_softmax(dim=-1)
    expected = expected.gather(-1, input_ids[:, -COLUMNS:, None]).squeeze(-1) * mask[:, -COLUMNS:]
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)


def test_gradient_checkpointing_computes_layers_again(tokens):
    model, (input_ids, mask) = tiny("llama").train(), completions()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_agrees(model, input_ids, mask)
    assert fastgen.explain().prefix_tokens_saved == 8 * 4
    calls, layer = [], model.model.layers[0]
    activation = layer.mlp.act_fn.forward

    def counting(states):
        calls.append(len(states))
        return activation(states)

    layer.mlp.act_fn.forward = FunctionType(counting.__code__, {"__name__": "torch.nn"}, closure=counting.__closure__)
    log_probs = fastgen.token_log_probs(model, input_ids, mask, COLUMNS)
    assert fastgen.explain().prefix_tokens_saved == 8 * 4
    calls.clear()
    log_probs.sum().backward()
    assert sorted(calls) == [1, 2, 6]  # the row alone, the beginnings, the rests
    assert layer.gradient_checkpointing and "forward" not in vars(layer)


@pytest.mark.parametrize(
    "change, code",
    (
        (lambda model: model.gradient_checkpointing_enable({"use_reentrant": True}), "TRAINING"),
        (lambda model: setattr(model.model.layers[0].self_attn, "attention_dropout", 0.1), "TRAINING"),
        (lambda model: model.model.layers[0].register_forward_hook(lambda *args: None), "HOOKS"),
    ),
    ids=("reentrant checkpoints", "dropout", "hook"),
)
def test_models_that_cannot_be_shared_take_the_plain_pass(change, code, tokens, monkeypatch):
    model, (input_ids, mask) = tiny("llama").train(), completions()
    change(model)
    fastgen.token_log_probs(model, input_ids, mask, COLUMNS).sum().backward()
    assert left_alone_because(fastgen.explain(), code) and tokens[-1:] == [7 * 14]


def test_a_window_shorter_than_the_rows_takes_the_plain_pass():
    model, (input_ids, mask) = tiny("mistral", sliding_window=6), completions()
    assert_agrees(model, input_ids, mask)
    assert left_alone_because(fastgen.explain(), "SLIDING_WINDOW")


def test_experts_whose_routers_have_a_loss_share():
    """The loss of parts of the rows would need masks of their own."""
    model, (input_ids, mask) = tiny("mixtral", output_router_logits=True), completions()
    assert_agrees(model, input_ids, mask)
    assert fastgen.explain().prefix_tokens_saved == 8 * 4


@pytest.mark.parametrize("dtype", (torch.bool, torch.bfloat16, torch.float32))
def test_masks_of_any_dtype_share(dtype):
    model, (input_ids, mask) = tiny("llama"), completions()
    assert_agrees(model, input_ids, mask.to(dtype))
    assert fastgen.explain().prefix_tokens_saved == 8 * 4


def test_a_mask_with_holes_takes_the_plain_pass():
    input_ids, mask = completions()
    mask[0, 5] = 0
    assert_agrees(tiny("llama"), input_ids, mask)
    assert left_alone_because(fastgen.explain(), "PADDING_INSIDE")


def test_short_prompts_and_rows_alone_take_one_forward(tokens):
    model, (input_ids, mask) = tiny("llama"), completions()
    with configured(share="auto"):
        fastgen.token_log_probs(model, input_ids, mask, COLUMNS)
    assert left_alone_because(fastgen.explain(), "TOO_SMALL") and tokens == [7 * 14]
    fastgen.token_log_probs(model, token_ids(7, 14), None, COLUMNS)
    assert left_alone_because(fastgen.explain(), "PREFIX_SHORT") and tokens == [7 * 14] * 2


@pytest.mark.parametrize(
    "options, message",
    (
        ({"completion_length": 0}, "completion_length is 0 .accepted: an integer from 1 to 13"),
        ({"completion_length": 14}, "completion_length is 14 .accepted: an integer from 1 to 13"),
        ({"completion_length": 6.0}, "completion_length is 6.0 .accepted: an integer from 1 to 13"),
        ({"completion_length": "6"}, "completion_length is '6' .accepted: an integer from 1 to 13"),
        ({"attention_mask": [[1]]}, r"attention_mask is a list .accepted: a tensor \[rows, length\]"),
        ({"temperature": 0.0}, "temperature is 0.0 .accepted: a number above 0"),
        ({"attention_mask": torch.ones(7, 13)}, r"attention_mask \[7, 13\] .accepted: both \[rows, length\]"),
    ),
)
def test_errors_name_the_argument_and_what_is_accepted(options, message):
    arguments = {"input_ids": completions()[0], "attention_mask": None, "completion_length": COLUMNS}
    with pytest.raises((TypeError, ValueError), match=message):
        fastgen.token_log_probs(tiny("llama"), **arguments | options)


def test_encoder_decoders_are_refused():
    with pytest.raises(ValueError, match=r"has an encoder .accepted: decoder-only models"):
        fastgen.token_log_probs(tiny("t5"), *completions(), COLUMNS)
